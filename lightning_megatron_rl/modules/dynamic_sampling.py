"""Dynamic sampling (DAPO): groups whose samples all got the same reward make room for groups of other prompts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch

from lightning_megatron_rl.algorithms.tally import Tally
from lightning_megatron_rl.rollout.protocol import derive_seed
from lightning_megatron_rl.sample import Prompt, Sample
from lightning_megatron_rl.utilities.ranges import COUNT, check_ranges


@dataclass
class DynamicSampling:
    """Draw other prompts in the place of those whose groups have no spread, and so no gradient (arXiv:2503.14476).

    Args:
        max_rounds: Most times that prompts are drawn again in one step; what has no spread then stays as it is.

    Raises:
        ValueError: Fewer than one round.
    """

    max_rounds: int = 3

    def __post_init__(self) -> None:
        check_ranges({"max_rounds": COUNT.called("or leave dynamic_sampling out")}, vars(self), "dynamic_sampling.")


@dataclass
class Replicas:
    """The model replicas of a run, as far as a refill needs them."""

    rank: int
    gather: Callable[[object], list]  # the values of all replicas, in their order; a collective


def shuffled_prompts(prompts: list[Prompt], seed: int, step: int, round_number: int) -> Iterator[Prompt]:
    """Go through `prompts` in an order of each step and round, the same on every rank and in every layout.

    The data loader's position does not move, so a resumed run draws the same.
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, step, round_number, "dynamic sampling"))
    return (prompts[row] for row in torch.randperm(len(prompts), generator=generator).tolist())


def refill_groups(
    samples: list[Sample],
    num_generations: int,
    *,
    max_rounds: int,
    candidates: Callable[[int], Iterator[Prompt]],
    sample: Callable[[list[Prompt]], list[Sample]],
    replicas: Replicas,
    tally: Tally,
) -> list[Sample]:
    """Return `samples` with other groups in the place of those without spread, as far as some are found.

    Which prompts are drawn depends on the groups of all replicas together, not on how many replicas there are. No
    prompt is drawn twice in a step.

    Args:
        samples: This replica's, rewarded; the responses to one prompt stand together.
        num_generations: Responses per prompt.
        max_rounds: Most rounds of drawing.
        candidates: Prompts of a round, counted from 1, in the order in which they are taken.
        sample: Samples and rewards `num_generations` responses to each prompt.
        replicas: All replicas take part in every round.
        tally: Gets ``rollout/refill_rounds`` and ``rollout/refill_groups``, the number of prompts that were drawn.
    """
    groups = [samples[start : start + num_generations] for start in range(0, len(samples), num_generations)]
    used: set[tuple[str, int]] = set()
    rounds = drawn = 0
    while rounds < max_rounds:
        flat = {number: _key(group[0].prompt) for number, group in enumerate(groups) if _is_flat(group)}
        everywhere = replicas.gather(([_key(group[0].prompt) for group in groups], flat))
        used.update(key for keys, _ in everywhere for key in keys)
        # by prompt, not by replica: which group gets which prompt must not depend on where the groups are
        places = sorted(
            (key, rank, number) for rank, (_, theirs) in enumerate(everywhere) for number, key in theirs.items()
        )
        fresh = (prompt for prompt in candidates(rounds + 1) if _key(prompt) not in used)
        taken = list(islice(fresh, len(places)))
        if not taken:  # nothing to refill, or no prompt left to do it with
            break
        rounds += 1
        used.update(_key(prompt) for prompt in taken)
        mine = [
            (number, prompt)
            for (_, rank, number), prompt in zip(places, taken, strict=False)  # prompts may run out
            if rank == replicas.rank
        ]
        drawn += len(mine)
        answers = sample([prompt for _, prompt in mine])
        for place, (number, _) in enumerate(mine):
            group = answers[place * num_generations : (place + 1) * num_generations]
            if not _is_flat(group):
                groups[number] = group
    tally.add_max("rollout/refill_rounds", [float(rounds)])
    tally.add_sum("rollout/refill_groups", [float(drawn)])
    return [member for group in groups for member in group]


def _is_flat(group: list[Sample]) -> bool:
    return all(member.reward == group[0].reward for member in group)


def _key(prompt: Prompt) -> tuple[str, int]:
    return prompt.dataset, prompt.index
