"""Weights that turn losses per token into one loss with global denominators, however the batch is cut up."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_megatron_rl.algorithms.registry import Returned, choose


class BatchCounts(NamedTuple):
    """What one optimizer step holds, over all micro-batches and data-parallel ranks; float64 scalars."""

    tokens: Tensor  # response tokens
    sequences: Tensor
    prompts: Tensor  # groups


class Aggregation(Protocol):
    """Weights of the tokens of each of a rank's N sequences, float64 `[N]`; the losses times these are summed up.

    `lengths` `[N]` are the tokens of each sequence that the loss sums over, `group_lengths` `[N]` those of its whole
    group, and `max_length` is the limit on generated tokens. A weight where the length is 0 is not used.

    Example:
        ``token_mean`` is ``torch.ones_like(lengths) / counts.tokens``.
    """

    def __call__(self, counts: BatchCounts, lengths: Tensor, group_lengths: Tensor, max_length: int) -> Returned:
        """Return the weight of a token of each sequence, a tensor `[N]`."""
        ...


def _token_mean(counts: BatchCounts, lengths: Tensor, group_lengths: Tensor, max_length: int) -> Tensor:
    return torch.ones_like(lengths) / counts.tokens


def _seq_mean_token_mean(counts: BatchCounts, lengths: Tensor, group_lengths: Tensor, max_length: int) -> Tensor:
    return 1 / (counts.sequences * lengths)


def _seq_mean_token_sum(counts: BatchCounts, lengths: Tensor, group_lengths: Tensor, max_length: int) -> Tensor:
    return torch.ones_like(lengths) / counts.sequences


def _seq_mean_token_sum_norm(counts: BatchCounts, lengths: Tensor, group_lengths: Tensor, max_length: int) -> Tensor:
    return torch.ones_like(lengths) / (counts.sequences * max_length)


def _prompt_mean(counts: BatchCounts, lengths: Tensor, group_lengths: Tensor, max_length: int) -> Tensor:
    return 1 / (counts.prompts * group_lengths)


AGGREGATIONS: dict[str, Aggregation] = {
    "token_mean": _token_mean,
    "seq_mean_token_mean": _seq_mean_token_mean,
    "seq_mean_token_sum": _seq_mean_token_sum,
    "seq_mean_token_sum_norm": _seq_mean_token_sum_norm,
    "prompt_mean": _prompt_mean,
}


def aggregation(choice: str | Aggregation) -> Aggregation:
    """Return the aggregation of a name or dotted path, or a user's own callable; see `registry.choose`."""
    return choose(AGGREGATIONS, choice, "aggregation", ("counts", "lengths", "group_lengths", "max_length"))


def sequence_weights(
    mode: str | Aggregation,
    response_lengths: Tensor,
    group_index: Tensor,
    *,
    max_response_length: int,
    all_reduce: Callable[[Tensor], Tensor],
) -> Tensor:
    """Weight w_i of every response token of sequence i, float64 `[N]`, for the N sequences of this rank's mini-batch.

    Summed over all micro-batches and data-parallel ranks, Σ_i w_i Σ_t loss_it is the aggregated loss:
    `token_mean` Σ loss / Σ tokens; `seq_mean_token_mean` mean over sequences of the mean over tokens;
    `seq_mean_token_sum` mean over sequences of the sum over tokens; `seq_mean_token_sum_norm` that divided by
    `max_response_length`; `prompt_mean` mean over prompts of the mean over the tokens of a prompt's group.

    A sequence without response tokens counts as a sequence, its group as a prompt; it contributes 0 and has weight 0.

    Args:
        mode: one of the five names above, or an `Aggregation` of your own.
        response_lengths: `[N]` number of tokens of each sequence that the loss sums over.
        group_index: `[N]` integers; equal ones belong to one prompt. Groups never straddle ranks, and equal numbers on
            two ranks are two groups.
        max_response_length: the limit on generated tokens, not the longest response that was seen.
        all_reduce: sums a float64 tensor `[3]` over the data-parallel ranks and returns it; called once by every rank,
            also by one without sequences (N = 0). The identity for one rank.

    Raises:
        ValueError: an unknown mode, shapes that differ, a `max_response_length` below 1, or weights of your own that
            are not one for each sequence.

    Example:
        Lengths [1, 3] on one rank under "token_mean" give [0.25, 0.25]; under "seq_mean_token_mean" [0.5, 0.1667].
    """
    weigh = aggregation(mode)
    if response_lengths.dim() != 1 or response_lengths.shape != group_index.shape:
        raise ValueError(
            f"response_lengths {tuple(response_lengths.shape)} and group_index {tuple(group_index.shape)} must both be "
            "[sequences]"
        )
    if max_response_length < 1:
        raise ValueError(f"max_response_length is {max_response_length}: it must be at least 1 token")
    lengths = response_lengths.double()
    groups, group_of = torch.unique(group_index, return_inverse=True)
    group_lengths = lengths.new_zeros(len(groups)).index_add_(0, group_of, lengths)[group_of]
    local = torch.stack([lengths.sum(), lengths.new_tensor(len(lengths)), lengths.new_tensor(len(groups))])
    counts = BatchCounts(*all_reduce(local))
    weights = weigh(counts, lengths, group_lengths, max_response_length)
    found = tuple(getattr(weights, "shape", ()))
    if found not in ((), tuple(lengths.shape)):  # () is one weight for all
        raise ValueError(
            f"aggregation {mode!r} returned weights of shape {list(found)} for {len(lengths)} sequences: return a"
            f" tensor [{len(lengths)}], the weight of a token of each"
        )
    return torch.where(lengths > 0, weights, 0.0)  # not 1 / 0: an empty sequence has no token to weigh


def weighted_sum(token_values: Tensor, weights: Tensor, sequence_index: Tensor) -> Tensor:
    """Return Σ_t values_t w[sequence_index_t], a float64 scalar: one micro-batch's share of the aggregated value.

    `token_values` and `sequence_index` are `[T]`, valid tokens only; `weights` is `[N]` from `sequence_weights`, and
    `sequence_index` holds positions in it.

    Example:
        ``weighted_sum(torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.25]), torch.tensor([0, 1]))`` is 1.0.
    """
    return (token_values * weights[sequence_index]).sum(dtype=torch.float64)
