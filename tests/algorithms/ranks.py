"""Data-parallel ranks in one process: every rank's function runs once to give its share, once to get the total."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def run_ranks(rank_functions: list[Callable[[Callable[..., Tensor]], Any]]) -> list[Any]:
    """Result of every rank's function of an `all_reduce(vector, op="sum")`, with the collectives of all of them."""
    calls: list[list[tuple[str, Tensor]]] = []
    for function in rank_functions:
        calls.append(record := [])

        def give(vector: Tensor, op: str = "sum", record=record) -> Tensor:
            record.append((op, vector.clone()))
            return vector  # a share instead of the total: what a rank gives must not depend on what it got

        function(give)
    totals = []
    for rows in zip(*calls, strict=True):  # the same number of collectives on every rank, or ranks would hang
        assert len({op for op, _ in rows}) == 1
        stacked = torch.stack([vector for _, vector in rows])
        totals.append(stacked.sum(0) if rows[0][0] == "sum" else stacked.amax(0))
    results = []
    for function in rank_functions:
        remaining = iter(totals)
        results.append(function(lambda vector, op="sum", remaining=remaining: next(remaining).clone()))
    return results
