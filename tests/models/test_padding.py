"""The padding token's embedding has Transformers' gradient: the lookup gives it none, a tied output layer does."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from lightning_megatron_rl.data.packing import TokenSequence
from lightning_megatron_rl.models.hf.check import EMBEDDING
from lightning_megatron_rl.models.hf.model import HFModel
from lightning_megatron_rl.models.layers.padding import padding_row
from tests.distributed import WorkerPool
from tests.models.padding_runs import gradients_of
from tests.tiny_models import FILE, save_tiny_model, tiny_config

FAMILIES = [
    "llama",
    "mistral",
    "qwen2",
    "qwen2_tied",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "deepseek_v3",
    "gemma3",
    "gpt_oss",
]


def padded_sequences() -> list[TokenSequence]:
    """Ragged sequences with token 0 and the last token here and there, as input and as target."""
    generator = torch.Generator().manual_seed(1)
    sequences = []
    for length in (9, 30, 17, 24):
        ids = torch.randint(6, 127, (length,), generator=generator)
        ids[1::4], ids[2::5] = 0, 127
        sequences.append(TokenSequence(ids, torch.arange(length) >= 3))
    return sequences


def save(directory: Path, family: str, pad_token_id: int | None = 0) -> Path:
    """A tiny model whose padding token has the embedding zero, as Transformers initialises it."""
    save_tiny_model(directory, family)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"pad_token_id": pad_token_id}))
    tensors = load_file(directory / FILE)
    if pad_token_id is not None:
        tensors[EMBEDDING][pad_token_id] = 0
    save_file(tensors, directory / FILE, {"format": "pt"})
    return directory


def expected_of(directory: Path) -> tuple[float, float, dict[str, Tensor]]:
    """Loss, gradient norm and gradients by Transformers, as its checkpoints name them."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    sequences = padded_sequences()
    count = sum(int(sequence.loss_mask[1:].sum()) for sequence in sequences)
    total = torch.zeros(())
    for sequence in sequences:
        ids = sequence.token_ids[None]
        log_p = model(ids[:, :-1]).logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[0, :, 0]
        total = total - log_p[sequence.loss_mask[1:]].sum() / count
    total.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    model.generation_config = GenerationConfig()  # Transformers would not save a negative padding token in it
    model.save_pretrained(directory / "gradients")
    return total.item(), norm.item(), load_file(directory / "gradients" / FILE)


def assert_as_transformers(results: list[Any], directories: dict[str, Path]) -> None:
    for name, directory in directories.items():
        loss, norm, expected = expected_of(directory)
        for result in results:
            mine = result[name]
            assert mine[0] == pytest.approx(loss, rel=1e-5), name
            assert mine[1] == pytest.approx(norm, rel=1e-4), f"{name}: the padding row's gradient is in the norm"
            gradients = {key: tensor for key, tensor in mine[2].items() if not key.endswith("correction_bias")}
            assert gradients.keys() == {key for key in expected if not key.endswith("correction_bias")}
            for key, gradient in gradients.items():
                scale = float(expected[key].abs().max())
                # fp32 through 4 to 12 layers of a random model, relative to the largest element of the tensor
                torch.testing.assert_close(
                    gradient, expected[key], atol=1e-4 * scale, rtol=0, msg=lambda m, n=f"{name} {key}": f"{n}: {m}"
                )


def test_every_family(tmp_path: Path, worker_pool: WorkerPool):
    """Fails without `leave_out_padding` in every family: Transformers sets `padding_idx` in all of them."""
    models = {family: save(tmp_path / family, family) for family in FAMILIES}
    paths = {name: str(path) for name, path in models.items()}
    assert_as_transformers(
        worker_pool.run(gradients_of, paths, {}, padded_sequences(), world_size=1, init_process_group=False), models
    )


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2_sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "dp2": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout(name: str, tmp_path: Path, worker_pool: WorkerPool):
    """Tied and not, the padding token first, last (from the end) and none; rows of a second rank's vocabulary, too."""
    models = {
        "first": save(tmp_path / "first", "qwen3"),
        "last": save(tmp_path / "last", "qwen3", pad_token_id=-1),
        "none": save(tmp_path / "none", "qwen3", pad_token_id=None),
        "tied": save(tmp_path / "tied", "qwen2_tied", pad_token_id=127),
        "gemma": save(tmp_path / "gemma", "gemma3"),
    }
    paths = {name: str(path) for name, path in models.items()}
    assert_as_transformers(
        worker_pool.run(gradients_of, paths, LAYOUTS[name], padded_sequences(), world_size=2, init_process_group=False),
        models,
    )


@pytest.mark.parametrize("token", [0, 5, 127, -1, -128, None])
def test_row_is_that_of_transformers(token: int | None):
    config = tiny_config("llama")
    config.pad_token_id = token
    with torch.device("meta"):
        assert AutoModelForCausalLM.from_config(config).get_input_embeddings().padding_idx == padding_row(config)


@pytest.mark.parametrize("token", [128, -129])
def test_a_padding_token_that_is_no_row_is_refused(token: int):
    with pytest.raises(ValueError, match=rf"pad_token_id={token} with vocab_size=128: there is no such row.*0 to 127"):
        padding_row(SimpleNamespace(pad_token_id=token, vocab_size=128))


def test_a_model_is_refused_before_its_weights_are_looked_at(checkpoint: Callable[[str], Path], tmp_path: Path):
    directory = save_tiny_model(tmp_path / "model", "llama", pad_token_id=0)
    config = (directory / "config.json").read_text()
    (directory / "config.json").write_text(config.replace('"pad_token_id": 0', '"pad_token_id": 1000'))
    (directory / FILE).write_bytes((checkpoint("qwen3") / FILE).read_bytes())
    with pytest.raises(ValueError, match="pad_token_id=1000"):
        HFModel(str(directory))
