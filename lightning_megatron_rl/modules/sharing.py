"""The sequences of all replicas shared out anew for each pass, so that every rank has the same work to do."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_megatron_rl.data.packing import MicroBatch, TokenSequence, context_parallel_share, make_microbatches
from lightning_megatron_rl.data.planning import MicroBatchRules, SequenceCost, microbatch_shapes, plan_replicas
from lightning_megatron_rl.parallel.distributed import (
    context_parallel_rank,
    data_parallel_exchange,
    data_parallel_gather,
    data_parallel_rank,
)
from lightning_megatron_rl.parallel.layout import ParallelLayout


@dataclass
class Share:
    """One replica's part of a pass, and the way back to the replicas that the sequences came from."""

    sequences: list[TokenSequence]  # what this replica works on
    microbatches: list[MicroBatch]  # this context-parallel rank's part of them
    origins: list[tuple[int, int]]  # replica and index there that each of `sequences` came from
    num_own: int  # sequences that this replica brought
    num_replicas: int
    device: torch.device
    num_tokens: int  # of the sequences of all replicas
    num_positions: int  # of all replicas' micro-batches, with padding
    work: list[float]  # of each replica, see `SequenceCost`

    def describe_samples(self) -> list[dict[str, Any]]:
        """Return what this replica works on as plain data, each with its origin, for the report of a failure."""
        return [
            {
                "origin": sequence.origin or f"sequence {index} of replica {replica}",
                "token_ids": sequence.token_ids,
                "loss_mask": sequence.loss_mask,
                "fields": sequence.fields,
            }
            for sequence, (replica, index) in zip(self.sequences, self.origins, strict=True)
        ]

    def give_back(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Return `values`, one per sequence of the share, to where the sequences came from, in their order."""
        outgoing: list[list[tuple[int, Tensor]]] = [[] for _ in range(self.num_replicas)]
        for (replica, index), value in zip(self.origins, values, strict=True):
            outgoing[replica].append((index, value))
        returned = dict(pair for pairs in data_parallel_exchange(outgoing, self.device) for pair in pairs)
        return [returned[index] for index in range(self.num_own)]


FP8_TOKENS = 16  # fp8 matrix products want a multiple of so many tokens


def microbatch_rules(layout: ParallelLayout, *, fp8: bool = False) -> MicroBatchRules:
    """Return what `layout` asks of micro-batches, and layers that compute in fp8.

    Context parallelism cuts each sequence in 2 x CP chunks, sequence parallelism splits a context-parallel rank's row,
    and the interleaved schedule wants micro-batches of one shape, a multiple of the number of stages.
    """
    cp = layout.context_parallel_size
    sequence_multiple = 1 if cp == 1 else 2 * cp
    row_multiple = layout.tensor_model_parallel_size * sequence_multiple
    if fp8:
        row_multiple = math.lcm(row_multiple, FP8_TOKENS * layout.tensor_model_parallel_size * cp)
    interleaved = layout.virtual_pipeline_model_parallel_size is not None
    return MicroBatchRules(
        sequence_multiple=sequence_multiple,
        row_multiple=row_multiple,
        count_multiple=layout.pipeline_model_parallel_size if interleaved else 1,
        same_shape=interleaved,
    )


def share_sequences(
    sequences: list[TokenSequence],
    max_tokens: int,
    layout: ParallelLayout,
    device: torch.device,
    *,
    packed: bool,
    cost: SequenceCost,
    fp8: bool = False,
) -> Share:
    """Plan the micro-batches of all replicas together and fetch what this replica will work on; a collective.

    Args:
        sequences: Those this replica brings.
        max_tokens: Most tokens of a micro-batch over all its context-parallel ranks, padding included.
        layout: The parallel layout.
        device: Of this rank; the micro-batches live there.
        packed: Whether sequences are packed or padded.
        cost: Work of a sequence.
        fp8: Whether layers compute in fp8.

    Raises:
        ValueError: A sequence is longer than `max_tokens`; replicas whose sequences have different fields.
    """
    rules = microbatch_rules(layout, fp8=fp8)
    own = ([len(sequence) for sequence in sequences], sorted(sequences[0].fields) if sequences else None)
    everywhere: list[tuple[list[int], list[str] | None]] = data_parallel_gather(own)
    lengths = [length for replica, _ in everywhere for length in replica]
    owners = [(replica, index) for replica, (theirs, _) in enumerate(everywhere) for index in range(len(theirs))]
    field_names = next((names for _, names in everywhere if names is not None), [])
    plans = plan_replicas(lengths, max_tokens, replicas=len(everywhere), packed=packed, rules=rules, cost=cost)

    me = data_parallel_rank()
    outgoing: list[list[TokenSequence]] = [[] for _ in plans]
    for replica, plan in enumerate(plans):
        outgoing[replica] = [
            sequences[owners[number][1]] for bin_ in plan for number in bin_ if owners[number][0] == me
        ]
    incoming = [iter(theirs) for theirs in data_parallel_exchange(outgoing, device)]
    mine: list[TokenSequence] = []
    origins: list[tuple[int, int]] = []
    local_plan: list[list[int]] = []
    for bin_ in plans[me]:
        local_plan.append(list(range(len(mine), len(mine) + len(bin_))))
        for number in bin_:
            mine.append(next(incoming[owners[number][0]]))
            origins.append(owners[number])
    microbatches = make_microbatches(mine, local_plan, packed=packed, rules=rules, field_names=field_names)
    shapes = [shape for plan in plans for shape in microbatch_shapes(lengths, plan, packed=packed, rules=rules)]
    work = [sum(cost(lengths[number]) for bin_ in plan for number in bin_) for plan in plans]
    return Share(
        sequences=mine,
        microbatches=[
            context_parallel_share(microbatch, layout.context_parallel_size, context_parallel_rank()).to(device)
            for microbatch in microbatches
        ],
        origins=origins,
        num_own=len(sequences),
        num_replicas=len(plans),
        device=device,
        num_tokens=sum(lengths),
        num_positions=sum(rows * width for rows, width in shapes),
        work=work,
    )
