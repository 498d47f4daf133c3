"""Micro-batches that would be computed wrongly are refused; sequences of one pack do not see each other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import WorkerPool
from tests.models.workers import build, start_megatron


def forward_error(directory: str, length: int, cu_seqlens: list[int] | None, max_seqlen: int | None, sp: bool) -> str:
    from lightning_megatron_rl.models.forward import microbatch_forward
    from lightning_megatron_rl.models.layers.logprobs import logprob_processor

    start_megatron(torch.distributed.get_world_size())
    _, [chunk] = build(directory, sp=sp)
    tokens = torch.ones(1, length, dtype=torch.int64)
    cu = None if cu_seqlens is None else torch.tensor(cu_seqlens, dtype=torch.int32)
    try:
        microbatch_forward(
            chunk, tokens, tokens, tokens, cu, max_seqlen, output_processor=logprob_processor(vocab_size=128)
        )
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("length", "cu_seqlens", "max_seqlen", "message"),
    [
        (8, [0, 3, 7], 4, "cu_seqlens runs from 0 to 7, but the packed micro-batch has 8 tokens"),
        (8, [1, 3, 8], 5, "cu_seqlens runs from 1 to 8"),
        (8, [0, 3, 8], 8, "max_seqlen=8, but the longest sequence of cu_seqlens has 5 tokens"),
        (8, [0, 3, 8], 4, "max_seqlen=4, but the longest sequence of cu_seqlens has 5 tokens"),
        (8, [0, 3, 8], 5, "no error"),
    ],
)
def test_boundaries_must_fit_the_tokens(
    length: int,
    cu_seqlens: list[int],
    max_seqlen: int,
    message: str,
    checkpoint: Callable[[str], Path],
    worker_pool: WorkerPool,
):
    arguments: tuple[Any, ...] = (str(checkpoint("qwen3")), length, cu_seqlens, max_seqlen, False)
    [error] = worker_pool.run(forward_error, *arguments, world_size=1)
    assert error.startswith(message)


def test_tokens_must_divide_for_sequence_parallelism(checkpoint: Callable[[str], Path], worker_pool: WorkerPool):
    errors = worker_pool.run(forward_error, str(checkpoint("qwen3")), 7, None, None, True, world_size=2)
    assert all("7 % 2 = 1: pad the micro-batch to a multiple of 2 tokens" in error for error in errors)


def count_sines(directory: str, lengths: list[int]) -> int:
    """How often one forward pass over packed sequences takes sines: once per rotation."""
    from lightning_megatron_rl.models.forward import microbatch_forward
    from lightning_megatron_rl.models.layers.logprobs import logprob_processor

    start_megatron(1)
    _, [chunk] = build(directory)
    boundaries = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int()
    tokens = torch.ones(1, sum(lengths), dtype=torch.int64)
    processor = logprob_processor(vocab_size=128)
    with torch.no_grad(), torch.profiler.profile() as seen:
        microbatch_forward(chunk, tokens, tokens, tokens, boundaries, max(lengths), output_processor=processor)
    return sum(event.name == "aten::sin" for event in seen.events())


def test_packed_sequences_are_rotated_all_at_once(checkpoint: Callable[[str], Path], worker_pool: WorkerPool):
    """As often for 20 sequences as for 2, also where Megatron's own function rotates: in latent attention."""
    for name in ("qwen3", "deepseek_v3"):
        few, many = (
            worker_pool.run(count_sines, str(checkpoint(name)), lengths, world_size=1)[0]
            for lengths in ([2, 4], [2] * 19 + [4])
        )
        assert many == few > 0, name
