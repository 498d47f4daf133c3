"""What is read from a checkpoint is data: damaged files are refused by name, and nothing in a file is executed."""

import pickle
import shutil
from io import BytesIO
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron_rl.checkpoints.manifest import MANIFEST_FILE, read_manifest, record_file, write_manifest
from tests.checkpoints.test_saving import make_module
from tests.notices import collected
from tests.training import SequenceDataModule, frozen_sequences, make_trainer

Notes = dict[str, Any]


def save_two(model: Path, directory: Path, world_size: int) -> None:
    keeper = ModelCheckpoint(directory, "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = make_trainer({}, world_size, max_steps=2, enable_checkpointing=True, callbacks=[keeper])
    trainer.fit(make_module(model), SequenceDataModule(frozen_sequences(8), 4))


@pytest.fixture(scope="module")
def saved(worker_pool, qwen3_dir, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    worker_pool.run(save_two, qwen3_dir, directory, 2, world_size=2, init_process_group=False)
    return directory


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


class KeepsWeights(pl.Callback):
    """Copies the weights before anything is restored; none, if the model was not even built."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.weights = [parameter.detach().clone() for parameter in module.parameters()]


def resume(model: Path, path: Path, world_size: int, strategy: dict[str, Any]) -> Notes:
    """Take a third step from a checkpoint; or say what was raised, and whether a weight has changed by then."""
    keeps, module = KeepsWeights(), make_module(model)
    trainer = make_trainer(strategy, world_size, max_steps=3, callbacks=[keeps])
    notes: Notes = {"error": ""}
    with collected() as caught:
        try:
            trainer.fit(module, SequenceDataModule(frozen_sequences(12), 4), ckpt_path=str(path))
        except ValueError as error:
            notes["error"] = str(error)
    pairs = zip(keeps.weights, module.parameters(), strict=True)
    notes["untouched"] = all(torch.equal(old, new) for old, new in pairs)
    notes["warnings"] = [message for message in caught if "damaged" in message]
    notes["steps"] = trainer.global_step
    return notes


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def resume_each(model: Path, paths: list[Path], world_size: int) -> list[Notes]:
    return [resume(model, path, world_size, {}) for path in paths]


def test_damaged_checkpoints_are_refused_by_file(worker_pool, qwen3_dir, saved, tmp_path):
    """Before any weight is touched, on every rank, whichever rank reads the file."""
    names = ["sharded/__1_0.distcp", "sharded/.metadata", "trainer.pt", "rng/0.pt", MANIFEST_FILE]
    paths = []
    for number, name in enumerate(names):
        paths.append(Path(shutil.copytree(saved / "step=2.ckpt", tmp_path / f"{number}.ckpt")))
        flip(paths[-1] / name)
    for mine in worker_pool.run(resume_each, qwen3_dir, paths, 2, world_size=2, init_process_group=False):
        for notes, path, name in zip(mine, paths, names, strict=True):
            assert f"checkpoint {path} is damaged: {path / name} " in notes["error"]
            assert "fall_back_to_previous=True" in notes["error"]
            assert notes["untouched"]


def fall_back(model: Path, directory: Path, world_size: int) -> list[Notes]:
    latest = directory / "step=2.ckpt"
    strategy = {"fall_back_to_previous": True}
    taken = resume(model, latest, world_size, strategy)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        (directory / "step=1.ckpt" / "trainer.pt").unlink()
    torch.distributed.barrier()
    return [taken, resume(model, latest, world_size, strategy)]


def test_the_previous_checkpoint_is_taken_if_the_user_says_so(worker_pool, qwen3_dir, copy):
    """With a warning that names both; and if that is damaged too, the first is refused."""
    flip(copy / "step=2.ckpt" / "sharded" / "__0_0.distcp")
    ranks = worker_pool.run(fall_back, qwen3_dir, copy, 2, world_size=2, init_process_group=False)
    for rank, (taken, refused) in enumerate(ranks):
        assert taken["error"] == ""
        assert taken["steps"] == 3
        assert len(taken["warnings"]) == (1 if rank == 0 else 0)
        assert refused["untouched"]
        assert f"There is no other undamaged checkpoint in {copy}" in refused["error"]
    warning = ranks[0][0]["warnings"][0]
    assert str(copy / "step=2.ckpt" / "sharded" / "__0_0.distcp") in warning
    assert f"{copy / 'step=1.ckpt'} takes its place" in warning


class Malicious:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return (Path.touch, (self.mark,))


def rewrite(path: Path) -> None:
    """Make a manifest for the files as they are, as anybody can."""
    manifest = read_manifest(path)
    files = {name: record_file(path / name) for name in manifest["files"]}
    write_manifest(path, {key: value for key, value in manifest.items() if key not in ("files", "versions")}, files)


def plant(path: Path, where: str, mark: Path) -> None:
    """Put something that makes `mark` when it is unpickled into one file of a checkpoint."""
    if where == "sharded/.metadata":
        (path / where).write_bytes(pickle.dumps(Malicious(mark)))
    elif where.endswith(".distcp"):  # in the place of the common state, which Megatron's loader unpickles
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        places = FileSystemReader(path / "sharded").read_metadata().storage_data
        (place,) = (found for index, found in places.items() if index.fqn.startswith("common_state"))
        stream = BytesIO()
        torch.save([Malicious(mark)], stream)
        content = bytearray((path / "sharded" / place.relative_path).read_bytes())
        assert len(stream.getvalue()) <= place.length
        content[place.offset : place.offset + place.length] = stream.getvalue().ljust(place.length, b"\0")
        # a zip file is read from its end: let this one end where it ends
        index = pickle.loads((path / "sharded" / ".metadata").read_bytes())
        for key, found in index.storage_data.items():
            if key.fqn.startswith("common_state"):
                found.length = len(stream.getvalue())
        (path / "sharded" / ".metadata").write_bytes(pickle.dumps(index))
        (path / "sharded" / place.relative_path).write_bytes(content)
    else:
        torch.save({"torch": Malicious(mark)}, path / where)
    rewrite(path)


PLACES = ["sharded/.metadata", "sharded/__0_0.distcp", "trainer.pt", "rng/0.pt"]


def plant_and_resume(model: Path, paths: list[Path], world_size: int) -> list[Notes]:
    notes = []
    for path, where in zip(paths, PLACES, strict=True):
        if torch.distributed.get_rank() == 0:
            plant(path, where, path / "mark")
        torch.distributed.barrier()
        try:
            error = resume(model, path, world_size, {})["error"]
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        notes.append({"error": error, "executed": (path / "mark").exists()})
    return notes


def test_nothing_in_a_checkpoint_is_executed(worker_pool, qwen3_dir, saved, tmp_path):
    """Fails with Megatron's own reader: it unpickles the index, and objects among the shards."""
    paths = [Path(shutil.copytree(saved / "step=2.ckpt", tmp_path / f"{number}.ckpt")) for number in range(4)]
    for found in worker_pool.run(plant_and_resume, qwen3_dir, paths, 2, world_size=2):
        for where, path, notes in zip(PLACES, paths, found, strict=True):
            assert not notes["executed"], where
            named = "common_state" if where.endswith(".distcp") else str(path / where)
            # rank 1 reads the states of its own generators, which are whole
            assert named in notes["error"] or (where == "rng/0.pt" and notes["error"] == ""), notes


@pytest.mark.parametrize("name", ["../../../etc/passwd", "/etc/passwd", "a/../../b", "link.distcp"])
def test_an_index_names_no_file_outside(tmp_path, name):
    """Nothing is opened, by training or by `convert`, which read through the same reader."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

    from lightning_megatron_rl.checkpoints.shards import SavedShards

    (tmp_path / "link.distcp").symlink_to("/etc/passwd")
    index = {MetadataIndex("weight"): _StorageInfo(name, 0, 10)}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({}, storage_data=index)))
    with pytest.raises(ValueError, match=r"\.metadata names a file outside its directory: .*It was not opened"):
        SavedShards(tmp_path)
    index = {MetadataIndex("weight"): _StorageInfo("__0_0.distcp", 0, 10)}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({}, storage_data=index)))
    SavedShards(tmp_path)


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("key", ["last_model_path", "kth_best_model_path", "best_k_models"])
def test_a_checkpoint_does_not_say_what_is_deleted_elsewhere(tmp_path, key, relative):
    """ModelCheckpoint deletes the worst of those that its state names; its directory may be relative."""
    from lightning_megatron_rl.checkpoints.format import _check_kept_checkpoints

    directory = Path("../logs/run") if relative else tmp_path / "run"
    state = {"dirpath": str(directory), "best_model_path": str(tmp_path / "earlier" / "step=1.ckpt")}
    inside = str(directory / "step=1.ckpt")
    _check_kept_checkpoints(
        tmp_path, {"callbacks": {"C": {**state, key: {inside: 0.0} if "models" in key else inside}}}
    )
    for outside in (str(tmp_path / "other.ckpt"), f"{directory}/../other.ckpt"):
        value = {outside: 0.0} if "models" in key else outside
        with pytest.raises(ValueError, match=r"names .*other\.ckpt as one of its checkpoints, which is outside"):
            _check_kept_checkpoints(tmp_path, {"callbacks": {"C": {**state, key: value}}})


def packed(state: Any) -> torch.Tensor:
    """As Transformer Engine packs a layer's extra state."""
    return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)


def test_extra_state_of_fp8_layers_is_looked_at_first(tmp_path):
    """Transformer Engine unpickles it. What it writes passes; code hidden in it, or in a tensor of it, does not run."""
    from lightning_megatron_rl.checkpoints.shards import check_extra_state

    mark = tmp_path / "mark"
    check_extra_state("layer._extra_state", torch.empty(0, dtype=torch.uint8))
    check_extra_state("layer._extra_state", packed({"scale_fwd": torch.ones(3), "extra": {"num_gemms": 1}}))
    stream = BytesIO()
    torch.save(Malicious(mark), stream)
    for state in (Malicious(mark), {"scale_fwd": Hidden(stream.getvalue())}):
        with pytest.raises(ValueError, match=r"layer\._extra_state among the shards is no state of an fp8 layer"):
            check_extra_state("layer._extra_state", packed(state))
    assert not mark.exists()


class Hidden:
    """Unpickled as the storage of a tensor is."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return (torch.storage._load_from_bytes, (self.content,))
