"""Seconds and bytes of a step, by hand."""

from dataclasses import replace

import pytest

from lightning_megatron_rl.parallel.layout import ParallelLayout
from tests.planner.test_budget import mixture_on

EP4 = ParallelLayout(expert_model_parallel_size=4, expert_tensor_parallel_size=1)
ROWS = 48 * 256 * 539 / 4 * 2048 * 2  # bytes of a GPU's hidden states, in all layers


@pytest.mark.parametrize(
    ("dispatcher", "recompute", "times"),
    [
        # to experts and back, forward and backward; 8 experts for each token, 3 of 4 of which are elsewhere
        ("alltoall", 0.0, 4 * 8 * 3 / 4),
        ("alltoall", 1.0, 6 * 8 * 3 / 4),
        ("allgather", 0.0, 4 * 3),  # to three others
        ("allgather", 1.0, 5 * 3),  # and not back again
        (None, 0.5, 4.5 * 3),
    ],
)
def test_tokens_travel_to_experts(dispatcher, recompute, times):
    run = replace(mixture_on(4, EP4, sequences=256), dispatcher=dispatcher, recompute=recompute)
    (sent,) = [item.size for item in run.traffic() if item.what == "tokens to experts"]
    assert sent == pytest.approx(times * ROWS)
