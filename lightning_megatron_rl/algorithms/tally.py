"""Metrics as sums and maxima, so that micro-batches and ranks add up to exactly the numbers of the whole batch."""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

Values = Tensor | Sequence[float] | float
Formula = Callable[..., float]
AllReduce = Callable[[Tensor, Literal["sum", "max"]], Tensor]


class Tally:
    """Collects metrics of masked values; `reduce` makes them global, `compute` turns them into numbers.

    Every metric is a formula over sums and maxima (a minimum is a negated maximum) of float64 scalars, nothing else, so
    the result does not depend on how the values were split. Values are detached, of any shape; a bool mask of that
    shape says which of them count, and what stands at the others, nan included, is never looked at. A metric without
    any counted value is nan; a nan among the counted values makes it nan.

    Every rank must know the same names before `reduce`. A rank with nothing to add registers a name by adding an empty
    tensor: ``tally.add_mean("reward/mean", torch.empty(0))``.

    Args:
        device: where the sums live; the device of the values, so that adding does not wait for it.

    Example:
        ``t = Tally(); t.add_mean("x", torch.tensor([1.0, 2.0, 9.0]), torch.tensor([True, True, False]))``, then
        ``t.compute() == {"x": 1.5}``.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._formulas: dict[str, Formula] = {}
        self._sums: dict[tuple[str, str], Tensor] = {}  # by (metric, argument of its formula)
        self._maxima: dict[tuple[str, str], Tensor] = {}

    def add(
        self, name: str, formula: Formula, sums: Mapping[str, Tensor], maxima: Mapping[str, Tensor] | None = None
    ) -> None:
        """Add scalars to the arguments of `formula`, called by `compute` with each argument's global sum or maximum.

        Raises:
            ValueError: the name is already a metric of another formula.

        Example:
            With ``def rms(squares, count): return (squares / count) ** 0.5``:
            ``t.add("rms", rms, {"squares": x.square().sum(), "count": torch.tensor(x.numel())})``
        """
        if self._formulas.setdefault(name, formula) is not formula:
            raise ValueError(f"{name!r} is already a metric with another formula: give this one a name of its own")
        for part, value in sums.items():
            key = (name, part)
            value = self._scalar(value)
            self._sums[key] = self._sums[key] + value if key in self._sums else value
        for part, value in (maxima or {}).items():
            key = (name, part)
            value = self._scalar(value)
            self._maxima[key] = torch.maximum(self._maxima[key], value) if key in self._maxima else value

    def add_sum(self, name: str, values: Values, mask: Tensor | None = None) -> None:
        """Add to a sum over all values."""
        counted, _ = self._counted(values, mask)
        self.add(name, _total, {"total": counted.sum()})

    def add_mean(self, name: str, values: Values, mask: Tensor | None = None) -> None:
        """Add to a mean over all values, each with the same weight.

        Example:
            Adding [1.0] and then [2.0, 3.0] computes 2.0, not the mean of two means.
        """
        counted, count = self._counted(values, mask)
        self.add(name, _ratio, {"numerator": counted.sum(), "denominator": count})

    def add_max(self, name: str, values: Values, mask: Tensor | None = None) -> None:
        """Add to a maximum over all values."""
        counted, count = self._counted(values, mask)
        self.add(name, _largest, {"count": count, "nans": counted.isnan().sum()}, {"top": _top(counted, mask)})

    def add_min(self, name: str, values: Values, mask: Tensor | None = None) -> None:
        """Add to a minimum over all values."""
        counted, count = self._counted(values, mask)
        self.add(name, _smallest, {"count": count, "nans": counted.isnan().sum()}, {"top": _top(-counted, mask)})

    def add_mean_std(self, name_mean: str, name_std: str, values: Values, mask: Tensor | None = None) -> None:
        """Add to a mean and an unbiased standard deviation; equal values, or a single one, have exactly 0."""
        self.add_mean(name_mean, values, mask)
        counted, count = self._counted(values, mask)
        sums = {"total": counted.sum(), "squares": counted.square().sum(), "count": count}
        self.add(name_std, _std, sums, {"top": _top(counted, mask), "negative_bottom": _top(-counted, mask)})

    def merge(self, other: "Tally") -> None:
        """Add everything that `other` holds; its names that are new here are taken over.

        Raises:
            ValueError: a name stands for two formulas.
        """
        for name, formula in other._formulas.items():
            sums = {part: value for (metric, part), value in other._sums.items() if metric == name}
            maxima = {part: value for (metric, part), value in other._maxima.items() if metric == name}
            self.add(name, formula, sums, maxima)

    def reduce(self, all_reduce: AllReduce) -> "Tally":
        """Return the tally of all ranks together, equal on each of them; this one stays as it is.

        Args:
            all_reduce: combines a float64 vector element by element over the ranks, by "sum" or by "max", and returns
                it. It is called once with "sum", and once with "max" if there are maxima: by every rank, or none.

        Raises:
            RuntimeError: the ranks hold different names (as many, or else the collective itself fails).

        Example:
            ``tally.reduce(lambda vector, op: vector).compute()`` for one rank.
        """
        sum_keys, max_keys = sorted(self._sums), sorted(self._maxima)
        fingerprint = float(zlib.crc32(repr((sum_keys, max_keys)).encode()))
        head = torch.tensor([1.0, fingerprint], dtype=torch.float64, device=self.device)
        sums = all_reduce(torch.cat([head, *(self._sums[key][None] for key in sum_keys)]), "sum")
        num_ranks, fingerprints = sums[:2].tolist()
        if fingerprints != fingerprint * num_ranks:
            raise RuntimeError(
                f"the {num_ranks:.0f} ranks hold metrics of different names, this one {sorted(self._formulas)}: add an "
                "empty tensor under the name on the ranks that have no value for it"
            )
        reduced = Tally(self.device)
        reduced._formulas = dict(self._formulas)
        reduced._sums = dict(zip(sum_keys, sums[2:].unbind(), strict=True))
        if max_keys:
            maxima = all_reduce(torch.stack([self._maxima[key] for key in max_keys]), "max")
            reduced._maxima = dict(zip(max_keys, maxima.unbind(), strict=True))
        return reduced

    def compute(self) -> dict[str, float]:
        """Return every metric's value by name, sorted; of the values added here, or of all ranks after `reduce`."""
        parts = self._sums | self._maxima
        if not parts:
            return {}
        numbers = torch.stack(list(parts.values())).tolist()  # one transfer from the device for all
        arguments: dict[str, dict[str, float]] = {name: {} for name in sorted(self._formulas)}
        for (name, part), number in zip(parts, numbers, strict=True):
            arguments[name][part] = number
        return {name: self._formulas[name](**values) for name, values in arguments.items()}

    def _scalar(self, value: Tensor) -> Tensor:
        return value.detach().to(device=self.device, dtype=torch.float64)

    def _counted(self, values: Values, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the values in float64, with 0 where they do not count, and how many of them count."""
        values = torch.as_tensor(values, dtype=torch.float64, device=self.device)
        if mask is None:
            return values, values.new_tensor(values.numel())
        if mask.dtype != torch.bool or mask.shape != values.shape:
            raise ValueError(
                f"the mask is {mask.dtype} of shape {tuple(mask.shape)}, the values have shape {tuple(values.shape)}: "
                "pass a bool mask of the values' shape"
            )
        mask = mask.to(self.device)
        return torch.where(mask, values, 0.0), mask.sum()


def _top(counted: Tensor, mask: Tensor | None) -> Tensor:
    """Return the largest counted value, -inf if there is none."""
    if mask is not None:
        counted = counted.masked_fill(~mask.to(counted.device), -torch.inf)
    return torch.cat([counted.flatten(), counted.new_full((1,), -torch.inf)]).amax()


def _total(total: float) -> float:
    return total


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan


def _largest(count: float, nans: float, top: float) -> float:
    # nans are counted, because communication backends disagree on the maximum of a number and a nan
    return top if count and not nans else math.nan


def _smallest(count: float, nans: float, top: float) -> float:
    return -_largest(count, nans, top)


def _std(total: float, squares: float, count: float, top: float, negative_bottom: float) -> float:
    if not count or not math.isfinite(squares):
        return math.nan
    if top == -negative_bottom:  # rounding of the difference of squares would make a spread of equal values
        return 0.0
    return math.sqrt(max(squares - total * total / count, 0.0) / (count - 1))
