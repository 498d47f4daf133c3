"""A stream of rollouts: which prompts are sampled when, so that nothing that is trained on is older than a bound.

Versions are those of the policy's weights, which are counted by `global_step`. A group is *born* with the version that
draws its first token. `StreamPlan` decides; `modules/streaming.py` samples.
"""

import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_megatron_rl.rollout.protocol import Progress, join_segments
from lightning_megatron_rl.sample import Outcome, Prompt, Sample, Turn


@dataclass
class Response:
    """A response as it grows: in an engine, or put away between two stays there."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of each token, under the weights that drew it
    segments: list[tuple[int, int]] = field(default_factory=list)  # (version of the weights, tokens drawn with them)
    finish_reason: str | None = None
    turns: list[Turn] = field(default_factory=list)  # of an episode
    outcome: Outcome | None = None  # of an episode that is over

    @classmethod
    def load(cls, saved: dict[str, Any]) -> "Response":
        """Return the response of which `asdict` made JSON."""
        values = dict(saved)
        values["segments"] = [(version, count) for version, count in saved["segments"]]
        values["turns"] = [Turn(**turn) for turn in saved.get("turns", ())]
        if values.get("outcome") is not None:
            values["outcome"] = Outcome(**values["outcome"])
        return cls(**values)

    def add(self, news: Progress) -> None:
        """Append what an engine sampled."""
        self.token_ids += news.token_ids
        self.logprobs += news.logprobs
        self.segments = join_segments(self.segments, news.segments)
        self.finish_reason = news.finish_reason

    def add_foreign(self, token_ids: list[int]) -> None:
        """Append tokens that nobody drew; they are counted with those before them."""
        self.token_ids += token_ids
        self.logprobs += [0.0] * len(token_ids)
        if self.segments:
            self.segments = join_segments(self.segments, [(self.segments[-1][0], len(token_ids))])


@dataclass
class Group:
    """The responses to one prompt."""

    number: int  # among the groups of a run, in the order of their birth
    prompt: Prompt
    born: int  # version of the policy that draws its first token
    responses: list[Response]
    samples: list[Sample] = field(default_factory=list)  # rewarded, once all responses are complete

    def age(self, version: int) -> int:
        """Return the versions between its birth and `version`."""
        return version - self.born

    @property
    def is_complete(self) -> bool:
        """Whether every response has ended."""
        return all(response.finish_reason is not None for response in self.responses)


class StreamPlan:
    """Admits prompts, and gives out batches of complete groups of which none is older than `max_staleness` versions.

    At most ``(max_staleness + 1) * batch_size`` groups are under way or ready. The oldest ready ones go first, and a
    batch waits while, for any k from 0 to `max_staleness`, more than k batches of the groups under way have their
    deadline (birth + `max_staleness`) within the next k versions: there would be no batch left that could take them.
    A batch may be given out in parts, each as soon as its groups are ready and as the rest of the batch, too, has room
    for those that are due.

    Args:
        batch_size: Groups of a batch.
        max_staleness: Most versions between a group's birth and the version that is trained on it.
        in_flight: Most responses sampled at a time, counted as whole groups: a group whose last responses are long
            leaves room for others.
        num_generations: Responses of a group.
        parts: Of equal size, in which a batch is given out.
    """

    def __init__(
        self, batch_size: int, max_staleness: int, in_flight: int, num_generations: int, parts: int = 1
    ) -> None:
        self.batch_size = batch_size
        self.max_staleness = max_staleness
        self.in_flight = in_flight
        self.num_generations = num_generations
        self.part_size = batch_size // parts
        self.num_taken = 0  # groups of the batch that is given out in parts
        self._given: int | None = None  # version of the last batch that was given out as a whole
        self.waiting: deque[Prompt] = deque()  # admitted and not begun
        self.under_way: dict[int, Group] = {}  # by number
        self.ready: list[Group] = []
        self.num_born = 0
        self.num_dropped = 0  # groups that were too old when they were complete; their prompts were admitted again

    def admit(self, prompts: Iterable[Prompt]) -> None:
        """Take prompts that are to be used exactly once."""
        self.waiting.extend(prompts)

    @property
    def num_growing(self) -> int:
        """Responses that are not complete."""
        return sum(response.finish_reason is None for group in self.under_way.values() for response in group.responses)

    def begin(self, version: int) -> list[Group]:
        """Return as many new groups as may be under way now."""
        limit = (self.max_staleness + 1) * self.batch_size
        room = self.in_flight * self.num_generations - self.num_growing  # responses
        begun = []
        # what is trained on with this version has room of its batch: what is begun beyond that could not be in time
        limit -= self.batch_size if self._given == version else self.num_taken
        while self.waiting and room >= self.num_generations and len(self.under_way) + len(self.ready) < limit:
            prompt = self.waiting.popleft()
            group = Group(self.num_born, prompt, version, [Response() for _ in range(self.num_generations)])
            self.num_born += 1
            self.under_way[group.number] = group
            begun.append(group)
            room -= self.num_generations
        return begun

    def finish(self, group: Group) -> None:
        """A group's responses are complete and rewarded."""
        del self.under_way[group.number]
        self.ready.append(group)

    def replace(self, group: Group, prompt: Prompt) -> None:
        """Leave out a group that was under way; another prompt comes next in its place."""
        del self.under_way[group.number]
        self.waiting.appendleft(prompt)

    def drop_stale(self, version: int) -> list[Group]:
        """Leave out what is older than the bound at `version`, and admit its prompts again, before all others.

        Only what breaks the plan makes such groups: a checkpoint that is resumed with a smaller bound.
        """
        groups = [*self.ready, *self.under_way.values()]
        stale = sorted((group for group in groups if group.age(version) > self.max_staleness), key=_number)
        numbers = {group.number for group in stale}
        self.ready = [group for group in self.ready if group.number not in numbers]
        for number in numbers:
            self.under_way.pop(number, None)
        self.waiting.extendleft(group.prompt for group in reversed(stale))
        self.num_dropped += len(stale)
        return stale

    def can_take(self, version: int) -> bool:
        """Whether there is a batch for `version`, or its next part, and whoever is not in it can still be in time."""
        if len(self.ready) < self.part_size:
            return False
        deadlines = [group.born + self.max_staleness for group in self.under_way.values()]
        room = self.batch_size - self.num_taken - self.part_size  # in the rest of the batch
        return all(
            sum(deadline <= version + k for deadline in deadlines) <= room + k * self.batch_size
            for k in range(self.max_staleness + 1)
        )

    def take(self, version: int) -> list[Group]:
        """Return the batch for `version`, or its next part: the oldest ready groups, in the order of their birth.

        Raises:
            RuntimeError: There is none, or the bound would be broken.
        """
        if not self.can_take(version):
            raise RuntimeError(f"no batch of {self.part_size} groups for version {version}: {self.describe()}")
        batch = sorted(self.ready, key=_number)[: self.part_size]
        oldest = max(group.age(version) for group in batch)
        if oldest > self.max_staleness:
            raise RuntimeError(f"a group is {oldest} versions old, max_staleness is {self.max_staleness}")
        taken = {group.number for group in batch}
        self.ready = [group for group in self.ready if group.number not in taken]
        self.num_taken = (self.num_taken + self.part_size) % self.batch_size
        self._given = version if not self.num_taken else None
        return batch

    def describe(self) -> str:
        """Return what there is, for errors and logs."""
        return f"{len(self.ready)} groups ready, {len(self.under_way)} under way, {len(self.waiting)} prompts waiting"


class SparePrompts:
    """Prompts of the training set that come in the place of others, in orders of their own.

    Args:
        order: The prompts in the order of a pass through the training set, counted from 0; the same on all replicas.
        rank: Of this replica, which takes every `replicas`-th prompt.
        replicas: Their number.
        limit: Most prompts between two batches.
    """

    def __init__(self, order: Callable[[int], list[Prompt]], rank: int, replicas: int, limit: int) -> None:
        self.limit = limit
        self.num_drawn = 0  # of this replica's share, with those that were left out
        self._order = order
        self._rank, self._replicas = rank, replicas
        self._share: tuple[int, list[Prompt]] | None = None  # the pass last asked for, and this replica's part of it

    def draw(self, without: set[int]) -> Prompt | None:
        """Return the next prompt that is none of these rows; None if a whole pass has no other."""
        tries = len(self._share_of(0))
        for _ in range(tries):
            turn, place = divmod(self.num_drawn, tries)
            self.num_drawn += 1
            prompt = self._share_of(turn)[place]
            if prompt.index not in without:
                return prompt
        return None

    def _share_of(self, turn: int) -> list[Prompt]:
        if self._share is None or self._share[0] != turn:
            order = self._order(turn)
            whole = len(order) // self._replicas * self._replicas  # as many for each
            self._share = turn, order[self._rank : whole : self._replicas]
        return self._share[1]


def divide_states(states: list[str], replicas: int) -> list[str]:
    """Return the states of so many replicas' streams: the same, or all that they hold dealt out, the oldest first.

    As many prompts come to each replica, whether they were begun or wait: each has as many batches before it.
    """
    if len(states) == replicas:
        return states
    parts = [json.loads(state) for state in states]
    groups = sorted((group for part in parts for group in part["groups"]), key=lambda group: group["born"])
    waiting = [row for part in parts for row in part["waiting"]]
    num_born = max(part["num_born"] for part in parts) + len(groups)
    spares = max(part.get("num_spares", 0) for part in parts)  # some prompts may come again, or not this time
    common = {"num_born": num_born, "num_spares": spares, "judged_by": parts[0].get("judged_by")}
    divided = []
    for rank in range(replicas):
        begun = [{**group, "number": number} for number, group in enumerate(groups[rank::replicas])]
        rest = waiting[(rank - len(groups)) % replicas :: replicas]
        divided.append(json.dumps({"waiting": rest, "groups": begun, **common}))
    return divided


def rows_of(state: str) -> list[int]:
    """Return the rows of the training set that a stream had read and not given out, those that were begun first."""
    part = json.loads(state)
    groups = sorted(part["groups"], key=lambda group: (group["born"], group["number"]))
    return [*(group["row"] for group in groups), *part["waiting"]]


def state_of_rows(rows: list[int]) -> str:
    """Return the state of a stream that has read these rows and begun none."""
    return json.dumps({"waiting": rows, "groups": [], "num_born": 0})


def find_prompts(rows: list[int], prompts: Mapping[int, Prompt]) -> list[Prompt]:
    """Return the prompts of rows.

    Raises:
        ValueError: A row that the training set does not have.
    """
    if missing := [row for row in rows if row not in prompts]:
        raise ValueError(
            f"the checkpoint's stream of rollouts holds the training row {missing[0]}, which the training set does"
            " not have: resume with the data of the run, or start from exported weights instead of ckpt_path"
        )
    return [prompts[row] for row in rows]


def _number(group: Group) -> int:
    return group.number
