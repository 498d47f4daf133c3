"""Megatron's optimizer behind the interface that Lightning and torch's learning-rate schedulers expect."""

import math
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_megatron_rl.checkpoints.main_parameters import make_states
from lightning_megatron_rl.checkpoints.optimizer_state import OptimizerState
from lightning_megatron_rl.compat.cpu_optimizer import is_on_host, make_moments
from lightning_megatron_rl.strategy.averaging import AveragedWeights
from lightning_megatron_rl.strategy.gradients import Gradients
from lightning_megatron_rl.strategy.nonfinite import UpdateTrace
from lightning_megatron_rl.utilities.notices import tell_loss

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer as CoreOptimizer

Skipped = Literal["overflow", "loss", "gradient", "threshold", "dropped"]
_KIND = "is_expert_parallel"
_OWN = ("params", _KIND, "step")  # of a parameter group; schedulers write the rest
_TOLD = ("lr", "betas", "momentum")  # what schedulers and `LearningRateMonitor` look for in an optimizer's defaults


class MegatronOptimizer(Optimizer):
    """A `torch.optim.Optimizer` whose parameter groups are those of the wrapped Megatron optimizer.

    Learning-rate schedulers write ``group["lr"]`` into the very dictionaries that Megatron reads, and `step` is
    Megatron's: gradients are clipped by the global norm, the optimizer steps, and parameters are gathered.

    Args:
        megatron: What `megatron.core.optimizer.get_megatron_optimizer` returned.
        chunks: The wrapped chunks that it steps.
    """

    def __init__(self, megatron: "CoreOptimizer", chunks: Sequence[nn.Module]) -> None:
        self.megatron = megatron
        self.gradients = Gradients(chunks)
        # torch refuses Megatron's parameter shards, which are views: start with a placeholder, then take its groups
        first = megatron.param_groups[0]
        super().__init__([torch.empty(0)], defaults={name: first[name] for name in _TOLD if name in first})
        self._take_groups()
        self.grad_norm: float = 0.0  # global norm before clipping, of the last step
        self.last_lr: float = 0.0  # learning rate of the last step; a scheduler may have moved on since
        self.skipped: Skipped | None = None  # why, if the last step was
        self.trace: UpdateTrace | None = None  # of the gradients at hand; set by the module that computes them
        self.averages: dict[str, AveragedWeights] = {}  # by name
        self._num_skipped = 0  # steps since the last call of `take_step_metrics`

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Run `closure` (forward and backward), then Megatron's step; return the closure's loss.

        Raises:
            RuntimeError: No gradients were computed since the last step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.last_lr = float(self.param_groups[0]["lr"])
        self._follow()
        if self.gradients.use():
            self.skipped = self._step_if_finite()
        else:
            self.skipped, self.grad_norm = "dropped", 0.0
        # without sharding the step leaves `param.grad` as another name of `main_grad`: the next backward would add the
        # gradient to itself
        self.megatron.zero_grad(set_to_none=True)
        self._num_skipped += self.skipped is not None
        return loss

    @torch.no_grad()
    def _step_if_finite(self) -> Skipped | None:
        """Take Megatron's step in its parts, or say why not.

        Megatron's own step would clip by a non-finite norm and lose every weight. All ranks decide alike.
        """
        overflowed = self.megatron.prepare_grads()  # under a loss scale, which it lowers then
        norm = math.nan if overflowed else self.megatron.get_grad_norm()
        self.grad_norm = float(norm)
        if not self.megatron.config.use_distributed_optimizer:
            # only then is the norm one of all replicas: here each has its own, of gradients that should be the same
            self.grad_norm = _agreed(self.grad_norm)
        if self.trace is not None and not self.trace.loss_is_finite:
            return "loss"
        if overflowed:
            return "overflow"
        if not math.isfinite(self.grad_norm):
            return "gradient"
        if self.grad_norm > self.megatron.config.grad_norm_skip_threshold:
            return "threshold"
        self._clip(norm)
        self.megatron.step_with_ready_grads()
        return None

    @property
    def _is_bf16_true(self) -> bool:
        config = self.megatron.config
        return config.params_dtype == torch.bfloat16 and not config.bf16

    def _clip(self, norm: float | torch.Tensor) -> None:
        from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

        threshold = self.megatron.config.clip_grad
        if math.isinf(threshold):
            return
        for part in self.parts():
            parameters = part.get_parameters()
            if parameters and not self._is_bf16_true:
                decoupled = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
                clip_grad_by_total_norm_fp32(parameters, threshold, norm, use_decoupled_grad=decoupled)
                continue
            factor = threshold / (self.grad_norm + 1e-6)  # Megatron clips fp32 gradients only
            for parameter in parameters if factor < 1 else ():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def take_step_metrics(self, prefix: str) -> dict[str, float]:
        """Return the number of steps skipped since the last call and, if there is one, the loss scale, under `prefix`.

        A step is skipped when the loss or a gradient is not finite, or `training_step` returned None. The schedulers
        move on all the same, as Lightning's do.
        """
        metrics = {f"{prefix}/step_skipped": float(self._num_skipped)}
        self._num_skipped = 0
        if self.megatron.config.fp16:
            metrics[f"{prefix}/loss_scale"] = float(self.megatron.get_loss_scale())
        return metrics

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients at hand; the schedule clears Megatron's buffers before it computes others."""
        self.gradients.zero()

    def set_clip_grad(self, max_norm: float) -> None:
        """Clip by the global norm from now on; 0 or less means never.

        Megatron computes the norm only when it clips, so "never" is an infinite threshold: the norm is still there
        for the log.
        """
        threshold = max_norm if max_norm > 0 else math.inf
        for optimizer in self.parts():
            optimizer.config.clip_grad = threshold
        self.megatron.config.clip_grad = threshold

    def add_average(self, name: str, *, counts_start: bool = False) -> AveragedWeights:
        """Keep an average of the weights under `name`, which checkpoints hold as well; see `AveragedWeights`."""
        self._prepare_states()
        self.averages[name] = AveragedWeights(self.parts(), self.gradients.chunks, counts_start=counts_start)
        return self.averages[name]

    def state_of(
        self, model: dict[str, Any], *, is_loading: bool, averages: Container[str] | None = None
    ) -> OptimizerState:
        """Return main parameters, moments, averages and groups as a distributed checkpoint has them.

        Args:
            model: Megatron's sharded state dict of the model.
            is_loading: Whether it is to be loaded.
            averages: Names of those averages that are saved or loaded; None for all.
        """
        self._prepare_states()
        chosen = {
            name: average.tensors for name, average in self.averages.items() if averages is None or name in averages
        }
        return OptimizerState(self.parts(), model, chosen, is_loading=is_loading)

    def _prepare_states(self) -> None:
        """Make the moments, which are not there before the first step that is not skipped: loading looks for them."""
        for part in self.parts():
            if part.is_stub_optimizer:
                continue
            if is_on_host(part):
                make_moments(part.optimizer)
            elif part.config.use_precision_aware_optimizer:
                make_states(part.optimizer)
            elif part.init_state_fn is not None:
                part.init_state_fn(part.optimizer, part.config)

    def load_state(self, state: OptimizerState, loaded: dict[str, Any]) -> None:
        """Take over a state that was loaded, and the parameter groups that came with it.

        Raises:
            ValueError: It has no parameters of a group's settings.
        """
        self._follow()  # schedulers write what groups are told by, too: OneCycleLR a `max_lr` of its own
        parts = [part for part in self.parts() if not part.is_stub_optimizer]
        groups = [[_saved_group(group, loaded["groups"]) for group in part.param_groups] for part in parts]
        _tell_ignored(self.param_groups, loaded["groups"])
        state.load(loaded, groups)
        # loading replaces the dictionaries; schedulers must go on writing into those that Megatron reads
        self._take_groups()

    def _take_groups(self) -> None:
        """Show Megatron's groups to schedulers; those of experts only if there are no others like them.

        Whether experts have groups of their own depends on the layout, and a scheduler's state has a value per group.
        """
        self.param_groups = []
        self._followers: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for group in self.megatron.param_groups:
            leader = next(iter(_alike(group, self.param_groups)), None)
            if leader is None:
                self.param_groups.append(group)
            else:
                self._followers.append((group, leader))

    def _follow(self) -> None:
        """Give groups of experts what schedulers have written into those that they see."""
        for group, leader in self._followers:
            group.update({key: value for key, value in leader.items() if key not in _OWN})

    def parts(self) -> list["CoreOptimizer"]:
        """Return Megatron's optimizers: one, or one more for experts."""
        from megatron.core.optimizer import ChainedOptimizer

        return self.megatron.chained_optimizers if isinstance(self.megatron, ChainedOptimizer) else [self.megatron]


def _agreed(norm: float) -> float:
    """The norm of this rank's replica, or nan if any replica's is not finite; a collective of all ranks."""
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    is_lost = torch.tensor(int(not math.isfinite(norm)), device=device)
    dist.all_reduce(is_lost, op=dist.ReduceOp.MAX)
    return math.nan if is_lost.item() else norm


def _saved_group(group: dict[str, Any], saved: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The saved group of the same settings, with the kind of experts of the group at hand."""
    for candidate in _alike(group, saved):
        return {**candidate, _KIND: group[_KIND]}
    settings = {name: group[name] for name in _settings() if group.get(name) is not None}
    raise ValueError(
        f"the checkpoint's optimizer has no parameters with the settings {settings}: resume with the OptimizerConfig"
        " that it was saved with, or start a new run from an export."
    )


@rank_zero_only
def _tell_ignored(groups: Sequence[dict[str, Any]], saved: Sequence[dict[str, Any]]) -> None:
    """Warn of settings that the saved groups have otherwise: as in torch, theirs are in force."""
    pairs = [(group, _saved_group(group, saved)) for group in groups]
    ignored = {
        f"{name} {theirs[name]}, not {group[name]}"
        for group, theirs in pairs
        for name in ("weight_decay", "eps", *(() if "max_momentum" in group else ("betas", "momentum")))  # cycled
        if name in group and name in theirs and _plain(group[name]) != _plain(theirs[name])
    }
    if ignored:
        tell_loss(
            f"the optimizer goes on as the checkpoint has it: {'; '.join(sorted(ignored))} as set for this run. To"
            " train with other settings start a new run with the checkpoint's weights (init_from of the module)."
        )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, Sequence) else value


def _alike(group: dict[str, Any], groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of `groups` that Megatron tells from `group` by their kind of experts alone, the same kind first."""
    alike = [other for other in groups if all(other.get(name) == group.get(name) for name in _settings())]
    return sorted(alike, key=lambda other: other[_KIND] != group[_KIND])


def _settings() -> list[str]:
    """What Megatron tells parameter groups by, apart from the kind of experts."""
    from megatron.core.optimizer.optimizer import param_group_identifier_keys

    return [name for name in param_group_identifier_keys if name != _KIND]
