"""Files written tensor by tensor are what safetensors writes at once; directories appear when they are complete."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, GenerationConfig

from lightning_megatron_rl.models.hf import writer as hf_writer
from lightning_megatron_rl.models.hf.files import INDEX_FILE, num_weights, origin, settings_files, weight_map
from lightning_megatron_rl.models.hf.save import compare_files, describe_difference
from lightning_megatron_rl.models.hf.writer import (
    SAFETENSORS_DTYPES,
    CheckpointWriter,
    PartialDirectory,
    SafetensorsFile,
)
from tests.command_line import ROOT


def test_file_is_read_by_safetensors(tmp_path: Path):
    """Every type, no dimensions, no numbers, rows that do not lie one after the other, a name beyond ASCII."""
    tensors = {str(dtype): torch.tensor([[0, 1], [1, 0], [1, 1]]).to(dtype) for dtype in SAFETENSORS_DTYPES}
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "größe": torch.arange(6.0).view(2, 3)}
    tensors["transposed"] = torch.arange(6, dtype=torch.bfloat16).view(2, 3).T
    file = SafetensorsFile(tmp_path / "file.safetensors")
    for name, tensor in tensors.items():
        file.add(name, tensor)
    assert file.names == list(tensors)
    file.close()
    loaded = load_file(tmp_path / "file.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor), name


@pytest.mark.parametrize("limit", ["bytes", "header"])
def test_tensors_are_shared_out_over_files(
    qwen3_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
):
    """By their size, and by the room that is kept for names."""
    if limit == "header":
        monkeypatch.setattr(hf_writer, "_HEADER_SIZE", 1000)
    writer = CheckpointWriter(tmp_path / "out", 100 if limit == "bytes" else 10**9)
    tensors = {f"tensor.{number}": torch.full((10,), float(number)) for number in range(12)}
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.finish(qwen3_dir, AutoConfig.from_pretrained(qwen3_dir), torch.float32)
    files = sorted(tmp_path.glob("out/*.safetensors"))
    assert len(files) == (6 if limit == "bytes" else 2)
    index = json.loads((tmp_path / "out" / INDEX_FILE).read_text())
    assert index["metadata"]["total_size"] == 12 * 40
    assert compare_files(tensors.items(), tmp_path / "out") == []
    assert {name: file for file in files for name in load_file(file)}.keys() == tensors.keys()


def test_what_differs_is_named(qwen3_dir: Path, tmp_path: Path):
    writer = CheckpointWriter(tmp_path / "out", 10**9)
    for name in ("same", "changed", "extra"):
        writer.add(name, torch.tensor([1.0, 2.0]))
    writer.finish(qwen3_dir, AutoConfig.from_pretrained(qwen3_dir), torch.float32)
    wanted = {"same": torch.tensor([1.0, 2.0]), "changed": torch.tensor([1.0, 2.5]), "lost": torch.ones(1)}
    assert compare_files(wanted.items(), tmp_path / "out") == [
        "changed: 1 of 2 numbers differ, by up to 0.5",
        "lost is missing",
        "extra does not belong there",
    ]


def test_differences_of_two_tensors():
    nan = torch.tensor([torch.nan, 1.0])
    assert describe_difference(nan, nan.clone()) is None, "not a number, and the same bits"
    assert describe_difference(torch.tensor([0.0]), torch.tensor([-0.0])) == "1 of 1 numbers differ, by up to 0"
    assert describe_difference(torch.ones(2), torch.ones(3)) == "torch.float32 (2,) instead of torch.float32 (3,)"
    assert (
        describe_difference(torch.ones(2).half(), torch.ones(2)) == "torch.float16 (2,) instead of torch.float32 (2,)"
    )
    assert describe_difference(torch.empty(0), torch.empty(0)) is None


def test_directory_that_is_not_empty_is_kept(tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    with pytest.raises(ValueError, match="exists and is not empty"):
        CheckpointWriter(tmp_path / "out", 10)
    with PartialDirectory(tmp_path / "new") as partial:
        (tmp_path / "new").mkdir()
        (tmp_path / "new" / "theirs").touch()
        with pytest.raises(OSError):
            partial.publish()
    assert names(tmp_path) == ["new", "out"]
    assert names(tmp_path / "new") == ["theirs"]
    assert names(tmp_path / "out") == ["file"]


def test_directory_appears_in_place_of_an_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also if it is the working directory."""
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    with PartialDirectory(Path()) as partial:
        (partial.path / "file").touch()
        partial.publish()
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["file"]


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_stays(tmp_path: Path):
    code = """
import sys, time
from pathlib import Path
from lightning_megatron_rl.models.hf.writer import CheckpointWriter

writer = CheckpointWriter(Path(sys.argv[1]), 10)
print("ready", flush=True)
time.sleep(60)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "out")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert names(tmp_path) == [".out.lightning-megatron-rl-partial"]
        with pytest.raises(OSError, match=r"another process is writing .*-partial: wait for it, or choose"):
            CheckpointWriter(tmp_path / "out", 10)
        assert names(tmp_path) == [".out.lightning-megatron-rl-partial"]
        process.kill()
        process.wait()
    assert names(tmp_path) == [".out.lightning-megatron-rl-partial"]
    writer = CheckpointWriter(tmp_path / "out", 10)
    writer.abandon()
    assert names(tmp_path) == []


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def test_abandoned_checkpoint_leaves_nothing(tmp_path: Path):
    writer = CheckpointWriter(tmp_path / "out", 10)
    writer.add("tensor", torch.ones(2))
    writer.abandon()
    assert list(tmp_path.iterdir()) == []


def test_what_a_config_says_of_generation_is_kept(qwen3_dir: Path, tmp_path: Path):
    """Transformers reads `temperature` in config.json, if no generation_config.json is there, but does not save it."""
    source, target = tmp_path / "source", tmp_path / "out"
    shutil.copytree(qwen3_dir, source, ignore=shutil.ignore_patterns("generation_config.json"))
    said = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
    fields = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(fields | said))
    writer = CheckpointWriter(target, 10_000)
    writer.add("tensor", torch.ones(2))
    writer.finish(source, AutoConfig.from_pretrained(source), torch.float32)
    assert not (target / "generation_config.json").exists(), "vLLM would sample by it, as it does not from the source"
    ours, theirs = (GenerationConfig.from_pretrained(path, "config.json").to_dict() for path in (target, source))
    assert ours == theirs
    assert said.items() <= ours.items()


def test_settings_of_a_checkpoint_tell_its_names_and_its_origin(qwen3_dir: Path, tmp_path: Path):
    files = settings_files(qwen3_dir, "acme/tiny")
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= files.keys()
    assert not [name for name in files if name.endswith(".safetensors")]
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert origin(tmp_path) == "acme/tiny"
    assert origin(qwen3_dir) is None
    assert weight_map(tmp_path) == weight_map(qwen3_dir) != {}


def test_weights_are_counted_from_the_headers(qwen3_dir: Path):
    assert num_weights(qwen3_dir) == sum(
        tensor.numel() for tensor in load_file(qwen3_dir / "model.safetensors").values()
    )
