"""`RewardModule`: a reward model from preference pairs, after Bradley and Terry."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_megatron_rl.algorithms.preferences import bradley_terry
from lightning_megatron_rl.data.packing import TokenSequence
from lightning_megatron_rl.modules.pairs import PairModule
from lightning_megatron_rl.modules.steps import OutputProcessor
from lightning_megatron_rl.modules.training import TrainingSettings
from lightning_megatron_rl.utilities.ranges import NOT_NEGATIVE, check_ranges

if TYPE_CHECKING:
    from lightning_megatron_rl.models.value_model import ValueModel


class RewardModule(PairModule):
    """Train a model with a scalar head to score preferred responses higher.

    The score of a sequence is the head's value at its last token that is not the padding token, as in Transformers'
    `AutoModelForSequenceClassification`, into which exports load.

    Args:
        model: Hugging Face hub name, or a directory that `save_pretrained` wrote: a language model, which gets a new
            head, or a reward model.
        center_coef: Weight of (chosen + rejected)^2, which keeps scores around zero.
        train: How the model is built and trained; a side takes one token more of the budget than it has, and with
            adapters the head is trained as well.

    Raises:
        ValueError: A negative `center_coef`, or a token budget below 1.
    """

    metrics_prefix = "reward_model"
    exports_classifier = True
    default_lr = 1e-5

    def __init__(
        self,
        model: str,
        center_coef: float = 0.0,
        train: TrainingSettings | None = None,
    ) -> None:
        super().__init__(model=model, train=train)
        check_ranges({"center_coef": NOT_NEGATIVE.called("below 0 it drives scores away from zero")}, locals())
        self.center_coef = center_coef
        chunk_size = self.train_settings.logprob_chunk_size
        if chunk_size != TrainingSettings().logprob_chunk_size:
            rank_zero_warn(f"train.logprob_chunk_size={chunk_size} does nothing: a RewardModule computes no log-probs.")

    def find_model(self) -> "ValueModel":
        """Return the Hugging Face side of `model_path`, with a value head."""
        from lightning_megatron_rl.models.value_model import ValueModel

        return ValueModel(self.model_path, verify=self.train_settings.verify_model)

    def output_processor(self) -> OutputProcessor:
        """Return what makes values of hidden states."""
        from lightning_megatron_rl.models.layers.value_head import value_processor

        return value_processor()

    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Return the Bradley-Terry loss of scores ``[pairs]``."""
        return partial(bradley_terry, center_coef=self.center_coef)(chosen, rejected)

    def prepare_side(self, sequence: TokenSequence) -> TokenSequence:
        """Return the sequence up to its last token that is scored, see `scored_at_end`."""
        scored = scored_at_end(sequence.token_ids, self.hf_model.pad_token_id)  # type: ignore[attr-defined]
        return replace(scored, origin=sequence.origin)

    def side_values(self, sequences: list[TokenSequence]) -> Tensor:
        """Return the values at the end of sequences from `scored_at_end`, ``[sequences]``."""
        rows, _ = self.score_rows(sequences)
        return torch.stack([row[0, -1] for row in rows]) if rows else torch.empty(0)

    def export_outputs(self, sequences: list[TokenSequence]) -> list[Tensor]:
        """Return the score of each sequence, by which an export is compared with the trainer, each ``[1]``."""
        return list(self.score(sequences).unsqueeze(1))

    def save_adapter(self, directory: Path) -> None:
        """Refuse: an adapter in PEFT's format would have no head.

        Raises:
            ValueError: Always, with what to do in its place.
        """
        raise ValueError(
            "RewardModule.save_adapter: PEFT's format would leave out the head, which is trained as well. Export the"
            " merged model: HFExport(adapter='merged') or save_pretrained."
        )

    def score(self, sequences: list[TokenSequence]) -> Tensor:
        """Return the scores of whole sequences, ``[sequences]`` on the CPU of every rank of the replica."""
        return self.side_values([self.prepare_side(sequence) for sequence in sequences])


def scored_at_end(token_ids: Tensor, pad_token_id: int | None) -> TokenSequence:
    """Return a sequence whose only target is behind its last token that is not padding.

    Outputs are aligned with the token that they predict, and the score is the output at the last token, which predicts
    nothing: one more token, which nothing attends to, stands for what is behind.

    Example:
        ``scored_at_end(torch.tensor([5, 9, 0]), pad_token_id=0)`` has the tokens 5 9 9 and the last one as its target.
    """
    kept = (token_ids != pad_token_id).nonzero() if pad_token_id is not None else None
    # Transformers scores the first token of a sequence that is all padding
    end = len(token_ids) if kept is None else int(kept[-1]) + 1 if len(kept) else 1
    ids = torch.cat([token_ids[:end], token_ids[end - 1 : end]])
    return TokenSequence(ids, torch.arange(end + 1) == end)
