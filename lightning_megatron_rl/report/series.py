"""A metric over the steps of a run, and what charts and checks take from it."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

Numbers = np.ndarray[Any, np.dtype[np.float64]]

LEAST_STEPS = 10  # that say something about the way of a metric
_SMOOTHED_SHARE = 40  # the average reaches back over a 40th of the steps
_ENDS = 10  # the beginning and the end of a run are a tenth of it each


@dataclass(frozen=True)
class Series:
    """The values of one metric, in the order of their steps.

    Args:
        steps: Rising. # [n]
        values: As they were logged, so they may be nan. # [n]
    """

    steps: Numbers
    values: Numbers

    def finite(self) -> "Series":
        """Return the steps whose value is a finite number."""
        kept = np.isfinite(self.values)
        return Series(self.steps[kept], self.values[kept])

    def start(self) -> float:
        """Return the mean of the first tenth of the finite values, at least three if the run has six."""
        values = self.finite().values
        return float(values[: _size_of_end(len(values))].mean())

    def end(self) -> float:
        """Return the mean of the last tenth of the finite values, at least three if the run has six."""
        values = self.finite().values
        return float(values[-_size_of_end(len(values)) :].mean())

    def is_long(self) -> bool:
        """Whether there are enough finite values to speak of a beginning and an end."""
        return len(self.finite().values) >= LEAST_STEPS


def _size_of_end(count: int) -> int:
    """Return of how many values beginning and end are made: of a short run they share none, but for a single value."""
    return max(1, count // _ENDS, min(3, count // 2))


def smooth(series: Series) -> Series:
    """Return an exponential average, corrected for its short past at the beginning; gaps are left out.

    Its time constant is a 40th of the values, at least three.
    """
    found = series.finite()
    decay = 1 - 1 / max(3.0, len(found.values) / _SMOOTHED_SHARE)
    averages, total, weight = np.empty_like(found.values), 0.0, 0.0
    for place, value in enumerate(found.values):
        total, weight = decay * total + (1 - decay) * value, decay * weight + (1 - decay)
        averages[place] = total / weight
    return Series(found.steps, averages)


def downsample(series: Series, most: int) -> Series:
    """Return at most `most` points in which every peak is kept.

    Neighbouring steps share a bucket, of which the smallest and the largest value stay, at their own steps. First and
    last point stay, too. nan are left out if anything is.

    Args:
        most: At least 4.
    """
    if len(series.values) <= most:
        return series
    found = series.finite()
    count = len(found.values)
    if count <= most:
        return found
    borders = np.linspace(0, count, (most - 2) // 2 + 1).astype(int)
    kept = {0, count - 1}
    for begin, end in pairwise(borders):
        part = found.values[begin:end]
        kept |= {begin + int(part.argmin()), begin + int(part.argmax())}
    places = sorted(kept)
    return Series(found.steps[places], found.values[places])


def bucket_means(series: Series, most: int) -> Series:
    """Return the means of at most `most` runs of neighbouring steps, each at its last step; nan count as 0."""
    count = len(series.values)
    if count <= most:
        return Series(series.steps, np.nan_to_num(series.values))
    borders = np.linspace(0, count, most + 1).astype(int)
    sums = np.add.reduceat(np.nan_to_num(series.values), borders[:-1])
    return Series(series.steps[borders[1:] - 1], sums / np.diff(borders))
