"""`SFTModule`: supervised fine-tuning on the response tokens of prompt-response pairs or chats."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_megatron_rl.algorithms.tally import Tally
from lightning_megatron_rl.data.base import RowDataModule
from lightning_megatron_rl.data.packing import MicroBatch, TokenSequence
from lightning_megatron_rl.data.sft import SFTDataModule
from lightning_megatron_rl.modules.batches import check_batch, check_rows
from lightning_megatron_rl.modules.policy import PolicyModule, Scores

_LARGEST = 709.0  # e^710 is no float64


class SFTModule(PolicyModule):
    """Minimise the negative log-likelihood of the target tokens, averaged over all of them in the global batch."""

    default_aux_loss_coeff = 1e-2

    def setup(self, stage: str) -> None:
        """Check model and rows, before weights are loaded."""
        super().setup(stage)
        check_rows(self, TokenSequence, lambda sequence: [sequence])

    def training_step(self, sequences: list[TokenSequence], batch_idx: int) -> Tensor:
        """Compute the gradients of one batch; return its loss."""
        check_batch(self, sequences, TokenSequence, SFTDataModule)
        with self.phase("update"):
            metrics = self.update(sequences, token_nll)
        self.log_metrics(metrics, prog_bar=("policy/loss",))
        return self.loss_of_update(metrics["policy/loss"])

    def describe_batch(self, batch: list[TokenSequence]) -> list[tuple[str, str]]:
        """Return the arithmetic of a batch, for the table at start."""
        replicas = self.strategy.layout.data_parallel_size(self.trainer.world_size)
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        per_update = f"{len(batch)} per replica x {replicas} replicas = {len(batch) * replicas}"
        if isinstance(data, SFTDataModule) and data.max_tokens_per_batch is not None:
            per_update = f"at most {data.batch_size}, of at most {data.max_tokens_per_batch} tokens together"
        return [
            ("sequences per update", per_update),
            self.train_settings.describe_microbatch(),
        ]

    def on_validation_epoch_start(self) -> None:
        """Start the sums of the epoch; a replica without a sequence knows the names as well."""
        self._tally = Tally()
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        self._sets = data.val_names if isinstance(data, RowDataModule) else []
        for name in ["loss", *(f"{dataset}/loss" for dataset in self._sets)]:
            self._tally.add_mean(name, torch.empty(0))

    def validation_step(self, sequences: list[TokenSequence], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add the batch's negative log-likelihood."""
        check_batch(self, sequences, TokenSequence, SFTDataModule)
        scores = self.score(sequences)
        for sequence, logprobs in zip(sequences, scores.logprobs, strict=True):
            self._tally.add_mean("loss", -logprobs, sequence.loss_mask)
            if self._sets:
                self._tally.add_mean(f"{self._sets[dataloader_idx]}/loss", -logprobs, sequence.loss_mask)

    def on_validation_epoch_end(self) -> None:
        """Log ``val/loss`` and ``val/perplexity`` over all target tokens, and of each set by its name."""
        self._log_likelihood("val")

    def on_test_epoch_start(self) -> None:
        """Start the sums of the epoch."""
        self.on_validation_epoch_start()

    def test_step(self, sequences: list[TokenSequence], batch_idx: int, dataloader_idx: int = 0) -> None:
        """As validation."""
        self.validation_step(sequences, batch_idx, dataloader_idx)

    def on_test_epoch_end(self) -> None:
        """Log the same as after validation, under ``test/``."""
        self._log_likelihood("test")

    def predict_step(self, sequences: list[TokenSequence], batch_idx: int, dataloader_idx: int = 0) -> Scores:
        """Return log-probs and entropies of the sequences' tokens."""
        check_batch(self, sequences, TokenSequence, SFTDataModule)
        return self.score(sequences)

    def evaluation_metrics(self, stage: str, sets: Sequence[str]) -> list[str]:
        """Return loss and perplexity, of all sets and of each."""
        owners = [stage, *(f"{stage}/{name}" for name in sets)]
        return [f"{owner}/{metric}" for owner in owners for metric in ("loss", "perplexity")]

    def _log_likelihood(self, stage: str) -> None:
        losses = self._tally.reduce(self.reduce_on_device).compute()
        for name, loss in losses.items():
            prefix = f"{stage}/{name.removesuffix('loss')}"
            self.log_metrics({f"{prefix}loss": loss, f"{prefix}perplexity": perplexity(loss)})


def perplexity(loss: float) -> float:
    """Return e^loss, infinite where that is too large for a float.

    Example:
        ``perplexity(0.0) == 1.0``
    """
    return math.inf if loss > _LARGEST else math.exp(loss)


def token_nll(batch: MicroBatch, logprobs: Tensor, entropy: Tensor, tally: Tally) -> Tensor:
    """Return the negative log-likelihood per token; a `TokenLoss`."""
    tally.add_mean("policy/entropy", entropy.detach(), batch.mask)
    return -logprobs
