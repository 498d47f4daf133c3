"""The memory plan: what trainer and sampler hold on a GPU at each moment, and whether the fullest fits."""

from dataclasses import dataclass, replace

GIB = 2**30
SPARE = 0.1  # of the free memory: what a plan may be wrong by (docs/planning.md)


@dataclass(frozen=True)
class Part:
    """One use of memory."""

    name: str
    size: float  # bytes
    arithmetic: str
    remedy: str  # what makes it smaller
    pushed: float | None = None  # bytes of a sampler's part while weights are pushed into it; None: all

    def line(self) -> str:
        """Return the part as a line of a table."""
        return f"{self.name:34s} {self.size / GIB:8.2f} GiB  {self.arithmetic}"


# parts that are not there at all times
WEIGHTS, GRADIENTS, ACTIVATIONS = "trainer: weights", "trainer: gradients", "trainer: activations"
OPTIMIZER, EXPERT_OPTIMIZER = "trainer: optimizer state", "trainer: optimizer state, experts"
SECOND_WEIGHTS = "trainer: weights, old and new"
STEP_COPIES = "trainer: copies for the step"
PUSH = "trainer: weight push"
PROCESS = "trainer: process"
SAMPLER_PROCESS = "sampler: process"
# moments that may be the fullest
COMPUTING, STEPPING, WRAPPING = "the trainer computes", "the optimizer steps", "Megatron wraps the model"
PUSHING, SAMPLING = "weights are pushed", "the sampler works"
_MOMENTARY = {SECOND_WEIGHTS: WRAPPING, STEP_COPIES: STEPPING}
_OFFLOADED = {"optimizer": (OPTIMIZER, EXPERT_OPTIMIZER), "gradients": (GRADIENTS,), "parameters": (WEIGHTS,)}


@dataclass(frozen=True)
class MemoryPlan:
    """What trainer and sampler take of one GPU at the fullest moment, against what is free on it.

    A sampler that sleeps has its process alone while the trainer works; it wakes with its weights, when the trainer has
    moved optimizer state and gradients away, and takes its cache when the trainer's parameters may be away, too.

    Example:
        ``MemoryPlan(trainer_parts(...), sampler_parts(...), free=80 * GIB).check()`` raises what does not fit.
    """

    trainer: tuple[Part, ...]
    sampler: tuple[Part, ...]
    free: int  # bytes, before the run has taken any
    apart: bool = False  # the sampler sleeps while the trainer works: its memory is free then
    offloads: tuple[str, ...] = ()  # what the trainer moves away while the sampler works
    gpu: str = "a GPU"  # which, in a refusal

    @property
    def moments(self) -> dict[str, dict[Part, float]]:
        """Bytes of each part at each moment that may be the fullest."""
        every = [COMPUTING, *(_MOMENTARY[part.name] for part in self.trainer if part.name in _MOMENTARY)]
        if self.apart and self.sampler:  # otherwise both have least when the trainer waits
            every += [PUSHING, SAMPLING]
        return {moment: self.at(moment) for moment in every}

    def at(self, moment: str) -> dict[Part, float]:
        """Return bytes of each part at one moment; of a sampler that never sleeps all is there at each."""
        return self._trainer_at(moment) | self._sampler_at(moment)

    def _trainer_at(self, moment: str) -> dict[Part, float]:
        away = {name for name, only in _MOMENTARY.items() if only != moment}
        if moment != COMPUTING:
            away.add(ACTIVATIONS)
        if moment == WRAPPING:
            away.update((*_OFFLOADED["optimizer"], PUSH))  # are made next
        if "parameters" in self.offloads and moment != PUSHING:
            away.add(PUSH)  # is for parameters that stay where they are
        moved = {PUSHING: ("optimizer", "gradients"), SAMPLING: tuple(_OFFLOADED)}.get(moment, ())
        for name in moved:
            away.update(_OFFLOADED[name] if name in self.offloads else ())
        return {part: 0 if part.name in away else part.size for part in self.trainer}

    def _sampler_at(self, moment: str) -> dict[Part, float]:
        found = {}
        for part in self.sampler:
            if part.name == SAMPLER_PROCESS or moment == SAMPLING:
                found[part] = part.size
            elif moment == WRAPPING:  # it sleeps, or may still be loading
                found[part] = 0
            elif not self.apart:
                found[part] = part.size
            elif moment == PUSHING:
                found[part] = part.size if part.pushed is None else part.pushed
            else:
                found[part] = 0
        return found

    @property
    def totals(self) -> dict[str, float]:
        """Bytes at each of those moments, the fullest first."""
        totals = {moment: sum(found.values()) for moment, found in self.moments.items()}
        return dict(sorted(totals.items(), key=lambda item: item[1], reverse=True))

    @property
    def needed(self) -> float:
        """Bytes at the fullest moment."""
        return next(iter(self.totals.values()))

    @property
    def has_room_for_both(self) -> bool:
        """Whether a sampler that can sleep need not: awake it fits beside the trainer, and the plan may be wrong."""
        return replace(self, apart=False).needed <= (1 - SPARE) * self.free

    def leaves(self, margin: float) -> bool:
        """Whether it fits, and the moments of the trainer take at most that share of the free memory.

        A sampler that works or wakes alone takes what it was told to, whatever the trainer's settings are.
        """
        trained = [total for moment, total in self.totals.items() if moment not in (PUSHING, SAMPLING)]
        return self.needed <= self.free and max(trained) <= margin * self.free

    def describe(self) -> str:
        """Return the arithmetic as lines: all parts, those that are not there at the fullest moment marked."""
        (fullest, needed), *others = self.totals.items()
        lines = []
        for part, there in self.moments[fullest].items():
            if there == part.size:
                lines.append(part.line())
            elif part.name not in _MOMENTARY:
                lines.append(f"{part.line()} ({there / GIB:.2f} GiB then)")
        less = "".join(f"; {total / GIB:.2f} while {moment}" for moment, total in others)
        total = f"{'needed':34s} {needed / GIB:8.2f} GiB  while {fullest}{less}"
        return "\n".join([*lines, total, f"{'free':34s} {self.free / GIB:8.2f} GiB"])

    def record(self) -> dict[str, float | str]:
        """Return the plan as plain data: GiB at the fullest moment, the most of the trainer alone, the arithmetic."""
        trainer = max(sum(self._trainer_at(moment).values()) for moment in self.moments)
        return {
            "moment": next(iter(self.totals)),
            "needed_gib": self.needed / GIB,
            "free_gib": self.free / GIB,
            "trainer_gib": trainer / GIB,
            "text": self.describe(),
        }

    def check(self) -> None:
        """Refuse a run that cannot fit.

        Raises:
            ValueError: With every part's arithmetic, and what to lower, the largest part first.
        """
        if self.needed <= self.free:
            return
        there = self.moments[next(iter(self.totals))]
        parts = sorted((part for part in there if there[part]), key=lambda part: there[part], reverse=True)
        remedies = [*dict.fromkeys(part.remedy for part in parts if part.remedy), *self._handing_over()]
        raise ValueError(
            f"this run needs {self.needed / GIB:.1f} GiB of {self.gpu} that has {self.free / GIB:.1f} GiB free:\n"
            f"{self.describe()}\nWhat lowers it, the largest part first:\n"
            + "\n".join(f"- {remedy}" for remedy in remedies)
        )

    def _handing_over(self) -> list[str]:
        """What trainer and sampler could leave each other and do not."""
        if not self.trainer:
            return []
        if self.sampler and not self.apart:
            return ["set the engine's sleep_level: its memory is the trainer's then while the trainer works"]
        kept = [name for name in _OFFLOADED if name not in self.offloads]
        if next(iter(self.totals)) in (PUSHING, SAMPLING) and kept:
            return [f"MegatronStrategy(offload_while_sampling={list(_OFFLOADED)}), which lacks {', '.join(kept)}"]
        return []
