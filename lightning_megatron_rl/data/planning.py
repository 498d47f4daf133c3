"""Which sequence goes into which micro-batch: within a token budget, and with equal work for all of them."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SequenceCost:
    """Floating-point operations of a sequence of `n` tokens: ``linear * n + quadratic * n**2`` (causal attention)."""

    linear: float = 1.0
    quadratic: float = 0.0

    def __call__(self, length: int) -> float:
        """Cost of a sequence of `length` tokens."""
        return (self.linear + self.quadratic * length) * length


@dataclass(frozen=True)
class MicroBatchRules:
    """What a parallel layout asks of micro-batches.

    Example:
        Context parallelism over 2 ranks with sequence parallelism over 2: ``MicroBatchRules(4, 8)``.
    """

    sequence_multiple: int = 1  # the place of a packed sequence is padded to a multiple of this (2 x CP under CP)
    row_multiple: int = 1  # tokens of a row are a multiple of this; itself a multiple of `sequence_multiple`
    count_multiple: int = 1  # micro-batches of a mini-batch (pipeline stages under the interleaved schedule)
    same_shape: bool = False  # all micro-batches of a mini-batch have one shape (interleaved schedule)

    def place(self, length: int) -> int:
        """Tokens that a sequence of `length` takes in a packed row."""
        return round_up(length, self.sequence_multiple)


def round_up(length: int, multiple: int) -> int:
    """Return the smallest multiple that holds `length`."""
    return -(-length // multiple) * multiple


def plan_microbatches(
    lengths: Sequence[int],
    max_tokens: int,
    *,
    packed: bool = True,
    num_microbatches: int | None = None,
    rules: MicroBatchRules | None = None,
    cost: SequenceCost | None = None,
) -> list[list[int]]:
    """Share sequences out to bins of at most `max_tokens` tokens, few and evenly filled; the same input, the same plan.

    Args:
        lengths: Tokens of each sequence.
        max_tokens: Most tokens of a bin, padding included: the sum of its lengths when packed, number times longest
            when padded.
        packed: Whether the sequences will be packed or padded.
        num_microbatches: Make at least this many bins; the last may be empty. Asking for at least as many as the plan
            without it has gives exactly that number, if tokens are the cost.
        rules: What the layout asks of lengths; counts are the caller's affair.
        cost: What is evened out between packed bins (default: tokens).

    Returns:
        The indices of each bin, ascending.

    Raises:
        ValueError: if one sequence alone is longer than `max_tokens`.

    Example:
        ``plan_microbatches([5, 3, 4], max_tokens=8)`` is ``[[0], [1, 2]]``.
    """
    rules = rules or MicroBatchRules()
    limit = max_tokens // rules.row_multiple * rules.row_multiple
    # a row of one sequence is padded to the row's multiple, a packed one to the sequence's
    places = [rules.place(length) if packed else round_up(length, rules.row_multiple) for length in lengths]
    for index, length in enumerate(lengths):
        if places[index] > limit:
            least = round_up(length, rules.row_multiple)
            padding = f" ({least} with padding to a multiple of {rules.row_multiple})" if least != length else ""
            raise ValueError(
                f"sequence {index} has {length} tokens{padding}, which is more than"
                f" train.max_tokens_per_microbatch={max_tokens}: raise it to at least {least}, or shorten prompts or"
                " responses"
            )
    if rules.same_shape and not packed:  # every row gets as wide as the widest of all bins, see `microbatch_shapes`
        places = [max(places, default=0)] * len(places)
    at_least = num_microbatches or 0
    if packed:
        bins = _fill_packed(places, [(cost or SequenceCost())(place) for place in places], limit, at_least)
    else:
        bins = _fill_padded(places, limit, at_least)
    bins += [[] for _ in range(at_least - len(bins))]
    return [sorted(bin_) for bin_ in bins]


def plan_replicas(
    lengths: Sequence[int],
    max_tokens: int,
    *,
    replicas: int,
    packed: bool = True,
    rules: MicroBatchRules | None = None,
    cost: SequenceCost | None = None,
) -> list[list[list[int]]]:
    """Share the sequences of all data-parallel replicas out: equally many micro-batches and equal work for each.

    Args:
        lengths: Tokens of each sequence of the mini-batch.
        max_tokens: As in `plan_microbatches`.
        replicas: Data-parallel replicas.
        packed: As in `plan_microbatches`.
        rules: What the layout asks of micro-batches; the count of each replica is a multiple of `count_multiple`.
        cost: Work of a sequence.

    Returns:
        For each replica its bins; every replica has as many, at least one.

    Example:
        ``plan_replicas([9, 8, 2, 1], 10, replicas=2)`` is ``[[[0, 3]], [[1, 2]]]``.
    """
    rules, cost = rules or MicroBatchRules(), cost or SequenceCost()
    multiple = replicas * rules.count_multiple
    count = multiple
    while True:
        bins = plan_microbatches(lengths, max_tokens, packed=packed, num_microbatches=count, rules=rules, cost=cost)
        if len(bins) == count:
            break
        count = round_up(len(bins), multiple)
    work = [sum(cost(lengths[index]) for index in bin_) for bin_ in bins]
    shares: list[list[int]] = [[] for _ in range(replicas)]
    least_loaded = [(0.0, replica) for replica in range(replicas)]
    for number in sorted(range(count), key=lambda number: (-work[number], number)):
        load, replica = heapq.heappop(least_loaded)
        shares[replica].append(number)
        if len(shares[replica]) < count // replicas:
            heapq.heappush(least_loaded, (load + work[number], replica))
    return [[bins[number] for number in sorted(share)] for share in shares]


def microbatch_shapes(
    lengths: Sequence[int], plan: Sequence[Sequence[int]], *, packed: bool, rules: MicroBatchRules
) -> list[tuple[int, int]]:
    """Return rows and positions per row that each bin of `plan` needs; never nothing."""
    shapes = []
    for bin_ in plan:
        own = [lengths[index] for index in bin_]
        if packed:
            shapes.append((1, round_up(max(sum(map(rules.place, own)), 1), rules.row_multiple)))
        else:
            shapes.append((max(len(own), 1), round_up(max(own, default=1), rules.row_multiple)))
    if rules.same_shape and shapes:
        shapes = [(max(rows for rows, _ in shapes), max(width for _, width in shapes))] * len(shapes)
    return shapes


def _fill_packed(places: list[int], costs: list[float], limit: int, at_least: int) -> list[list[int]]:
    """Dearest first into the cheapest bin that has room; a sequence that fits nowhere opens a bin.

    Repeated with the number of bins it took, until that number suffices: the bins are then evenly filled.
    """
    dearest_first = sorted(range(len(places)), key=lambda index: (-costs[index], index))
    num_bins = max(-(-sum(places) // limit) if limit else 0, at_least)
    while True:
        bins: list[list[int]] = [[] for _ in range(num_bins)]
        room = [limit] * num_bins
        cheapest = [(0.0, number) for number in range(num_bins)]
        for index in dearest_first:
            passed = []
            while cheapest and room[cheapest[0][1]] < places[index]:
                passed.append(heapq.heappop(cheapest))
            if not cheapest:
                heapq.heappush(cheapest, (0.0, len(bins)))
                bins.append([])
                room.append(limit)
            cost, number = heapq.heappop(cheapest)
            bins[number].append(index)
            room[number] -= places[index]
            for entry in [*passed, (cost + costs[index], number)]:
                heapq.heappush(cheapest, entry)
        if len(bins) == num_bins:
            return bins
        num_bins = len(bins)


def _fill_padded(places: list[int], limit: int, at_least: int) -> list[list[int]]:
    """Neighbours in length share a bin, which wastes least; then the smallest limit that needs no more bins.

    In descending order the first sequence of a bin is its longest, and filling in order needs the fewest bins.
    """
    longest_first = sorted(range(len(places)), key=lambda index: (-places[index], index))

    def cut(limit: int) -> list[list[int]]:
        bins: list[list[int]] = []
        for index in longest_first:
            if not bins or (len(bins[-1]) + 1) * places[bins[-1][0]] > limit:
                bins.append([])
            bins[-1].append(index)
        return bins

    most_bins = max(len(cut(limit)), at_least)
    low, high = max(places, default=0), limit
    while low < high:
        middle = (low + high) // 2
        if len(cut(middle)) <= most_bins:
            high = middle
        else:
            low = middle + 1
    return cut(high)
