"""Log-probs and entropy of Megatron chunks against Transformers, per token, under every layout and batch form."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed import WorkerPool
from tests.models.conftest import hf_logprobs
from tests.models.workers import logprobs_under_layout

TOLERANCE = 1e-4  # what the project promises in fp32; reassociated sums in 4 layers differ by about 1e-6
LAYOUTS = {
    "tp1": (1, 1, False),
    "tp2": (2, 1, False),
    "tp2+sp": (2, 1, True),
    "pp2": (1, 2, False),
    "tp2xpp2+sp": (2, 2, True),
}


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen2_tied", "qwen3"])
def test_logprobs_match_transformers(
    family: str,
    layout: str,
    packed: bool,
    checkpoint: Callable[[str], Path],
    sequences: list[list[int]],
    worker_pool: WorkerPool,
):
    tp, pp, sp = LAYOUTS[layout]
    directory = checkpoint(family)
    results = worker_pool.run(
        logprobs_under_layout, str(directory), sequences, packed, tp, pp, sp, 0.7, world_size=tp * pp
    )
    expected = hf_logprobs(directory, sequences, temperature=0.7)
    assert [result is not None for result in results] == [rank >= tp * (pp - 1) for rank in range(tp * pp)]
    worst = 0.0
    for result in results[-tp:]:
        assert len(result) == len(expected)
        worst = max(worst, *((ours - theirs).abs().max().item() for ours, theirs in zip(result, expected, strict=True)))
    print(f"{family} {layout} {'packed' if packed else 'padded'}: worst difference {worst:.1e}")
    assert worst <= TOLERANCE
