"""What a policy with experts adds to a module: settings in force, and each pass as its routers see it."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_megatron_rl.models.layers.moe import MoESettings, resolve_moe_settings
from lightning_megatron_rl.modules.sharing import Share
from lightning_megatron_rl.modules.training import TrainingSettings

if TYPE_CHECKING:
    from lightning_megatron_rl.models.layers.routers import RouterHooks, RoutingMode


class TrainsRouters(pl.LightningModule):
    """The part of `PolicyModule` that mixtures of experts need; on a dense model it does nothing."""

    default_aux_loss_coeff: float = 0.0  # where `moe` does not say: the reward is what RL optimises
    has_old_logprobs: bool = False  # whether sequences are scored before they are trained on, which can be replayed

    train_settings: TrainingSettings
    moe_in_force: MoESettings | None = None  # None on a dense model
    routers: "RouterHooks | None" = None

    @property
    def replays_routing(self) -> bool:
        """Whether updates send each token to the experts that its sequence's routing names."""
        return self.moe_in_force is not None and self.moe_in_force.router_replay != "none"

    def resolve_moe(self, config: Any, model_config: dict[str, Any]) -> None:
        """Find the settings in force for a model of Hugging Face `config`; see `resolve_moe_settings`."""
        self.moe_in_force = resolve_moe_settings(
            self.train_settings.moe,
            config,
            model_config,
            default_aux_loss_coeff=self.default_aux_loss_coeff,
            has_old_logprobs=self.has_old_logprobs,
        )

    def moe_fields(self) -> dict[str, Any]:
        """Return the fields of Megatron's `TransformerConfig` that the settings decide."""
        return {} if self.moe_in_force is None else self.moe_in_force.megatron_fields()

    def attach_routers(self, chunks: list[nn.Module], device: torch.device) -> None:
        """Hook the routers of the policy's `chunks`, before Megatron wraps them."""
        from lightning_megatron_rl.models.layers.routers import RouterHooks

        if self.moe_in_force is not None:
            self.routers = RouterHooks(chunks, self.moe_in_force, device)

    def begin_routing(self, share: Share, mode: "RoutingMode", reduce_tokens: Callable[[Tensor], Tensor]) -> None:
        """Start a pass over `share` on the routers; a collective.

        Args:
            share: The sequences and micro-batches of the pass.
            mode: What becomes of the routers' choices.
            reduce_tokens: Sums a tensor over all ranks that share the batch's tokens.

        Raises:
            ValueError: Routing is to be recorded or replayed on a dense model, or the settings do not say so.
        """
        if self.routers is None:
            if mode != "free":
                raise ValueError(f"routing={mode!r}, but this model is dense: it has no routers")
            return
        targets = sum(int(microbatch.mask.sum()) for microbatch in share.microbatches)
        tokens = sum(int((microbatch.sequence_index >= 0).sum()) for microbatch in share.microbatches)
        totals = reduce_tokens(torch.tensor([targets, tokens], dtype=torch.float64, device=share.device))
        self.routers.begin(
            [len(sequence) for sequence in share.sequences],
            mode,
            [sequence.routing for sequence in share.sequences],
            # finalize_model_grads divides by the number of targets, at least 1; see models.routers
            loss_scale=(totals[0].clamp(min=1) / totals[1].clamp(min=1)).item(),
        )

    def end_routing(self) -> list[Tensor]:
        """End a pass; return what was recorded."""
        return [] if self.routers is None else self.routers.end()

    def routing_metrics(self) -> dict[str, float]:
        """Return `moe/*` of the update, equal on all ranks; a collective of the world."""
        return {} if self.routers is None else self.routers.metrics()

    def describe_moe(self) -> list[tuple[str, str]]:
        """Return rows for the table at start: everything in force."""
        if self.moe_in_force is None or self.routers is None:
            return []
        return self.moe_in_force.describe(has_expert_bias=self.routers.config.moe_router_enable_expert_bias)
