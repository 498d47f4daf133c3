"""The steps of Megatron's schedule: a forward pass on one micro-batch, and what scoring and training keep of it."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_megatron_rl.algorithms.registry import check_per_token
from lightning_megatron_rl.algorithms.tally import Tally
from lightning_megatron_rl.data.packing import MicroBatch

if TYPE_CHECKING:
    from lightning_megatron_rl.models.layers.routers import RouterHooks

TokenLoss = Callable[..., Tensor]
"""``(microbatch, *outputs, tally) -> loss per token [b, s]``; adds its metrics to the tally.

Outputs are what the module's last layer gives, each [b, s]: ``logprobs, entropy`` of a policy, ``values`` of a model
with a value head.
"""

OutputProcessor = Callable[..., Tensor]
"""Megatron's hook behind the last layer: hidden states of a micro-batch -> outputs, fp32 [outputs, b, s]."""

WEIGHT_FIELD = "weights"  # per-token weight u_t of the aggregation, see strategy.schedule


def score_step(
    chunk: nn.Module, microbatch: MicroBatch, *, processor: OutputProcessor, routers: "RouterHooks | None"
) -> tuple[Tensor, Any]:
    """Keep the outputs of a micro-batch."""

    def keep(output: Tensor) -> tuple[Tensor, Tensor]:
        return output.new_zeros(()), output.detach().float().clone()

    return _forward(chunk, microbatch, processor, routers), keep


def train_step(
    chunk: nn.Module,
    microbatch: MicroBatch,
    *,
    processor: OutputProcessor,
    routers: "RouterHooks | None",
    token_loss: TokenLoss,
    name: str,
    token_losses: list[tuple[Tensor, Tensor]],
) -> tuple[Tensor, Any]:
    """Sum the weighted losses of a micro-batch's targets, and tally them as `name`.

    `token_losses` gets the losses and whose they are, ``[b, s]`` each, for the report of a failure.
    """

    def loss(output: Tensor) -> tuple[Tensor, Tensor, Tally]:
        tally = Tally(output.device)
        losses = token_loss(microbatch, *output, tally)
        check_per_token("token loss", token_loss, microbatch.mask.shape, losses=losses)
        losses = losses * microbatch.fields.get(WEIGHT_FIELD, torch.ones_like(losses))
        # where, not times: a masked position may hold anything, inf * 0 is nan
        losses = torch.where(microbatch.mask, losses, torch.zeros_like(losses))
        tally.add(name, _mean_or_zero, {"total": losses.detach().double().sum(), "count": microbatch.mask.sum()})
        token_losses.append((losses.detach(), microbatch.sequence_index))
        return losses.sum(), microbatch.mask.sum().int(), tally

    return _forward(chunk, microbatch, processor, routers), loss


def _mean_or_zero(total: float, count: float) -> float:
    """Return the loss of an update; without a single target it has no gradient, and is 0, not unknown."""
    return total / count if count else 0.0


def _forward(
    chunk: nn.Module, microbatch: MicroBatch, processor: OutputProcessor, routers: "RouterHooks | None"
) -> Tensor:
    from lightning_megatron_rl.models.forward import microbatch_forward

    if routers is not None:
        routers.enter(microbatch.sequence_index, microbatch.position_ids)
    return microbatch_forward(
        chunk,
        microbatch.tokens,
        microbatch.position_ids,
        microbatch.labels,
        microbatch.cu_seqlens,
        microbatch.max_seqlen,
        output_processor=processor,
    )
