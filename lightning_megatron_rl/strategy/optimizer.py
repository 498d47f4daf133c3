"""Megatron's optimizer behind the interface that Lightning and torch's learning-rate schedulers expect."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from lightning_megatron_rl.strategy.optimizer_state import OptimizerState

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer as CoreOptimizer

_KIND = "is_expert_parallel"
_OWN = ("params", _KIND, "step")  # of a parameter group; schedulers write the rest


class MegatronOptimizer(Optimizer):
    """A `torch.optim.Optimizer` whose parameter groups are those of the wrapped Megatron optimizer.

    Learning-rate schedulers write ``group["lr"]`` into the very dictionaries that Megatron reads, and `step` is
    Megatron's: gradients are clipped by the global norm, the optimizer steps, and parameters are gathered.

    Args:
        megatron: What `megatron.core.optimizer.get_megatron_optimizer` returned.

    Example:
        ``torch.optim.lr_scheduler.LinearLR(strategy.build_optimizer(config), total_iters=10)``
    """

    def __init__(self, megatron: "CoreOptimizer") -> None:
        self.megatron = megatron
        # torch refuses Megatron's parameter shards, which are views: start with a placeholder, then take its groups
        super().__init__([torch.empty(0)], defaults={"lr": megatron.param_groups[0]["lr"]})
        self._take_groups()
        self.grad_norm: float = 0.0  # global norm before clipping, of the last step
        self.last_lr: float = 0.0  # learning rate of the last step; a scheduler may have moved on since
        self.step_succeeded: bool = True  # False when Megatron skipped the step for non-finite gradients
        self._skipped = 0  # steps since the last call of `take_step_metrics`

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Run `closure` (forward and backward), then Megatron's step; return the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.last_lr = float(self.param_groups[0]["lr"])
        for group, leader in self._followers:
            group.update({key: value for key, value in leader.items() if key not in _OWN})
        succeeded, grad_norm = self._step_in_bf16() if self._is_bf16_true else self.megatron.step()[:2]
        # without sharding the step leaves `param.grad` as another name of `main_grad`: the next backward would add the
        # gradient to itself
        self.megatron.zero_grad(set_to_none=True)
        self.step_succeeded = bool(succeeded)
        self._skipped += not self.step_succeeded
        self.grad_norm = float(grad_norm) if grad_norm is not None else math.nan
        return loss

    @property
    def _is_bf16_true(self) -> bool:
        config = self.megatron.config
        return config.params_dtype == torch.bfloat16 and not config.bf16

    @torch.no_grad()
    def _step_in_bf16(self) -> tuple[bool, float]:
        """As Megatron's step, which clips fp32 gradients only."""
        self.megatron.prepare_grads()
        norm = float(self.megatron.get_grad_norm())
        factor = self.megatron.config.clip_grad / (norm + 1e-6)
        if factor < 1:
            for parameter in self.megatron.get_parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        return self.megatron.step_with_ready_grads(), norm

    def take_step_metrics(self) -> dict[str, float]:
        """Return the loss scale and the number of steps skipped since the last call; nothing without a loss scale.

        A step is skipped when a gradient is not finite. The schedulers move on all the same, as Lightning's do.
        """
        skipped, self._skipped = self._skipped, 0
        if not self.megatron.config.fp16:
            return {}
        return {"policy/step_skipped": float(skipped), "policy/loss_scale": float(self.megatron.get_loss_scale())}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the main gradients (the schedule clears Megatron's gradient buffers itself)."""
        self.megatron.zero_grad(set_to_none)

    def set_clip_grad(self, max_norm: float) -> None:
        """Clip by the global norm from now on; 0 or less means never.

        Megatron computes the norm only when it clips, so "never" is an infinite threshold: the norm is still there
        for the log.
        """
        threshold = max_norm if max_norm > 0 else math.inf
        for optimizer in self.parts():
            optimizer.config.clip_grad = threshold
        self.megatron.config.clip_grad = threshold

    def state_of(self, model: dict[str, Any], *, is_loading: bool) -> OptimizerState:
        """Return main parameters, moments and groups as a distributed checkpoint has them.

        Args:
            model: Megatron's sharded state dict of the model.
            is_loading: Whether it is to be loaded.
        """
        for part in self.parts():
            # before the first step that is not skipped there are no moments, which loading would look for
            if part.init_state_fn is not None and not part.is_stub_optimizer:
                part.init_state_fn(part.optimizer, part.config)
        return OptimizerState(self.parts(), model, is_loading=is_loading)

    def load_state(self, state: OptimizerState, loaded: dict[str, Any]) -> None:
        """Take over a state that was loaded, and the parameter groups that came with it.

        Raises:
            ValueError: It has no parameters of a group's settings.
        """
        parts = [part for part in self.parts() if not part.is_stub_optimizer]
        groups = [[_saved_group(group, loaded["groups"]) for group in part.param_groups] for part in parts]
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

    def parts(self) -> list["CoreOptimizer"]:
        """Return Megatron's optimizers: one, or one more for experts."""
        from megatron.core.optimizer import ChainedOptimizer

        return self.megatron.chained_optimizers if isinstance(self.megatron, ChainedOptimizer) else [self.megatron]


def _saved_group(group: dict[str, Any], saved: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The saved group of the same settings, with the kind of experts of the group at hand."""
    for candidate in _alike(group, saved):
        return {**candidate, _KIND: group[_KIND]}
    settings = {name: group[name] for name in _settings() if group.get(name) is not None}
    raise ValueError(
        f"the checkpoint's optimizer has no parameters with the settings {settings}: resume with the OptimizerConfig"
        " that it was saved with, or start a new run from an export."
    )


def _alike(group: dict[str, Any], groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of `groups` that Megatron tells from `group` by their kind of experts alone, the same kind first."""
    alike = [other for other in groups if all(other.get(name) == group.get(name) for name in _settings())]
    return sorted(alike, key=lambda other: other[_KIND] != group[_KIND])


def _settings() -> list[str]:
    """What Megatron tells parameter groups by, apart from the kind of experts."""
    from megatron.core.optimizer.optimizer import param_group_identifier_keys

    return [name for name in param_group_identifier_keys if name != _KIND]
