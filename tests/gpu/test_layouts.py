"""The layouts of the CPU suite under NCCL: one loss, one gradient norm, for torch's layers and TransformerEngine's."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.test_training import BF16_RELATIVE, backend, relative_steps
from tests.strategy.test_invariance import LENGTHS, ragged_batches
from tests.strategy.test_megatron import LAYOUTS
from tests.training import Run, fit_sft

pytestmark = pytest.mark.deadline(300)
VARIANTS = [backend("torch"), backend("transformer_engine", "bf16-mixed")]


def fit_variants(model: Path, strategy: dict[str, Any], world_size: int) -> list[Run]:
    """Two steps on the frozen batch with each backend."""
    return [
        fit_sft(
            model,
            strategy,
            world_size,
            batch_size=len(LENGTHS),
            sequences=ragged_batches(),
            module={**variant["module"], "max_tokens_per_microbatch": 96},
            trainer={**variant["trainer"], "accelerator": "cuda"},
        )
        for variant in VARIANTS
    ]


@pytest.fixture(scope="module")
def one_gpu(gpu_pool, qwen3_dir) -> list[Run]:
    return gpu_pool.run(fit_variants, qwen3_dir, {}, 1, world_size=1, init_process_group=False)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_gives_the_numbers_of_one_gpu(gpu_pool, qwen3_dir, one_gpu, layout):
    world_size, strategy = LAYOUTS[layout]
    if world_size > torch.cuda.device_count():
        pytest.skip(f"needs {world_size} GPUs, this machine has {torch.cuda.device_count()}")
    options = {"world_size": world_size, "init_process_group": False, "timeout": 250}
    fp32, bf16 = gpu_pool.run(fit_variants, qwen3_dir, strategy, world_size, **options)[0]
    assert relative_steps(fp32, one_gpu[0]) < 1e-4  # fp32 sums in another order, and atomics
    assert relative_steps(bf16, one_gpu[1]) < BF16_RELATIVE
    for name, weight in one_gpu[0].weights.items():
        assert (fp32.weights[name] - weight).norm() / weight.norm() < 1e-4, name
