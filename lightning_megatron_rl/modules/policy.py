"""`PolicyModule`: a language model on Megatron that is scored by log-probs."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from lightning_megatron_rl.data.packing import TokenSequence
from lightning_megatron_rl.modules.model import ModelModule
from lightning_megatron_rl.modules.steps import OutputProcessor

if TYPE_CHECKING:
    from lightning_megatron_rl.models.hf.model import HFModel
    from lightning_megatron_rl.models.layers.routers import RoutingMode
    from lightning_megatron_rl.modules.reference import Reference

_REFERENCE = "reference"  # of a checkpoint


@dataclass  # not frozen: `Trainer.predict` moves results to the CPU, and writes the fields of dataclasses to do so
class Scores:
    """Log-probs and entropies of sequences, aligned with their tokens; position 0 has none and holds 0."""

    logprobs: list[Tensor]  # per sequence: [tokens]
    entropies: list[Tensor]  # per sequence: [tokens]
    routing: list[Tensor]  # per sequence, if recorded: [tokens, expert layers of this pipeline stage, topk] int16


class PolicyModule(ModelModule):
    """A language model on Megatron: builds it, scores sequences with it, updates it.

    Arguments are those of `ModelModule`.
    """

    reference: "Reference | None" = None  # where a method measures KL to one

    def setup(self, stage: str) -> None:
        """Check the policy and, if it has one, the reference, before weights are loaded."""
        super().setup(stage)
        if self.reference is not None:
            self.reference.setup()

    def configure_model(self) -> None:
        """Build the policy and the reference."""
        super().configure_model()
        if self.reference is not None:
            self.reference.build()

    def on_fit_start(self) -> None:
        """Start the report of a fit, and the reference."""
        super().on_fit_start()
        if self.reference is not None:
            self.reference.begin_fit()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Note what the reference is."""
        super().on_save_checkpoint(checkpoint)
        if self.reference is not None:
            checkpoint[_REFERENCE] = self.reference.state

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Look whether a fit that goes on has the same one."""
        super().on_load_checkpoint(checkpoint)
        if self.reference is not None and self.trainer.state.fn == TrainerFn.FITTING:
            self.reference.check_state(checkpoint.get(_REFERENCE))  # not in checkpoints of older versions

    @property
    def frozen_copies(self) -> int:
        """The reference, where it is a model of its own that stays on the GPU."""
        return 0 if self.reference is None else self.reference.num_on_gpu

    @property
    def own_averages(self) -> int:
        """The reference, where it is an average."""
        return int(self.reference is not None and self.reference.kind == "average")

    @property
    def logprob_chunk_size(self) -> int:
        """Tokens whose logits exist at one time."""
        return self.train_settings.logprob_chunk_size

    def output_processor(self, model: "HFModel | None" = None) -> OutputProcessor:
        """Return what makes log-probs and entropies of hidden states of the policy, or of another model."""
        from lightning_megatron_rl.models.layers.logprobs import logprob_processor

        model = model or self.hf_model
        return logprob_processor(
            vocab_size=model.config.vocab_size,
            temperature=self.temperature,
            chunk_size=self.logprob_chunk_size,
            with_entropy=True,
            cap=model.logit_cap,
        )

    def score(
        self,
        sequences: list[TokenSequence],
        chunks: list[nn.Module] | None = None,
        *,
        routing: "RoutingMode" = "free",
        model: "HFModel | None" = None,
    ) -> Scores:
        """Return log-probs and entropies of `sequences` under the policy, or under other `chunks`.

        Every rank of the replica gets them. Log-probs are of the distribution that is sampled: logits divided by
        `temperature`. `routing` says whether the policy's choice of experts is recorded or each sequence's replayed.
        """
        rows, chosen = self.score_rows(sequences, chunks, processor=self.output_processor(model), routing=routing)
        return Scores([both[0] for both in rows], [both[1] for both in rows], chosen)

    def export_outputs(self, sequences: list[TokenSequence]) -> list[Tensor]:
        """Return the log-probs by which an export is compared with the trainer, per sequence ``[tokens - 1]``."""
        return [logprobs[1:] for logprobs in self.score(sequences).logprobs]
