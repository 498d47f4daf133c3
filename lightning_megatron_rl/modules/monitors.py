"""`monitor` of checkpoints and early stopping: a name that no step and no validation logs is refused at the start."""

import difflib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lightning_megatron_rl.data.base import RowDataModule

if TYPE_CHECKING:
    from lightning_megatron_rl.modules.model import ModelModule

OWN = "lightning_megatron_rl."
_SHOWN = 12  # names in a message
# every name of docs/metrics.md that a training step may log; <name> stands for each reward, <phase> for any word
TRAINING = {
    "reward": "mean std min max <name> <name>_failed_frac failed_frac zero_spread_frac pass_at_k overlong_penalty"
    " kl_penalty kl_capped_frac environment environment_failed_frac",
    "rollout": "response_len_mean response_len_max truncated_frac repetition_frac weight_version staleness long_prompts"
    " staleness_mean staleness_max partial_frac ready under_way oldest_age dropped length_selection"
    " refill_rounds refill_groups",
    "episode": "turns_mean turns_max success_frac max_turns_frac reply_tokens_mean",
    "mismatch": "abs_logp_diff k3 token_mult_prob_error is_mean is_max ess oob_frac pearson rejected_frac",
    "policy": "loss entropy entropy_coef kl_old kl_ref ratio_max clip_frac_low clip_frac_high grad_norm lr step_skipped"
    " loss_scale kl_capped_frac off_policy_masked_frac entropy_masked_frac",
    "moe": "aux_loss load_imbalance",
    "reward_model": "loss grad_norm lr step_skipped loss_scale",
    "preference": "accuracy margin chosen rejected",
    "critic": "loss clip_frac explained_var value_mean return_mean grad_norm lr step_skipped loss_scale",
    "time": "<phase>_s",
    "perf": "tokens_per_s_per_gpu peak_mem_gb offloaded_gb sleep_freed_gb padding_frac imbalance engine_restarts"
    " trainer_kept_gb trainer_idle_frac sampler_idle_frac sampler_tokens_per_s sync_gb_per_s sync_link_frac",
}
EVALUATIONS = ("val", "test")
COUNTERS = ("epoch", "step")  # which Lightning has beside what is logged, to keep the newest checkpoints by


def monitors(trainer: pl.Trainer) -> list[tuple[str, str]]:
    """Return what asks for a metric in a fit, and the metric's name."""
    kinds = (ModelCheckpoint, EarlyStopping)
    found = [callback for callback in trainer.callbacks if isinstance(callback, kinds)]  # type: ignore[attr-defined]
    return [(type(callback).__name__, callback.monitor) for callback in found if callback.monitor is not None]


def check_monitors(trainer: pl.Trainer, module: "ModelModule") -> None:
    """Refuse a `monitor` that this fit cannot log, before anything is loaded.

    A name outside the namespaces of docs/metrics.md may be one that the user's own module or callback logs: it is
    refused only if there is neither.

    Raises:
        ValueError: With the callback, the name and the nearest one that exists.
    """
    data = trainer.datamodule  # type: ignore[attr-defined]
    for owner, monitor in monitors(trainer):
        namespace = monitor.partition("/")[0]
        if monitor in COUNTERS:
            continue
        if namespace in EVALUATIONS:
            if not isinstance(data, RowDataModule):
                continue  # what its sets are called is not known
            names = module.evaluation_metrics("val", data.val_names) if data.val_names else []
        elif namespace in TRAINING:
            names = training_metrics(namespace, module.reward_components())
        elif _has_users_classes(trainer, module):
            continue
        else:
            names = [name for space in TRAINING for name in training_metrics(space, module.reward_components())]
            names += module.evaluation_metrics("val", data.val_names) if isinstance(data, RowDataModule) else []
        patterns = (re.escape(name).replace("<phase>", r"\w+") for name in names)
        if not any(re.fullmatch(pattern, monitor) for pattern in patterns):
            raise ValueError(f"{owner}(monitor={monitor!r}): no such metric is logged; {_hint(monitor, names)}")


def training_metrics(namespace: str, rewards: Sequence[str]) -> list[str]:
    """Return the names of a namespace that a training step with these rewards may log."""
    names = [f"{namespace}/{name}" for name in TRAINING[namespace].split()]
    filled = [name.replace("<name>", reward) for name in names if "<name>" in name for reward in rewards]
    return [name for name in names if "<name>" not in name] + filled


def check_logged(trainer: pl.Trainer) -> None:
    """Refuse a `monitor` among the training metrics that the first step did not log.

    Raises:
        ValueError: With those that it did.
    """
    logged = [name for name in trainer.callback_metrics if name.partition("/")[0] in TRAINING]
    for owner, monitor in monitors(trainer):
        if monitor.partition("/")[0] in TRAINING and monitor not in logged:
            raise ValueError(f"{owner}(monitor={monitor!r}): the first step did not log it; {_hint(monitor, logged)}")


def _has_users_classes(trainer: pl.Trainer, module: object) -> bool:
    classes = [type(module), *(type(callback) for callback in trainer.callbacks)]  # type: ignore[attr-defined]
    return any(not cls.__module__.startswith((OWN, "lightning.")) for cls in classes)


def _hint(monitor: str, names: Sequence[str]) -> str:
    if not names:
        return "the data module has no validation sets (`val`)"
    near = difflib.get_close_matches(monitor, names, n=1)
    if near:
        return f"did you mean {near[0]}?"
    return f"there are {', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''} (docs/metrics.md)"
