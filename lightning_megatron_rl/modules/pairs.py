"""What training on preference pairs has in common, whatever a side's value is."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_megatron_rl.algorithms.preferences import side_gradients
from lightning_megatron_rl.algorithms.tally import Tally
from lightning_megatron_rl.data.packing import MicroBatch, TokenSequence
from lightning_megatron_rl.data.preference import PreferenceDataModule, PreferencePair
from lightning_megatron_rl.modules.batches import check_batch, check_rows
from lightning_megatron_rl.modules.model import ModelModule

_GRADIENT_FIELD = "gradient"  # of the loss of all pairs by the token's output, times the global number of targets


class PairModule(ModelModule):
    """Trains on pairs in two passes: the first finds each side's value, the second follows the loss's derivatives.

    A side's value is a weighted sum of its tokens' outputs, so once both values of a pair are known, its loss is linear
    in them for the backward pass. The sides of a pair can then be packed, and shared out to ranks, like any sequences;
    the price is one more forward pass. Dropout, which is off unless asked for, is in the second pass only.
    """

    @abstractmethod
    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Return the loss of each pair, given the values of its sides, each ``[pairs]``."""

    @abstractmethod
    def side_values(self, sequences: list[TokenSequence]) -> Tensor:
        """Return the value of each side, ``[sides]`` on the CPU; a collective."""

    def prepare_side(self, sequence: TokenSequence) -> TokenSequence:
        """Return a side as it is run: its loss mask covers the tokens whose outputs make its value."""
        return sequence

    def token_share(self, sequence: TokenSequence) -> float:
        """Return the weight of a target's output in its side's value."""
        return 1.0

    def preference_scale(self) -> float:
        """Return what a side's value is multiplied with to be logged as a reward."""
        return 1.0

    def _values_of(self, pairs: list[PreferencePair]) -> tuple[list[TokenSequence], Tensor, Tensor]:
        sides = [self.prepare_side(pair.chosen) for pair in pairs]
        sides += [self.prepare_side(pair.rejected) for pair in pairs]
        chosen, rejected = self.side_values(sides).double().view(2, len(pairs))
        return sides, chosen, rejected

    def setup(self, stage: str) -> None:
        """Check model and rows, before weights are loaded."""
        super().setup(stage)
        check_rows(
            self, PreferencePair, lambda pair: [self.prepare_side(pair.chosen), self.prepare_side(pair.rejected)]
        )

    def training_step(self, pairs: list[PreferencePair], batch_idx: int) -> Tensor:
        """Compute the gradients of the mean loss of all replicas' pairs; return that loss, equal on every rank."""
        check_batch(self, pairs, PreferencePair, PreferenceDataModule)
        with self.phase("score"):
            sides, chosen, rejected = self._values_of(pairs)
        losses, *gradients = side_gradients(self.pair_loss, chosen, rejected)
        own = torch.tensor([len(pairs), sum(int(side.loss_mask.sum()) for side in sides)], dtype=torch.float64)
        num_pairs, num_targets = self.reduce_on_device(own, "sum").tolist()
        trained = []
        for side, gradient in zip(sides, torch.cat(gradients).tolist(), strict=True):
            value = gradient * self.token_share(side) * num_targets / num_pairs  # the strategy divides by num_targets
            field = torch.full((len(side),), value)
            trained.append(TokenSequence(side.token_ids, side.loss_mask, {_GRADIENT_FIELD: field}, origin=side.origin))
        with self.phase("update"):
            metrics = self.update(trained, follow_gradient)
        tally = self._tally(losses, chosen, rejected, f"{self.metrics_prefix}/", "preference/")
        metrics |= tally.reduce(self.reduce_on_device).compute()
        self.log_metrics(metrics, prog_bar=(f"{self.metrics_prefix}/loss", "preference/accuracy"))
        return self.loss_of_update(metrics[f"{self.metrics_prefix}/loss"])

    def _tally(self, losses: Tensor, chosen: Tensor, rejected: Tensor, loss_prefix: str, prefix: str) -> Tally:
        tally, scale = Tally(), self.preference_scale()
        tally.add_mean(f"{loss_prefix}loss", losses)
        tally.add_mean(f"{prefix}accuracy", (chosen > rejected).double())
        tally.add_mean(f"{prefix}margin", scale * (chosen - rejected))
        tally.add_mean(f"{prefix}chosen", scale * chosen)
        tally.add_mean(f"{prefix}rejected", scale * rejected)
        return tally

    def describe_batch(self, batch: list[PreferencePair]) -> list[tuple[str, str]]:
        """Return the arithmetic of a batch, for the table at start."""
        replicas = self.strategy.layout.data_parallel_size(self.trainer.world_size)
        pairs = len(batch) * replicas
        return [
            ("pairs per update", f"{len(batch)} per replica x {replicas} replicas = {pairs}, {2 * pairs} sequences"),
            self.train_settings.describe_microbatch(),
        ]

    # ---- validation, test, prediction ------------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        """Start the sums of the epoch."""
        self._epoch: list[tuple[Tensor, Tensor]] = []

    def validation_step(self, pairs: list[PreferencePair], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Keep the values of the batch's sides."""
        check_batch(self, pairs, PreferencePair, PreferenceDataModule)
        _, chosen, rejected = self._values_of(pairs)
        self._epoch.append((chosen, rejected))

    def on_validation_epoch_end(self) -> None:
        """Log ``val/loss``, ``val/accuracy``, ``val/margin``, ``val/chosen`` and ``val/rejected`` over all pairs."""
        self._log_epoch("val/")

    def on_test_epoch_start(self) -> None:
        """Start the sums of the epoch."""
        self.on_validation_epoch_start()

    def test_step(self, pairs: list[PreferencePair], batch_idx: int, dataloader_idx: int = 0) -> None:
        """As validation."""
        self.validation_step(pairs, batch_idx, dataloader_idx)

    def on_test_epoch_end(self) -> None:
        """Log the same as after validation, under ``test/``."""
        self._log_epoch("test/")

    def predict_step(self, pairs: list[PreferencePair], batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Return the logged rewards of both sides, ``[pairs, 2]``: chosen, rejected."""
        check_batch(self, pairs, PreferencePair, PreferenceDataModule)
        _, chosen, rejected = self._values_of(pairs)
        return self.preference_scale() * torch.stack([chosen, rejected], dim=1)

    def evaluation_metrics(self, stage: str, sets: Sequence[str]) -> list[str]:
        """Return the names over all pairs."""
        return [f"{stage}/{name}" for name in ("loss", "accuracy", "margin", "chosen", "rejected")]

    def _log_epoch(self, prefix: str) -> None:
        empty = torch.empty(0, dtype=torch.float64)
        chosen, rejected = (torch.cat([empty, *(pair[side] for pair in self._epoch)]) for side in (0, 1))
        tally = self._tally(self.pair_loss(chosen, rejected), chosen, rejected, prefix, prefix)
        self.log_metrics(tally.reduce(self.reduce_on_device).compute())


def follow_gradient(batch: MicroBatch, outputs: Tensor, *others: Any) -> Tensor:
    """Return a loss whose derivative by each output is the field "gradient"; a `TokenLoss`."""
    return batch.fields[_GRADIENT_FIELD] * outputs
