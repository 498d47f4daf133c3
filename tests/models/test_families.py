"""Every family under every layout: log-probs are those of Transformers, and the export is what was loaded."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.distributed import WorkerPool
from tests.models.conftest import TOLERANCE, hf_logprobs, worst_difference
from tests.models.workers import families_under_layout

DENSE = ("llama", "mistral", "mistral_window", "qwen2", "qwen2_tied", "qwen3")
MOE = ("qwen3_moe", "mixtral", "deepseek_v3", "deepseek_v3_plain")
EVERY_FAMILY = DENSE + MOE

# layout -> sizes, sequence parallelism, families; the world is the smallest that holds the layout
LAYOUTS = {
    "tp1": ({}, False, EVERY_FAMILY),
    "tp2": ({"tp": 2}, False, DENSE),  # with experts, tensor parallelism needs sequence parallelism
    "tp2+sp": ({"tp": 2}, True, EVERY_FAMILY),
    "pp2": ({"pp": 2}, False, EVERY_FAMILY),
    "tp2xpp2+sp": ({"tp": 2, "pp": 2}, True, EVERY_FAMILY),
    "cp2": ({"cp": 2}, False, EVERY_FAMILY),
    "tp2xcp2+sp": ({"tp": 2, "cp": 2}, True, EVERY_FAMILY),
    "ep2": ({"ep": 2}, False, MOE),
    "tp2xetp1+sp": ({"tp": 2, "etp": 1}, True, MOE),
    "tp2xep2xetp1+sp": ({"tp": 2, "ep": 2, "etp": 1}, True, MOE),
    "tp2xep2+sp": ({"tp": 2, "ep": 2}, True, MOE),
    "pp2xep2": ({"pp": 2, "ep": 2}, False, MOE),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logprobs_and_export(
    layout: str, checkpoint: Callable[[str], Path], sequences: list[list[int]], worker_pool: WorkerPool
):
    sizes, sp, families = LAYOUTS[layout]
    tp, pp = sizes.get("tp", 1), sizes.get("pp", 1)
    world_size = pp * max(tp * sizes.get("cp", 1), sizes.get("etp", tp) * sizes.get("ep", 1))
    directories = {family: str(checkpoint(family)) for family in families}
    results = worker_pool.run(families_under_layout, directories, sequences, sp, sizes, world_size=world_size)
    for family in families:
        expected = hf_logprobs(checkpoint(family), sequences, temperature=0.7)
        weights = load_file(checkpoint(family) / "model.safetensors")
        for rank, result in enumerate(results):
            padded, packed, exported = result[family]
            assert same_weights(exported, weights), f"{family}, rank {rank}"
            if rank < world_size // pp * (pp - 1):
                assert padded is packed is None
                continue
            assert worst_difference(packed, expected) <= TOLERANCE, f"{family}, packed"
            assert padded is not None or "cp" in sizes
            assert padded is None or worst_difference(padded, expected) <= TOLERANCE, f"{family}, padded"


def same_weights(exported: dict[str, Tensor], loaded: dict[str, Tensor]) -> bool:
    """Whether an export has the tensors of a checkpoint, bit for bit, and no others."""
    assert sorted(exported) == sorted(loaded)
    return all(torch.equal(exported[name], tensor) for name, tensor in loaded.items())
