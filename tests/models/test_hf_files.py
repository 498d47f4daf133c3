"""Finding checkpoints: directories, the hub's cache, and what is said about names that lead nowhere."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from lightning_megatron_rl.models.hf.files import (
    INDEX_FILE,
    check_settings,
    copy_settings,
    local_checkpoint,
    read_header,
    settings_files,
)
from lightning_megatron_rl.rollout.model_directory import CheckpointLayout
from tests.distributed import WorkerPool
from tests.models.workers import cached_hub_model

REVISION = "0123456789abcdef0123456789abcdef01234567"


def test_a_directory_is_taken_as_it_is(checkpoint: Callable[[str], Path]):
    assert local_checkpoint(str(checkpoint("qwen3"))) == checkpoint("qwen3")


@pytest.mark.parametrize("name", ["/no/such/model", "./model", "~/no-such-model-here", "gpt2", "a/b/c"])
def test_a_path_that_does_not_exist_is_named(name: str):
    with pytest.raises(ValueError, match=f"{name!r} is neither a directory nor a hub name"):
        local_checkpoint(name)


def test_a_directory_without_config_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"has no config\.json: give the directory"):
        local_checkpoint(str(tmp_path))


def test_a_directory_without_weights_is_refused(checkpoint: Callable[[str], Path], tmp_path: Path):
    shutil.copy(checkpoint("qwen3") / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match=r"no \*\.safetensors weights: save the model again"):
        local_checkpoint(str(tmp_path))


def test_settings_of_a_checkpoint_are_no_model(checkpoint: Callable[[str], Path], tmp_path: Path):
    for name, content in settings_files(checkpoint("llama"), "a/model").items():
        (tmp_path / "step.ckpt" / "hf").mkdir(parents=True, exist_ok=True)
        (tmp_path / "step.ckpt" / "hf" / name).write_bytes(content)
    with pytest.raises(ValueError, match=r"no weights: `lightning-megatron-rl convert .*step\.ckpt DIRECTORY` makes a"):
        local_checkpoint(str(tmp_path / "step.ckpt" / "hf"))


@pytest.mark.parametrize("removed", [(), ("model.safetensors",), ("model.safetensors", "config.json")])
def test_a_directory_with_an_adapter_is_refused(checkpoint: Callable[[str], Path], tmp_path: Path, removed):
    """Beside a whole model, too: Transformers would load the model that the adapter names."""
    copy = Path(shutil.copytree(checkpoint("llama"), tmp_path / "copy"))
    (copy / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "a/model"}))
    (copy / "adapter_model.safetensors").write_bytes((copy / "model.safetensors").read_bytes())
    for name in removed:
        (copy / name).unlink()
    with pytest.raises(ValueError, match=r"holds an adapter of PEFT's \(adapter_config.json\).*Merge it"):
        local_checkpoint(str(copy))


def test_a_damaged_file_is_named(checkpoint: Callable[[str], Path], tmp_path: Path):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes((checkpoint("qwen3") / weights.name).read_bytes()[:500])
    with pytest.raises(ValueError, match=rf"{weights} is damaged or no safetensors file"):
        read_header(weights)


def test_a_data_set_beside_a_model_is_not_copied(checkpoint: Callable[[str], Path], tmp_path: Path):
    """It would be read into memory, and written into every checkpoint and export."""
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(checkpoint("qwen3"), source)
    (source / "LICENSE").write_text("yours")
    with (source / "train.jsonl").open("wb") as file:
        file.truncate(100_000_001)
    files = settings_files(source, "mine").keys()
    assert {"LICENSE", "tokenizer.json"} <= files
    assert "train.jsonl" not in files
    target.mkdir()
    copy_settings(source, target)
    assert files - {path.name for path in target.iterdir()} == {"config.json", INDEX_FILE}


def test_chat_templates_with_names_are_copied_too(checkpoint: Callable[[str], Path], tmp_path: Path):
    """Transformers keeps them in a directory of their own."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint("qwen3"))
    templates = {"default": tokenizer.chat_template, "tool_use": "{{ messages }}"}
    tokenizer.chat_template = templates
    source = shutil.copytree(checkpoint("qwen3"), tmp_path / "source")
    tokenizer.save_pretrained(source)
    copied, written = tmp_path / "copied", tmp_path / "written"  # by exports; from checkpoints
    copied.mkdir()
    copy_settings(source, copied)
    for name, content in settings_files(source, "source").items():
        (written / name).parent.mkdir(parents=True, exist_ok=True)
        (written / name).write_bytes(content)
    for directory in (copied, written):
        assert AutoTokenizer.from_pretrained(directory).chat_template == templates


def damage(file: Path, kind: str) -> None:
    content = file.read_bytes()
    header = content.index(b"}", 8)
    file.write_bytes(
        {
            "empty": b"",
            "cut": content[:-100],
            "longer": content + b"0" * 10,
            "header cut": content[:500],
            "header": content[:header] + b"?" + content[header + 1 :],
            "no object": (2).to_bytes(8, "little") + b"[]",
            "no such type": content.replace(b'"F32"', b'"G32"', 1),
        }[kind]
    )


@pytest.mark.parametrize("kind", ["empty", "cut", "longer", "header cut", "header", "no object", "no such type"])
@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "sharded"])
def test_a_damaged_file_of_weights_is_refused_by_name(
    checkpoint: Callable[[str], Path], tmp_path: Path, kind: str, sharded: bool
):
    model = Path(shutil.copytree(checkpoint("qwen3"), tmp_path / "model"))
    if sharded:
        tensors = load_file(model / "model.safetensors")
        (model / "model.safetensors").unlink()
        shards = [dict(list(tensors.items())[part::2]) for part in range(2)]
        names: dict[str, str] = {}
        for part, shard in enumerate(shards):
            save_file(shard, model / f"model-{part}.safetensors")
            names |= dict.fromkeys(shard, f"model-{part}.safetensors")
        (model / INDEX_FILE).write_text(json.dumps({"weight_map": names}))
    local_checkpoint(str(model))
    file = sorted(model.glob("*.safetensors"))[-1]
    damage(file, kind)
    with pytest.raises(ValueError, match=rf"^{file} is damaged.*not complete, repeat it") as told:
        local_checkpoint(str(model))
    if kind == "cut":
        size = file.stat().st_size
        assert f"= {size + 100:,} bytes, and it has {size:,};" in str(told.value)


@pytest.mark.parametrize("name", ["config.json", INDEX_FILE])
@pytest.mark.parametrize("content", [b'{"a": 1,\n', b"[]", b"\xff\xfe"])
def test_a_damaged_config_is_refused_by_name(
    checkpoint: Callable[[str], Path], tmp_path: Path, name: str, content: bytes
):
    model = Path(shutil.copytree(checkpoint("qwen3"), tmp_path / "model"))
    (model / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"^{model / name} is damaged: it cannot be read as JSON \(.*repeat it"):
        local_checkpoint(str(model))
    with pytest.raises(ValueError, match=rf"^{model / name} is damaged: it cannot be read as JSON \(.*repeat it"):
        check_settings(model)


def test_a_hub_name_leads_to_the_cache_on_all_ranks(
    checkpoint: Callable[[str], Path], tmp_path: Path, worker_pool: WorkerPool
):
    model = tmp_path / "models--acme--tiny"
    shutil.copytree(checkpoint("qwen3"), model / "snapshots" / REVISION)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(REVISION)
    results = worker_pool.run(cached_hub_model, "acme/tiny", str(tmp_path), world_size=2)
    assert results == [str(model / "snapshots" / REVISION)] * 2


def test_a_failed_download_is_reported_by_all_ranks(tmp_path: Path, worker_pool: WorkerPool):
    results = worker_pool.run(cached_hub_model, "acme/absent", str(tmp_path), world_size=2)
    assert all(result.startswith("ValueError: cannot download model 'acme/absent'") for result in results)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "a/../../b.safetensors"])
def test_an_index_names_no_file_outside(checkpoint: Callable[[str], Path], tmp_path: Path, name: str):
    """Links inside are left alone: the hub's cache is made of them."""
    model = Path(shutil.copytree(checkpoint("qwen3"), tmp_path / "model"))
    (model / INDEX_FILE).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(ValueError, match=rf"{INDEX_FILE} names a file outside its directory: .*It was not opened"):
        local_checkpoint(str(model))
    with pytest.raises(ValueError, match="outside its directory"):
        CheckpointLayout.read(model)
