"""Megatron's optimizer behind the interface that Lightning and torch's learning-rate schedulers expect."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer as CoreOptimizer

_OWN = ("params", "is_expert_parallel", "step")  # of a parameter group; schedulers write the rest


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
        for optimizer in self._parts():
            optimizer.config.clip_grad = threshold
        self.megatron.config.clip_grad = threshold

    def sharded_state_dict(self, model_state: dict[str, Any], metadata: dict[str, Any], is_loading: bool) -> Any:
        """Return the optimizer state as Megatron's sharded tensors, for distributed checkpoints."""
        for part in self._parts():
            # before the first step that is not skipped there are no moments, which loading would look for
            if part.init_state_fn is not None:
                part.init_state_fn(part.optimizer, part.config)
        return self.megatron.sharded_state_dict(model_state, is_loading=is_loading, metadata=metadata)

    def load_sharded_state(self, state: Any) -> None:
        """Take over a state that `dist_checkpointing` loaded, and the parameter groups that came with it.

        Raises:
            ValueError: It is not sharded, and was saved with as many optimizers as this layout does not have.
        """
        with torch.no_grad():
            self.megatron.load_state_dict(_as_parts(state, self._parts()))
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

    def _parts(self) -> list["CoreOptimizer"]:
        from megatron.core.optimizer import ChainedOptimizer

        return self.megatron.chained_optimizers if isinstance(self.megatron, ChainedOptimizer) else [self.megatron]


def _as_parts(state: Any, parts: list[Any]) -> Any:
    """Arrange a loaded state as the optimizers of this layout expect it.

    Megatron has an optimizer of its own for experts that are replicated over other ranks than the rest, as they are
    under expert parallelism; elsewhere one has all. A state that one saved and several load, or the reverse, has its
    tensors in the right places, but the parameter groups where those had them that saved it: by number in a checkpoint
    of several, at the top in that of one. Besides, Megatron does not find a group again whose parameters were experts
    of that kind and are not here.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    numbers = sorted(key for key in state if isinstance(key, int))
    elsewhere = {key: value for key, value in state.items() if not isinstance(key, int)}
    if not all(isinstance(part, DistributedOptimizer) for part in parts):  # these keep parameters by their number
        if numbers and elsewhere:
            count = len(numbers) if len(parts) == 1 else 1
            raise ValueError(
                f"the optimizer state was saved by {count} optimizer(s), and this layout has {len(parts)}: under expert"
                " parallelism experts have their own. With use_distributed_optimizer=False such a state cannot be"
                " taken apart: resume with the expert parallelism it was saved with."
            )
        return state
    saved = [elsewhere] if "optimizer" in elsewhere else [state[number] for number in numbers]
    found = [group for one in saved for group in one["optimizer"]["param_groups"]]
    arranged = []
    for index, part in enumerate(parts):
        mine = elsewhere if len(parts) == 1 else state[index]
        groups = [
            {**_alike(group, found)[0], "is_expert_parallel": group["is_expert_parallel"]}
            for group in part.optimizer.param_groups
        ]
        optimizer = {**saved[0]["optimizer"], "param_groups": groups}
        arranged.append({**saved[0], **mine, "optimizer": optimizer})
    return arranged[0] if len(parts) == 1 else dict(enumerate(arranged))


def _alike(group: dict[str, Any], groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of `groups` that Megatron tells from `group` by their kind of experts alone, the same kind first."""
    from megatron.core.optimizer.optimizer import param_group_identifier_keys

    kind = "is_expert_parallel"
    keys = [key for key in param_group_identifier_keys if key != kind]
    alike = [other for other in groups if all(other.get(key) == group.get(key) for key in keys)]
    return sorted(alike, key=lambda other: other[kind] != group[kind])
