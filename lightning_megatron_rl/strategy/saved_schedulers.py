"""Whether the learning-rate schedulers of a checkpoint are those of the run that goes on from it."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.optim.lr_scheduler import LRScheduler

from lightning_megatron_rl.compat.torch_names import scheduler_parts
from lightning_megatron_rl.utilities.notices import tell_loss

_PROGRESS = ("last_epoch", "verbose")  # no settings; older versions of torch have the second
_REMEDY = (
    "Resume with the lr_scheduler that it was saved with, or start a new run with the checkpoint's weights (init_from"
    " of the module)."
)


def check_schedulers(own: Sequence[LRScheduler], saved: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a checkpoint with other schedulers; warn of other settings, for as in torch the saved ones are in force.

    Lightning pairs schedulers with states without a word, and torch's take over any entries. Most of torch's multiply
    the learning rate at hand, so one that begins with another's learning rate never has the one that was set.

    Args:
        own: Of this run, before they are given their states.
        saved: States of the checkpoint's.

    Raises:
        ValueError: There are more or fewer, or those of torch are of another kind.
    """
    ignored = _differences(own, saved)
    if ignored:
        rank_zero_only(tell_loss)(
            f"the learning rate goes on as the checkpoint has it: {'; '.join(ignored)} as set for this run. To train"
            " with another schedule start a new run with the checkpoint's weights (init_from of the module)."
        )


def _differences(own: Sequence[LRScheduler], saved: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the settings that the checkpoint has otherwise, also of the schedulers that one is made of."""
    if len(own) != len(saved):
        raise ValueError(
            f"the checkpoint was saved with {_number(len(saved))}, and this run has {_number(len(own))}: its learning"
            f" rate would be neither the checkpoint's nor the one that is set. {_REMEDY}"
        )
    found = []
    for scheduler, theirs in zip(own, saved, strict=True):
        mine, kind = scheduler.state_dict(), type(scheduler)
        if kind.__module__ == LRScheduler.__module__ and _names(mine) != _names(theirs):
            raise ValueError(
                f"the checkpoint was saved with another kind of lr_scheduler than this run's {kind.__name__}: it has"
                f" {', '.join(sorted(_names(theirs)))}, not {', '.join(sorted(_names(mine)))}. {_REMEDY}"
            )
        parameters = inspect.signature(kind).parameters.keys() - _PROGRESS
        for name in sorted(mine.keys() & theirs.keys()):
            # SequentialLR keeps `milestones` as `_milestones`, CyclicLR each group's `base_lr` in `base_lrs`
            plain = name.lstrip("_")
            if plain == "schedulers":
                found += _differences(scheduler_parts(scheduler), theirs[name])
            elif not parameters.isdisjoint((plain, plain.removesuffix("s"))) and mine[name] != theirs[name]:
                found.append(f"{plain} of {kind.__name__} {theirs[name]}, not {mine[name]}")
    return found


def _names(state: Mapping[str, Any]) -> set[str]:
    return {name for name in state if not name.startswith("_") and name not in _PROGRESS}


def _number(count: int) -> str:
    return {0: "no lr_scheduler", 1: "an lr_scheduler"}.get(count, f"{count} lr_schedulers")
