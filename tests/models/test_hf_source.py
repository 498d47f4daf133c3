"""Tensors that Megatron-Bridge reads are those of the files, which are opened for their lists of tensors once."""

import json
import os
import pickle
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lightning_megatron_rl.compat.bridge import import_auto_bridge
from lightning_megatron_rl.models.families.registry import bridges
from lightning_megatron_rl.models.hf import source as hf_source
from lightning_megatron_rl.models.hf.model import HFModel
from lightning_megatron_rl.models.hf.source import Names, source_class
from lightning_megatron_rl.models.hf.writer import SafetensorsFile


@pytest.fixture(autouse=True)
def bridge():
    """What `HFModel` imports before it asks for the class."""
    import_auto_bridge(bridges())


def save(directory: Path, files: dict[str, dict[str, Tensor]]) -> None:
    """Save tensors, by file, with their index."""
    for file, tensors in files.items():
        save_file(tensors, directory / file, {"format": "pt"})
    places = {name: file for file, tensors in files.items() for name in tensors}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def same(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same, bit by bit."""
    assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape)
    return tensor.flatten().view(torch.uint8).tolist() == other.flatten().view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", [*hf_source._DTYPES.values(), torch.uint16], ids=str)
def test_tensors_are_those_of_the_file(tmp_path, dtype):
    tensors = {"matrix": torch.arange(12).view(3, 4).to(dtype), "none": torch.empty(0, 3, dtype=dtype)}
    save(tmp_path, {"a.safetensors": tensors, "b.safetensors": {"vector": torch.ones(2).to(dtype)}})
    found = source_class()(tmp_path).load_tensors(["vector", "matrix", "none"])
    assert list(found) == ["vector", "matrix", "none"]
    assert all(same(found[name], tensor) for name, tensor in tensors.items())
    assert same(found["vector"], torch.ones(2).to(dtype))


def test_a_tensor_may_lie_anywhere(tmp_path):
    file = SafetensorsFile(tmp_path / "model.safetensors")
    file.add("odd", torch.ones(3, dtype=torch.bool))
    file.add("scalar", torch.tensor(0.5))
    file.add("weight", torch.arange(6.0).view(2, 3))
    file.close()
    source = source_class()(tmp_path)
    assert source.get_all_keys() == ["odd", "scalar", "weight"]
    found = source.load_tensors(["weight", "scalar"])
    assert same(found["weight"], torch.arange(6.0).view(2, 3))
    assert same(found["scalar"], torch.tensor(0.5))


def test_lists_of_tensors_are_read_once(tmp_path):
    files = {f"{number}.safetensors": {f"weight.{number}": torch.ones(number)} for number in (1, 2)}
    save(tmp_path, files)
    source = source_class()(tmp_path)
    with mock.patch.object(hf_source, "read_header", wraps=hf_source.read_header) as read:
        for _ in range(3):
            assert len(source["weight.1"]) == 1
            assert len(source["weight.2"]) == 2
    assert read.call_count == 2
    (tmp_path / "1.safetensors").unlink()
    save_file({"weight.1": torch.ones(5)}, tmp_path / "1.safetensors")
    assert len(source["weight.1"]) == 5


def test_a_tensor_that_only_the_index_has(tmp_path):
    save(tmp_path, {"a.safetensors": {"weight": torch.ones(1)}})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"other": "a.safetensors"}}))
    with pytest.raises(KeyError, match=r"a\.safetensors has no tensor other"):
        source_class()(tmp_path).load_tensors(["other"])


def test_names_are_a_list():
    names = Names(["b", "a"])
    assert names == ["b", "a"]
    assert "a" in names
    assert "c" not in names


def test_models_are_read_like_this(qwen3_moe_dir):
    source = HFModel(str(qwen3_moe_dir))._bridge.hf_pretrained.state.source
    assert isinstance(source, source_class())
    assert isinstance(source.get_all_keys(), Names)


def test_tensors_that_are_held_keep_no_file_open(tmp_path):
    names = [f"weight.{number}" for number in range(50)]
    save(tmp_path, {"a.safetensors": {name: torch.ones(4) for name in names}})
    source = source_class()(tmp_path)
    before = os.listdir("/proc/self/fd")
    held = source.load_tensors(names)
    assert len(os.listdir("/proc/self/fd")) == len(before)
    held["weight.3"] += 1
    assert torch.equal(source["weight.3"], torch.ones(4)), "what one reader changes, the next one reads"


def test_a_model_that_has_read_goes_into_another_process(qwen3_dir):
    model = HFModel(str(qwen3_dir))
    assert model._bridge is not None
    assert pickle.loads(pickle.dumps(model)).path == model.path
