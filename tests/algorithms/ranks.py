"""Data-parallel ranks in one process: every rank's function runs once more for each of its collectives."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def run_ranks(rank_functions: list[Callable[[Callable[..., Tensor]], Any]]) -> list[Any]:
    """Result of every rank's function of an `all_reduce(vector, op="sum")`, with the collectives of all of them."""
    totals: list[Tensor] = []
    while True:
        # with the totals known so far, what each rank gives to the next collective
        given: list[list[tuple[str, Tensor]]] = []
        results = []
        for function in rank_functions:
            given.append(beyond := [])
            remaining = iter(totals)

            def all_reduce(vector: Tensor, op: str = "sum", beyond=beyond, remaining=remaining) -> Tensor:
                if (total := next(remaining, None)) is not None:
                    return total.clone()
                beyond.append((op, vector.clone()))
                return vector  # a share in the place of the total; only the first of these counts

            results.append(function(all_reduce))
            assert next(remaining, None) is None, "a rank took part in fewer collectives, others would hang"
        if not any(given):
            return results
        assert all(given), "a rank took part in fewer collectives, others would hang"
        firsts = [shares[0] for shares in given]
        assert len({op for op, _ in firsts}) == 1
        stacked = torch.stack([vector for _, vector in firsts])
        totals.append(stacked.sum(0) if firsts[0][0] == "sum" else stacked.amax(0))
