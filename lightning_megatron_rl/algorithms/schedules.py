"""Coefficients that change while a run goes on."""

from dataclasses import dataclass

from lightning_megatron_rl.utilities.ranges import COUNT, FINITE, check_ranges


@dataclass
class LinearSchedule:
    """From a coefficient's own value in a straight line to `final` within `num_steps`, then constant.

    Args:
        final: Value from step `num_steps` on.
        num_steps: Length of the line, in `global_step`s.

    Raises:
        ValueError: Fewer than one step.

    Example:
        ``LinearSchedule(final=0.0, num_steps=100).at(25, start=0.01)`` is 0.0075.
    """

    final: float = 0.0
    num_steps: int = 1000

    def __post_init__(self) -> None:
        check_ranges({"final": FINITE, "num_steps": COUNT}, vars(self), "schedule.")

    def at(self, step: int, start: float) -> float:
        """Return the value at `step`, counted from 0, of a coefficient that begins at `start`."""
        done = min(step / self.num_steps, 1.0)
        return start + (self.final - start) * done
