"""`StreamWatch`: how many groups a stream has, as that changes, what there was when a batch was taken, and rewards."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lightning_megatron_rl.rollout.stream import Group, StreamPlan
from lightning_megatron_rl.sample import Sample
from lightning_megatron_rl.utilities.spans import SpanLog

MAX_CHANGES = 20_000  # that are kept


@dataclass(frozen=True)
class GroupCounts:
    """The groups of a stream at a time."""

    time: float  # of `time.monotonic`
    ready: int
    under_way: int


@dataclass(frozen=True)
class AtBatch:
    """What a stream had when a batch was taken out of it, without that batch."""

    ready: int  # groups
    under_way: int  # groups
    oldest_age: int  # versions since the birth of the oldest of these groups; 0 without any
    num_dropped: int  # groups in all of the run
    selection: float = 0.0  # see `StreamWatch.note_batch`


@dataclass
class Lengths:
    """Tokens and responses of groups."""

    tokens: int = 0
    responses: int = 0

    def add(self, groups: Iterable[Group]) -> "Lengths":
        """Return these and those of groups, as far as they are sampled."""
        responses = [response for group in groups for response in group.responses]
        tokens = sum(len(response.token_ids) for response in responses)
        return Lengths(self.tokens + tokens, self.responses + len(responses))

    @property
    def mean(self) -> float:
        """Tokens of a response."""
        return self.tokens / max(self.responses, 1)


class StreamWatch:
    """Follows a stream from the thread that works on it; others read."""

    def __init__(self) -> None:
        self.at_batch = AtBatch(0, 0, 0, 0)  # the last one
        self.rewards = SpanLog()  # of complete groups, beside sampling
        self._changes: deque[GroupCounts] = deque(maxlen=MAX_CHANGES)
        self._trained = Lengths()  # of all groups that were given out

    def timed(self, reward: Callable[[list[Sample]], None]) -> Callable[[list[Sample]], None]:
        """Return `reward`, with its time among `rewards`."""

        def judge(samples: list[Sample]) -> None:
            with self.rewards.during("reward"):
                reward(samples)

        return judge

    def note(self, plan: StreamPlan) -> None:
        """Take note of the numbers if they are not those of the last time."""
        ready, under_way = len(plan.ready), len(plan.under_way)
        if not self._changes or (self._changes[-1].ready, self._changes[-1].under_way) != (ready, under_way):
            self._changes.append(GroupCounts(time.monotonic(), ready, under_way))

    def note_batch(self, plan: StreamPlan, version: int, batch: Iterable[Group]) -> None:
        """A batch for `version` was taken.

        Its selection is how much longer or shorter the responses of all batches are in the mean than those of all
        groups that were begun: near 0 as soon as what is under way is little of the whole, unless long ones never come.
        """
        left = [*plan.ready, *plan.under_way.values()]
        self._trained = self._trained.add(batch)
        begun = self._trained.add(left)
        selection = self._trained.mean / begun.mean - 1 if begun.tokens else 0.0
        oldest = max((group.age(version) for group in left), default=0)
        self.at_batch = AtBatch(len(plan.ready), len(plan.under_way), oldest, plan.num_dropped, selection)
        self.note(plan)

    def since(self, after: float) -> list[GroupCounts]:
        """Return the changes that came later than a time, as far as they are kept."""
        return [counts for counts in list(self._changes) if counts.time > after]


@dataclass(frozen=True)
class Watched:
    """What a rank can be watched by, beside its own phases; see `SpanLog`."""

    sampler: SpanLog | None = None  # of the engine that this rank leads
    groups: StreamWatch | None = None  # of its stream
