"""What a policy does with one micro-batch: a forward pass, and what is kept of it when scoring and when training."""

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_megatron_rl.algorithms.tally import Tally
from lightning_megatron_rl.data.packing import MicroBatch
from lightning_megatron_rl.modules.routing import TrainsRouters

if TYPE_CHECKING:
    from lightning_megatron_rl.models.hf_model import HFModel

TokenLoss = Callable[[MicroBatch, Tensor, Tensor, Tally], Tensor]
"""``(microbatch, logprobs [b, s], entropy [b, s], tally) -> loss per token [b, s]``; adds its metrics to the tally."""

WEIGHT_FIELD = "weights"  # per-token weight u_t of the aggregation, see strategy.schedule


class TakesSteps(TrainsRouters):
    """The steps of Megatron's schedule; a part of `PolicyModule`."""

    temperature: float
    logprob_chunk_size: int

    @property
    @abstractmethod
    def hf_model(self) -> "HFModel":
        """The Hugging Face side of the model: config, tokenizer, conversion."""

    def _forward(self, chunk: nn.Module, microbatch: MicroBatch) -> Tensor:
        from lightning_megatron_rl.models.forward import microbatch_forward
        from lightning_megatron_rl.models.logprobs import logprob_processor

        if self.routers is not None:
            self.routers.enter(microbatch.sequence_index, microbatch.position_ids)
        return microbatch_forward(
            chunk,
            microbatch.tokens,
            microbatch.position_ids,
            microbatch.labels,
            microbatch.cu_seqlens,
            microbatch.max_seqlen,
            output_processor=logprob_processor(
                vocab_size=self.hf_model.config.vocab_size,
                temperature=self.temperature,
                chunk_size=self.logprob_chunk_size,
                with_entropy=True,
            ),
        )

    def _score_step(self, chunk: nn.Module, microbatch: MicroBatch) -> tuple[Tensor, Any]:
        def keep(output: Tensor) -> tuple[Tensor, Tensor]:
            return output.new_zeros(()), output.detach().float().clone()

        return self._forward(chunk, microbatch), keep

    def _train_step(self, chunk: nn.Module, microbatch: MicroBatch, token_loss: TokenLoss) -> tuple[Tensor, Any]:
        def loss(output: Tensor) -> tuple[Tensor, Tensor, Tally]:
            tally = Tally(output.device)
            losses = token_loss(microbatch, output[0], output[1], tally)
            losses = losses * microbatch.fields.get(WEIGHT_FIELD, torch.ones_like(losses))
            # where, not times: a masked position may hold anything, inf * 0 is nan
            losses = torch.where(microbatch.mask, losses, torch.zeros_like(losses))
            tally.add_mean("policy/loss", losses.detach(), microbatch.mask)
            return losses.sum(), microbatch.mask.sum().int(), tally

        return self._forward(chunk, microbatch), loss
