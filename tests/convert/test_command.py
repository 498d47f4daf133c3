"""The command's arguments, and what it refuses before it writes anything."""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from lightning_megatron_rl.checkpoints.manifest import MANIFEST_FILE
from lightning_megatron_rl.convert.command import make_parser, parse_size
from lightning_megatron_rl.models.hf.writer import check_space
from tests.command_line import ROOT
from tests.convert.jobs import command, convert, must_convert
from tests.distributed import WorkerPool


@pytest.fixture(scope="module")
def source(worker_pool: WorkerPool, qwen3_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "qwen3.ckpt"
    must_convert(worker_pool, qwen3_dir, path)
    return path


@pytest.fixture
def copy(source: Path, tmp_path: Path) -> Path:
    """A checkpoint to damage."""
    return Path(shutil.copytree(source, tmp_path / "copy.ckpt"))


def refused(pool: WorkerPool, *arguments: object) -> str:
    """What the command says when it refuses; nothing is written."""
    destination = Path(str(arguments[1]))
    beside = sorted(destination.parent.iterdir()) if destination.parent.is_dir() else None
    code, shown = convert(pool, *arguments)
    assert code in (1, 2), shown
    if beside is not None:
        assert sorted(destination.parent.iterdir()) == beside
    return shown


def test_source_that_is_neither(worker_pool: WorkerPool, tmp_path: Path):
    (tmp_path / "nothing").mkdir()
    shown = refused(worker_pool, tmp_path / "nothing", tmp_path / "out")
    assert "is neither a distributed checkpoint nor a Hugging Face model" in shown
    shown = refused(worker_pool, tmp_path / "absent", tmp_path / "out")
    assert "is neither a directory nor a hub name" in shown


def test_destination_that_is_not_empty(qwen3_dir: Path, tmp_path: Path):
    (tmp_path / "file").touch()
    code, shown = command([str(qwen3_dir), str(tmp_path)])
    assert code == 2
    assert "exists and is not empty: remove it or choose another directory" in shown


def test_destination_inside_a_checkpoint(worker_pool: WorkerPool, qwen3_dir: Path, copy: Path):
    """It would be deleted with it."""
    before = sorted(copy.rglob("*"))
    for given in (copy, qwen3_dir):
        shown = refused(worker_pool, given, copy / "exports" / "hf")
        assert f"is inside the checkpoint {copy}, and goes with it: choose another directory" in shown
    assert sorted(copy.rglob("*")) == before


def test_numbers_that_float16_does_not_hold(worker_pool: WorkerPool, qwen3_dir: Path, tmp_path: Path):
    large = Path(shutil.copytree(qwen3_dir, tmp_path / "large"))
    weights = load_file(large / "model.safetensors")
    weights["model.norm.weight"][3] = 1e5
    save_file(weights, large / "model.safetensors", {"format": "pt"})
    must_convert(worker_pool, large, tmp_path / "large.ckpt")
    shown = refused(worker_pool, tmp_path / "large.ckpt", tmp_path / "half", "--dtype", "float16")
    assert "failed at model.norm.weight: " in shown
    assert "in float16, which ends at 65504, it has 0 NaN and 1 infinite of 64 numbers: write bfloat16" in shown
    must_convert(worker_pool, tmp_path / "large.ckpt", tmp_path / "half", "--dtype", "bfloat16")


@pytest.mark.parametrize("way", ["to checkpoint", "to hf"])
def test_no_room_is_said_with_its_arithmetic(worker_pool: WorkerPool, qwen3_dir: Path, source: Path, way: str):
    """/proc is a file system without room."""
    code, shown = convert(worker_pool, source if way == "to hf" else qwen3_dir, "/proc/out")
    assert code == 1
    assert "needs 0.00 GB (the" in shown
    assert "and its file system has 0.00 GB free: make room for 0.00 GB" in shown


def test_space_is_counted(tmp_path: Path):
    check_space(tmp_path / "not" / "yet", 10, "ten")
    with pytest.raises(OSError, match=r"needs 1000000000\.00 GB \(weights\), and its file system has .* GB free"):
        check_space(tmp_path / "not" / "yet", 10**18, "weights")


def test_checkpoint_of_another_model(
    worker_pool: WorkerPool, source: Path, checkpoint: Callable[[str], Path], tmp_path: Path
):
    shown = refused(worker_pool, source, tmp_path / "out", "--model", checkpoint("llama"))
    assert "is of another model than" in shown
    assert "Give the model that it was trained from with --model." in shown


def test_missing_shard(worker_pool: WorkerPool, copy: Path, tmp_path: Path):
    (shard,) = (copy / "sharded").glob("*.distcp")
    shard.unlink()
    assert f"{shard} is missing" in refused(worker_pool, copy, tmp_path / "out")


def test_shard_that_was_cut_short(worker_pool: WorkerPool, copy: Path, tmp_path: Path):
    (shard,) = (copy / "sharded").glob("*.distcp")
    size = shard.stat().st_size
    with shard.open("r+b") as stream:
        stream.truncate(size - 100)
    shown = refused(worker_pool, copy, tmp_path / "out")
    assert f"{shard}" in shown


def test_flipped_byte(worker_pool: WorkerPool, copy: Path, tmp_path: Path):
    (shard,) = (copy / "sharded").glob("*.distcp")
    with shard.open("r+b") as stream:
        stream.seek(shard.stat().st_size // 2)
        byte = stream.read(1)
        stream.seek(-1, 1)
        stream.write(bytes([byte[0] ^ 1]))
    shown = refused(worker_pool, copy, tmp_path / "out")
    assert f"{shard} has the SHA-256" in shown
    assert "Restore the file from a copy, or convert another one." in shown
    assert "fall_back_to_previous" not in shown, "which is no option of this command"
    must_convert(worker_pool, copy, tmp_path / "out", "--skip-checksums")


@pytest.mark.parametrize("way", ["to checkpoint", "to hf"])
def test_directory_that_takes_no_files(
    worker_pool: WorkerPool, qwen3_dir: Path, source: Path, tmp_path: Path, way: str
):
    (tmp_path / "file").touch()
    destination = tmp_path / "file" / "out"
    shown = refused(worker_pool, source if way == "to hf" else qwen3_dir, destination)
    assert f"{destination} cannot be written: {tmp_path / 'file'}: Not a directory. Choose another directory." in shown


def test_newer_format(worker_pool: WorkerPool, copy: Path, tmp_path: Path):
    layout = json.loads((copy / MANIFEST_FILE).read_text())
    (copy / MANIFEST_FILE).write_text(json.dumps({**layout, "format_version": 99}))
    assert "upgrade lightning-megatron-rl" in refused(worker_pool, copy, tmp_path / "out")


def test_missing_file_of_a_hugging_face_model(
    worker_pool: WorkerPool, source: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
):
    model = tmp_path_factory.mktemp("hf") / "model"
    must_convert(worker_pool, source, model, "--max-shard-size", "200KB")
    sorted(model.glob("*.safetensors"))[1].unlink()
    shown = refused(worker_pool, model, tmp_path / "out")
    assert "lacks model-00002-of-" in shown
    assert "the download or copy is not complete, repeat it" in shown


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_damaged_file_of_a_hugging_face_model(
    worker_pool: WorkerPool, qwen3_dir: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, name: str
):
    model = Path(shutil.copytree(qwen3_dir, tmp_path_factory.mktemp("hf") / "model"))
    file = model / name
    file.write_bytes(file.read_bytes()[:-100])
    shown = refused(worker_pool, model, tmp_path / "out")
    assert f"error: {file} is damaged" in shown
    assert "the download or copy is not complete, repeat it" in shown


@pytest.mark.parametrize(
    "arguments", [["--part", "critic"], ["--model", "x/y"], ["--adapter", "peft"], ["--skip-checksums"]]
)
def test_options_that_a_hugging_face_model_has_no_use_for(
    worker_pool: WorkerPool, qwen3_dir: Path, tmp_path: Path, arguments: list[str]
):
    shown = refused(worker_pool, qwen3_dir, tmp_path / "out", *arguments)
    assert "belongs to a distributed checkpoint" in shown


def test_whole_model_has_no_adapters(worker_pool: WorkerPool, source: Path, tmp_path: Path):
    shown = refused(worker_pool, source, tmp_path / "out", "--adapter", "peft")
    assert "holds a whole model, no adapters" in shown


def test_sizes():
    assert [parse_size(text) for text in ("5GB", "200kb", "7")] == [5 * 10**9, 200_000, 7]
    for text in ("", "GB", "1.5GB", "0", "-1", "5TB"):
        with pytest.raises(argparse.ArgumentTypeError, match="is no size"):
            parse_size(text)
    assert make_parser().parse_args(["a", "b"]).max_shard_size == 5 * 10**9


def test_help_is_light():
    """It imports neither torch nor Megatron."""
    code = (
        "import sys; from lightning_megatron_rl.convert.command import make_parser; make_parser().format_help();"
        " print(sorted({'torch', 'megatron', 'lightning'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=180, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.slow  # a process of its own for each
@pytest.mark.parametrize("way", ["to checkpoint", "to hf"])
def test_interrupted_it_says_one_line_and_leaves_nothing(qwen3_dir: Path, source: Path, tmp_path: Path, way: str):
    """Ctrl-C when there is something to remove."""
    out = tmp_path / "out"
    arguments = [str(source if way == "to hf" else qwen3_dir), str(out)]
    code = f"""
import signal, sys
from lightning_megatron_rl.utilities import files
from lightning_megatron_rl.convert.command import main
from lightning_megatron_rl.models.hf import writer as hf_writer
from lightning_megatron_rl.checkpoints import format as checkpoint

def interrupt(function):
    def called(*args, **kwargs):
        print(*[entry.name for entry in files.Path({str(tmp_path)!r}).iterdir()])
        signal.raise_signal(signal.SIGINT)
        return function(*args, **kwargs)
    return called

hf_writer.SafetensorsFile.add = interrupt(hf_writer.SafetensorsFile.add)
checkpoint.write_manifest = interrupt(checkpoint.write_manifest)
sys.exit(main({arguments!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 130, done.stderr
    assert "out" in done.stdout, "something was there"
    assert "Traceback" not in done.stderr
    assert done.stderr.endswith("lightning-megatron-rl convert: interrupted; DST is complete or not there\n")
    assert list(tmp_path.iterdir()) == []


def test_destination_that_is_a_link(worker_pool: WorkerPool, qwen3_dir: Path, source: Path, tmp_path: Path):
    """What is written lies where the link leads, on another disk perhaps."""
    for name, given, file in (("hf", source, "config.json"), ("ckpt", qwen3_dir, MANIFEST_FILE)):
        (tmp_path / f"large-{name}").mkdir()
        link = tmp_path / name
        link.symlink_to(f"large-{name}")
        must_convert(worker_pool, given, link)
        assert link.is_symlink()
        assert (tmp_path / f"large-{name}" / file).is_file()
