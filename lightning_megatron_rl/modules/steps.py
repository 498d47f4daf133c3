"""What a trained model does with one micro-batch: a forward pass, and what scoring and training keep of it."""

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

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


class TakesSteps(pl.LightningModule):
    """The steps of Megatron's schedule; a part of `ModelModule`."""

    routers: "RouterHooks | None" = None

    @abstractmethod
    def output_processor(self) -> OutputProcessor:
        """What the last pipeline stage makes of hidden states."""

    def _forward(self, chunk: nn.Module, microbatch: MicroBatch, processor: OutputProcessor) -> Tensor:
        from lightning_megatron_rl.models.forward import microbatch_forward

        if self.routers is not None:
            self.routers.enter(microbatch.sequence_index, microbatch.position_ids)
        return microbatch_forward(
            chunk,
            microbatch.tokens,
            microbatch.position_ids,
            microbatch.labels,
            microbatch.cu_seqlens,
            microbatch.max_seqlen,
            output_processor=processor,
        )

    def _score_step(
        self, chunk: nn.Module, microbatch: MicroBatch, *, processor: OutputProcessor
    ) -> tuple[Tensor, Any]:
        def keep(output: Tensor) -> tuple[Tensor, Tensor]:
            return output.new_zeros(()), output.detach().float().clone()

        return self._forward(chunk, microbatch, processor), keep

    def _train_step(
        self,
        chunk: nn.Module,
        microbatch: MicroBatch,
        *,
        token_loss: TokenLoss,
        processor: OutputProcessor,
        name: str,
        token_losses: list[tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Any]:
        def loss(output: Tensor) -> tuple[Tensor, Tensor, Tally]:
            tally = Tally(output.device)
            losses = token_loss(microbatch, *output, tally)
            losses = losses * microbatch.fields.get(WEIGHT_FIELD, torch.ones_like(losses))
            # where, not times: a masked position may hold anything, inf * 0 is nan
            losses = torch.where(microbatch.mask, losses, torch.zeros_like(losses))
            tally.add_mean(name, losses.detach(), microbatch.mask)
            token_losses.append((losses.detach(), microbatch.sequence_index))
            return losses.sum(), microbatch.mask.sum().int(), tally

        return self._forward(chunk, microbatch, processor), loss
