"""Python's garbage collector does not walk through what stays for the whole run."""

import gc

_MANY = 10_000  # objects; somebody has set them aside already


class LongLived:
    """Sets aside what a run has made when its second batch starts, until it ends.

    Libraries are half a million objects and more. Python looks at all of them every dozen or so batches for cycles that
    nobody needs, which takes a quarter to half a second, on one rank while the others wait for it. After the first
    batch everything is there that stays; what comes later is looked at as before.
    """

    def __init__(self) -> None:
        self._batches = 0
        self._holds = False

    def batch_starts(self) -> None:
        """Set everything aside at the second call, unless somebody has done so before (`gc.freeze`)."""
        self._batches += 1
        if self._batches == 2 and gc.get_freeze_count() < _MANY:
            gc.collect()
            gc.freeze()
            self._holds = True

    def release(self) -> None:
        """Let Python look at all objects again: a model is a web of cycles."""
        if self._holds:
            gc.unfreeze()
        self._batches, self._holds = 0, False
