"""`PolicyModule`: a language model on Megatron that is scored by log-probs."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Optional

from lightning.pytorch.cli import LRSchedulerCallable
from torch import Tensor, nn

from lightning_megatron_rl.data.packing import TokenSequence
from lightning_megatron_rl.models.layers.lora import LoRASettings
from lightning_megatron_rl.models.layers.moe import MoESettings
from lightning_megatron_rl.models.verification.verify import VerifyModel
from lightning_megatron_rl.modules.model import ModelModule
from lightning_megatron_rl.modules.steps import OutputProcessor
from lightning_megatron_rl.utilities.ranges import COUNT, check_ranges

if TYPE_CHECKING:
    from megatron.core.optimizer import OptimizerConfig

    from lightning_megatron_rl.models.layers.routers import RoutingMode


@dataclass  # not frozen: `Trainer.predict` moves results to the CPU, and writes the fields of dataclasses to do so
class Scores:
    """Log-probs and entropies of sequences, aligned with their tokens; position 0 has none and holds 0."""

    logprobs: list[Tensor]  # per sequence: [tokens]
    entropies: list[Tensor]  # per sequence: [tokens]
    routing: list[Tensor]  # per sequence, if recorded: [tokens, expert layers of this pipeline stage, topk] int16


class PolicyModule(ModelModule):
    """A language model on Megatron: builds it, scores sequences with it, updates it.

    Args:
        model: Hugging Face hub name, or a directory that `save_pretrained` wrote.
        optimizer: Megatron's own `OptimizerConfig` (lr, weight_decay, adam_beta2, ...).
        lr_scheduler: Called with the optimizer; stepped once per `global_step`.
        max_tokens_per_microbatch: Token budget of one micro-batch, padding included.
        packing: Lay sequences end to end in a micro-batch instead of padding each to the longest.
        layer_backend: "auto", "torch" or "transformer_engine"; auto takes TransformerEngine on CUDA if installed.
        model_config: Overrides of Megatron's `TransformerConfig`, e.g. ``{"recompute_granularity": "full"}``.
        verify_model: "auto" compares a miniature of the model with Transformers unless a shipped proof covers it,
            "always" does so anyway, "never" refuses models without a proof; docs/models.md.
        logprob_chunk_size: Tokens whose logits exist at one time.
        moe: How the routers of a mixture-of-experts model are trained.
        lora: Train low-rank adapters and leave the model's own weights as they are.
        init_from: Distributed checkpoint of a run of this model, in any layout, whose weights replace those of `model`.
    """

    def __init__(
        self,
        model: str,
        optimizer: Optional["OptimizerConfig"] = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        max_tokens_per_microbatch: int = 8192,
        packing: bool = True,
        layer_backend: Literal["auto", "torch", "transformer_engine"] = "auto",
        model_config: dict[str, Any] | None = None,
        verify_model: VerifyModel = "auto",
        logprob_chunk_size: int = 2048,
        moe: MoESettings | None = None,
        lora: LoRASettings | None = None,
        init_from: str | None = None,
    ) -> None:
        super().__init__(
            model=model,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            max_tokens_per_microbatch=max_tokens_per_microbatch,
            packing=packing,
            layer_backend=layer_backend,
            model_config=model_config,
            verify_model=verify_model,
            moe=moe,
            lora=lora,
            init_from=init_from,
        )
        check_ranges({"logprob_chunk_size": COUNT.called("it is a number of tokens")}, locals())
        self.logprob_chunk_size = logprob_chunk_size

    def output_processor(self, vocab_size: int | None = None) -> OutputProcessor:
        """Return what makes log-probs and entropies of hidden states, of the policy's vocabulary or another model's."""
        from lightning_megatron_rl.models.layers.logprobs import logprob_processor

        return logprob_processor(
            vocab_size=vocab_size or self.hf_model.config.vocab_size,
            temperature=self.temperature,
            chunk_size=self.logprob_chunk_size,
            with_entropy=True,
        )

    def score(
        self,
        sequences: list[TokenSequence],
        chunks: list[nn.Module] | None = None,
        *,
        routing: "RoutingMode" = "free",
        vocab_size: int | None = None,
    ) -> Scores:
        """Return log-probs and entropies of `sequences` under the policy, or under other `chunks`.

        Every rank of the replica gets them. Log-probs are of the distribution that is sampled: logits divided by
        `temperature`. `routing` says whether the policy's choice of experts is recorded or each sequence's replayed.
        """
        rows, chosen = self.score_rows(sequences, chunks, processor=self.output_processor(vocab_size), routing=routing)
        return Scores([both[0] for both in rows], [both[1] for both in rows], chosen)

    def export_outputs(self, sequences: list[TokenSequence]) -> list[Tensor]:
        """Return the log-probs by which an export is compared with the trainer, per sequence ``[tokens - 1]``."""
        return [logprobs[1:] for logprobs in self.score(sequences).logprobs]
