"""Keeps Python's garbage collector from walking through objects that live for the whole run."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

IMPORT_THRESHOLD = 50_000  # objects between two collections while libraries are imported; Python's own is 700
_MANY = 10_000  # objects: already set aside, by `gc.freeze`

_usual: tuple[int, int, int] | None = None  # thresholds that `collect_rarely` has replaced
_set_aside = False  # by `set_aside`


@contextmanager
def importing() -> Iterator[None]:
    """Collect garbage rarely within: else that takes a fifth to a quarter of the imports of Megatron or vLLM."""
    before = _raise_threshold()
    try:
        yield
    finally:
        gc.set_threshold(*before)


def collect_rarely() -> None:
    """Collect garbage rarely from now on, as `importing` does, until `collect_as_usual`."""
    global _usual
    if _usual is None:
        _usual = _raise_threshold()


def collect_as_usual() -> None:
    """Collect garbage as often as before `collect_rarely`, if that was called."""
    global _usual
    if _usual is not None:
        gc.set_threshold(*_usual)
        _usual = None


def _raise_threshold() -> tuple[int, int, int]:
    """Return the thresholds before; 0 stays, with which nothing is collected."""
    before = gc.get_threshold()
    if before[0]:
        gc.set_threshold(max(before[0], IMPORT_THRESHOLD), *before[1:])
    return before


def set_aside() -> None:
    """Freeze all objects for as long as this process lives; `LongLived` then does nothing."""
    global _set_aside
    gc.freeze()
    _set_aside = True


class LongLived:
    """Freezes the objects that exist when the second batch starts, until the run ends.

    Libraries hold half a million objects. Python searches all of them for cycles every dozen or so batches, which takes
    a quarter to half a second on one rank while the others wait. What exists after the first batch stays for the run
    and is skipped from then on.
    """

    def __init__(self) -> None:
        self._batches = 0
        self._holds = False

    def batch_starts(self) -> None:
        """Set everything aside at the second call, unless that was done before; end `collect_rarely`."""
        collect_as_usual()
        self._batches += 1
        # counting takes a fifth of a second where there is much to count
        if self._batches == 2 and not _set_aside and gc.get_freeze_count() < _MANY:
            gc.collect()
            gc.freeze()
            self._holds = True

    def release(self) -> None:
        """Unfreeze all objects: a model is full of reference cycles."""
        if self._holds:
            gc.unfreeze()
        self._batches, self._holds = 0, False
