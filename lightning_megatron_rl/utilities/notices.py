"""Notices of losses and failures that are repeated at the end of a run."""

import logging
from collections import Counter

log = logging.getLogger("lightning_megatron_rl")

_MOST_KEPT = 1000  # different messages
_OTHERS = f"messages after the first {_MOST_KEPT} different ones"
_MOST_REPEATED = 5  # of them, at the end of a run

_losses: Counter[str] = Counter()
_failures: list[str] = []


class RunFailedError(RuntimeError):
    """Training finished, but one of its outputs failed."""


def tell_loss(message: str) -> None:
    """Warn that something was lost or skipped; `finish` repeats it."""
    log.warning(message)
    _losses[message if message in _losses or len(_losses) < _MOST_KEPT else _OTHERS] += 1


def tell_failure(message: str, *, aloud: bool = True) -> None:
    """Log that an output of the run failed; `finish` raises it.

    Args:
        message: What failed, and what to do.
        aloud: Whether this process logs it: one rank does where all of them know.
    """
    if aloud:
        log.error(message)
    _failures.append(message)


def forget() -> None:
    """Begin a run without notices."""
    _losses.clear()
    _failures.clear()


def finish() -> None:
    """End a run: repeat what was lost in it, and raise what failed.

    Raises:
        RunFailedError: An output of the run failed.
    """
    losses, failures = _losses.copy(), list(_failures)
    forget()
    if losses:
        first = "; ".join(f"{message} ({count} times)" for message, count in losses.most_common(_MOST_REPEATED))
        more = f"; and {len(losses) - _MOST_REPEATED} more kinds" if len(losses) > _MOST_REPEATED else ""
        log.warning("this run told %d times that something was lost or skipped: %s%s", losses.total(), first, more)
    if failures:
        raise RunFailedError(f"the run ended, but {len(failures)} part(s) of it FAILED: {'; '.join(failures)}")
