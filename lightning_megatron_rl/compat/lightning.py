"""What Lightning has under private names only; docs/private_apis.md says why each is needed."""

import operator
from collections.abc import Mapping
from functools import reduce
from inspect import currentframe, unwrap
from traceback import walk_stack
from typing import Any, get_args

import lightning.pytorch as pl
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

ScriptLauncher = _SubprocessScriptLauncher


def run_arguments(trainer: "pl.Trainer") -> dict[str, Any] | None:
    """Return `ckpt_path` and `weights_only` of the run that calls this, in a hook; None if they cannot be told.

    Lightning has looked the checkpoint up ("last", a requeued SLURM job's), but passes it on as an argument alone:
    `trainer.ckpt_path` is that of the run before, until the weights are loaded. `weights_only` it passes to strategies
    that load before `setup`, and to no others. So both are read from the call of `Trainer._run`.
    """
    for frame, _ in walk_stack(currentframe()):
        known: Mapping[str, Any] = frame.f_locals if frame.f_code.co_qualname == "Trainer._run" else {}
        if known.get("self") is trainer and "ckpt_path" in known:
            return {name: known.get(name) for name in ("ckpt_path", "weights_only")}
    return None


def read_one_as_one() -> None:
    """Let parsers read 1 for a limit of batches as one batch, as a Trainer does in Python.

    Python keeps one `Optional` of a union for all orders of its types. So Lightning's `Optional[Union[int, float]]` is
    another library's `float | int | None`, and jsonargparse, which takes the first type that fits, reads 1 as 1.0: all
    batches.
    """
    annotations = unwrap(pl.Trainer.__init__).__annotations__
    for name, annotation in annotations.items():
        types = get_args(annotation)
        if int in types and float in types:
            annotations[name] = reduce(operator.or_, [int, *(kind for kind in types if kind is not int)])


def validation_is_due(trainer: "pl.Trainer") -> bool:
    """Whether the fit loop will run a validation after the batch that ends; the rule is the loop's own."""
    fetcher = trainer.fit_loop._data_fetcher
    return fetcher is not None and trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)


def has_layer_sync(strategy: object) -> bool:
    """Whether the Trainer has given the strategy a plugin that converts layers, such as for `sync_batchnorm`."""
    return isinstance(strategy, ParallelStrategy) and strategy._layer_sync is not None
