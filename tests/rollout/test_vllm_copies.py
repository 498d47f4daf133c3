"""vLLM's own models take the weights of a trainer as copies, from where they lie there."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_megatron_rl.weights.copy_plan import record_copies
from lightning_megatron_rl.weights.placement import place
from lightning_megatron_rl.weights.source import WeightView, WeightViews
from tests.distributed import free_port
from tests.selection import by_default
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.deadline(200)


def as_in_the_trainer(directory: Path, seed: int) -> WeightViews:
    """Random weights of a model, queries, keys and values in one matrix, a group after the other, as Megatron's."""
    from safetensors.torch import load_file
    from transformers import AutoConfig

    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.randn(tensor.shape, generator=generator)
        for name, tensor in load_file(directory / "model.safetensors").items()
    }
    groups = AutoConfig.from_pretrained(directory).num_key_value_heads
    views = []
    for name in [name for name in weights if "q_proj" in name]:
        names = [name.replace("q_proj", f"{kind}_proj") for kind in "qkv"]
        parts = [weights.pop(part).unflatten(0, (groups, -1)) for part in names]
        fused = torch.cat(parts, 1)  # [groups, rows of a group, ...]
        for part, view in zip(names, fused.split([part.shape[1] for part in parts], 1), strict=True):
            views.append(WeightView(part, view, (groups * view.shape[1], *view.shape[2:])))
    return WeightViews(views + WeightViews.of(list(weights.items())).views)


def load_and_replay(directory: Path) -> list[str]:
    """Parameters that differ from what vLLM's loader makes of whole tensors, first recorded and then replayed.

    On a CPU vLLM packs weights after it has loaded them, so models are made here that keep them, as on CUDA.
    """
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    config = EngineArgs(str(directory), dtype="float32", max_model_len=64, enforce_eager=True).create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{free_port()}", 0, "gloo")
        initialize_model_parallel(1)

    def bare_model() -> torch.nn.Module:
        config.compilation_config.static_forward_context.clear()  # by the names of layers, each once
        with set_current_vllm_config(config):
            return initialize_model(config)

    model, expected = bare_model(), bare_model()
    weights = as_in_the_trainer(directory, 1)
    plan = record_copies(model.load_weights, *place(weights.views), [*model.parameters(), *model.buffers()])  # type: ignore[arg-type]
    assert plan is not None
    found = []
    for seed in (1, 2):
        weights = as_in_the_trainer(directory, seed)
        if seed == 2:
            plan.run(place(weights.views)[0])
        expected.load_weights([(name, tensor.clone()) for name, tensor in weights])  # type: ignore[operator]
        found += [f"{seed}: {name}" for name in differences(model, expected)]
    apart = sum(source.tensor_shape is not None for source in plan.sources)
    fused = sum(len(view.shape) < view.view.dim() for view in weights.views)
    return found if apart == fused > 0 else [*found, f"{apart} of {fused} were taken from where they lie"]


def differences(model: torch.nn.Module, expected: torch.nn.Module) -> list[str]:
    wanted: dict[str, Tensor] = dict(expected.named_parameters())
    return [name for name, found in model.named_parameters() if not torch.equal(found, wanted[name])]


@pytest.mark.parametrize("family", by_default(["qwen3_moe"], ["qwen3_moe", "qwen2_tied"]))
def test_vllms_models_are_loaded_by_copies_alone(fresh_pool, tmp_path, family):
    """With experts; with biases and tied embeddings."""
    directory = save_tiny_model(tmp_path, family)
    assert fresh_pool.run(load_and_replay, directory, world_size=1, timeout=180) == [[]]
