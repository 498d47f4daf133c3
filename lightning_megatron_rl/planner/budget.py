"""`auto`: the tokens of a micro-batch and the recomputation with which an update is fastest, of those that fit."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lightning_megatron_rl.planner.moments import ACTIVATIONS, COMPUTING, PROCESS, MemoryPlan
from lightning_megatron_rl.planner.run import Run

MARGIN = 0.95  # of the free memory that a choice takes at most while the trainer works: allocators round up
EQUAL = 1.01  # times the least seconds: nobody can tell such steps apart, and fewer tokens leave more memory
WITHOUT_GPU = 8192  # tokens of a micro-batch where nothing is planned
SLOW_HOST = 1.4  # times the seconds of launches, of which nobody knows before on which host they will run
PARTLY = 1.05  # times their seconds, at which settings count that recompute some layers: see `fastest`
_POWERS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)
_PARTS = 8  # of the layers, of which any number may be computed again
_BUDGETS = (*(quarters * power // 4 for power in _POWERS for quarters in (4, 5, 6, 7)), 131_072)


def candidates(run: Run, *, tokens: bool, recompute: bool, least: int) -> Iterator[Run]:
    """Yield the runs that `auto` chooses from, in an order that is the same on every rank.

    Some layers are recomputed, and others not, only where a first step with half of the tokens can be measured: such a
    choice fills the memory.

    Args:
        run: Whose other settings stay.
        tokens: Whether the tokens of a micro-batch are to be chosen; else those of `run` stay.
        recompute: Whether that is.
        least: Tokens of the longest sequence, which a micro-batch must hold, on all context-parallel ranks together.
    """
    budgets = sorted({least, *(budget for budget in _BUDGETS if budget > least)}) if tokens else [run.microbatch_tokens]
    layers = run.chunk_layers
    eighths = {-(-layers * part // _PARTS) / layers for part in range(_PARTS + 1)}
    for again in sorted(eighths) if recompute else (run.recompute,):
        for budget in budgets:
            if recompute and 0 < again < 1 and not (tokens and can_be_tried(budget, least)):
                continue
            found = replace(run, microbatch_tokens=budget, recompute=again)
            yield found
            if found.microbatches == 1:  # a larger budget holds no more
                break


def can_be_tried(tokens: int, least: int) -> bool:
    """Whether a step with half of so many tokens in a micro-batch can be measured first."""
    return tokens // 2 >= least


def fastest(runs: Sequence[Run]) -> Run:
    """Return the run whose step is planned to take least; of those within 1 % of it the one with the fewest tokens.

    It is the least on a host with slow Python: few large micro-batches lose little on a fast one, many small ones lose
    much on a slow one.

    Where some layers are recomputed, the memory is full, and the first step may show that fewer tokens fit, in more
    micro-batches: that has to gain some 5 %.
    """

    def cost(run: Run) -> float:
        return replace(run, launch_factor=SLOW_HOST).step_seconds * (PARTLY if 0 < run.recompute < 1 else 1.0)

    least = min(cost(run) for run in runs)
    return min((run for run in runs if cost(run) <= EQUAL * least), key=lambda run: run.microbatch_tokens)


def choose(run: Run, *, tokens: bool, recompute: bool, least: int) -> Run:
    """Return what `auto` takes on GPUs that are not there; what needs least, which does not fit, if nothing does.

    Args:
        run: As `candidates` has it, and all the others.
        tokens: See there.
        recompute: See there.
        least: See there.
    """
    found = list(candidates(replace(run, margin=MARGIN), tokens=tokens, recompute=recompute, least=least))
    fitting = [candidate for candidate in found if candidate.has_room]
    return fastest(fitting) if fitting else min(found, key=lambda candidate: candidate.memory().needed)


def fits(plan: MemoryPlan) -> bool:
    """Whether a plan leaves the margin."""
    return plan.leaves(MARGIN)


def expected_peak(measured: float, tried: MemoryPlan, wanted: MemoryPlan, *, whole: bool = False) -> float:
    """Return the bytes that a step will take with the budget of `wanted`, measured with that of `tried`.

    What activations took more than planned, the larger budget is taken to take more in proportion. What all took less
    is counted on only if all was there.

    Args:
        measured: By torch: what the process takes besides is neither in it nor in the room.
        tried: Plan of what was measured.
        wanted: Plan of what may follow.
        whole: Whether everything was there: the first step makes the optimizer's state at its end.

    Example:
        Planned 10 of weights and 4 of activations, 8 for twice the tokens, measured 15: ``10 + 8 * 5 / 4 == 20``. If it
        was 13, all in all, it is 18 by the first step, and ``13 + 4 == 17`` by a later one.
    """
    there = tried.at(COMPUTING)
    activations = sum(size for part, size in there.items() if part.name == ACTIVATIONS)
    wanted_activations = sum(size for part, size in wanted.at(COMPUTING).items() if part.name == ACTIVATIONS)
    rest = sum(part.size for part in tried.trainer if there[part] and part.name != PROCESS) - activations
    factor = max(1.0, (measured - rest) / activations)
    if whole:
        return measured + (wanted_activations - activations) * factor
    return max(measured, rest + wanted_activations * factor)


def leaves_room(measured: float, tried: MemoryPlan, wanted: MemoryPlan, room: float, *, whole: bool = False) -> bool:
    """Whether a step with the budget of `wanted` leaves the margin of `room` bytes, by what `tried` took."""
    return expected_peak(measured, tried, wanted, whole=whole) <= MARGIN * room
