"""The same tiny model under stock Lightning and under `MegatronStrategy`: runs whose records can be compared."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from torch import Tensor

from lightning_megatron_rl.data.packing import TokenSequence
from lightning_megatron_rl.modules.sft import SFTModule
from lightning_megatron_rl.modules.training import TrainingSettings
from tests.training import SequenceDataModule, frozen_sequences, make_trainer

LR = 0.1
BATCH_SIZE = 4


def public_methods(*owners: type) -> list[str]:
    """Names of the public methods that the classes define themselves."""
    return sorted(
        {
            name
            for owner in owners
            for name, member in vars(owner).items()
            if inspect.isfunction(member) and not name.startswith("_")
        }
    )


CALLBACK_HOOKS = public_methods(pl.Callback)
MODULE_HOOKS = public_methods(ModelHooks, DataHooks, CheckpointHooks)
DATA_HOOKS = public_methods(DataHooks, CheckpointHooks, pl.LightningDataModule)
# methods of a LightningModule that the loops call; the rest is called by users
STEP_HOOKS = [
    "configure_callbacks",
    "configure_gradient_clipping",
    "configure_optimizers",
    "lr_scheduler_step",
    "optimizer_step",
    "optimizer_zero_grad",
    "predict_step",
    "test_step",
    "training_step",
    "validation_step",
]


def recorder(base: type, names: list[str], calls: list[Any]) -> type:
    """A class to put before `base`: it notes calls of `names` in `calls`, then does what `base` does."""

    def hook(name: str) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            trainer = args[0] if args and isinstance(args[0], pl.Trainer) else _trainer(self)
            numbers = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, int | str)]
            calls.append((name, *_state(trainer), *numbers))
            return getattr(super(kind, self), name)(*args, **kwargs)

        return call

    kind = type(f"Recorded{base.__name__}", (base,), {name: hook(name) for name in names if hasattr(base, name)})
    return kind


def _state(trainer: pl.Trainer | None) -> tuple[Any, ...]:
    """What a hook can ask the Trainer: function, stage, step, epoch."""
    if trainer is None or trainer.state.fn is None:
        return ()
    stage = trainer.state.stage
    return trainer.state.fn.value, stage.value if stage else None, trainer.global_step, trainer.current_epoch


def _trainer(owner: Any) -> pl.Trainer | None:
    """The Trainer that a module or data module is attached to."""
    found = (
        getattr(owner, "_trainer", None) if isinstance(owner, pl.LightningModule) else getattr(owner, "trainer", None)
    )
    return found if isinstance(found, pl.Trainer) else None


class StockModule(pl.LightningModule):
    """Supervised fine-tuning of a Hugging Face model as Lightning's documentation has it: no Megatron, no strategy."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM

        self.hf = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def loss(self, sequences: list[TokenSequence]) -> Tensor:
        """Mean negative log-likelihood over all target tokens of the batch."""
        total, count = torch.zeros(()), 0
        for sequence in sequences:
            logprobs = self.hf(sequence.token_ids[None]).logits[0, :-1].log_softmax(-1)
            picked = logprobs.gather(-1, sequence.token_ids[1:, None])[:, 0]
            mask = sequence.loss_mask[1:]
            total, count = total - picked[mask].sum(), count + int(mask.sum())
        return total / count

    def training_step(self, sequences: list[TokenSequence], batch_idx: int) -> Any:
        """Loss of the batch."""
        loss = self.loss(sequences)
        self.log("policy/loss", loss, batch_size=1)
        return loss

    def on_validation_epoch_start(self) -> None:
        """Start the mean over all target tokens."""
        self.total, self.count = 0.0, 0

    def validation_step(self, sequences: list[TokenSequence], batch_idx: int) -> None:
        """Add a batch."""
        count = sum(int(sequence.loss_mask[1:].sum()) for sequence in sequences)
        self.total, self.count = self.total + float(self.loss(sequences)) * count, self.count + count

    def on_validation_epoch_end(self) -> None:
        """Log the mean."""
        self.log("val/loss", self.total / self.count)

    def on_test_epoch_start(self) -> None:
        """As in a validation."""
        self.on_validation_epoch_start()

    def test_step(self, sequences: list[TokenSequence], batch_idx: int) -> None:
        """Add a batch."""
        self.validation_step(sequences, batch_idx)

    def on_test_epoch_end(self) -> None:
        """Log the mean."""
        self.log("test/loss", self.total / self.count)

    def predict_step(self, sequences: list[TokenSequence], batch_idx: int) -> Any:
        """Return the loss."""
        return self.loss(sequences)

    def configure_optimizers(self) -> Any:
        """SGD, whose steps show gradients as they are."""
        optimizer = torch.optim.SGD(self.parameters(), lr=LR)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=4)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def weights(self) -> dict[str, Tensor]:
        """Copies under Hugging Face names."""
        return {name: tensor.detach().clone() for name, tensor in self.hf.named_parameters()}


class OurModule(SFTModule):
    """The same training by Megatron."""

    def __init__(self, path: Path) -> None:
        from functools import partial

        from megatron.core.optimizer import OptimizerConfig

        super().__init__(
            str(path),
            TrainingSettings(
                optimizer=OptimizerConfig(optimizer="sgd", lr=LR, sgd_momentum=0.0, weight_decay=0.0),
                lr_scheduler=partial(torch.optim.lr_scheduler.LinearLR, start_factor=0.5, total_iters=4),
                max_tokens_per_microbatch=64,
            ),
        )

    def weights(self) -> dict[str, Tensor]:
        """Copies under Hugging Face names."""
        return {name: tensor.clone() for name, tensor in self.export_weights()}


class Sequences(SequenceDataModule):
    """Three batches of frozen sequences for every stage."""

    def __init__(self, batches: int = 3) -> None:
        super().__init__(frozen_sequences(batches * BATCH_SIZE), BATCH_SIZE)

    def test_dataloader(self) -> Any:
        return self.train_dataloader()

    def predict_dataloader(self) -> Any:
        return self.train_dataloader()


def stock_trainer(**options: Any) -> pl.Trainer:
    """A Trainer on one CPU process without a strategy of anybody's."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(**{"accelerator": "cpu", "devices": 1, "strategy": "auto", **quiet, **options})


class StockSequences(Sequences):
    """The same batches where the strategy has no ranks to share them."""

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.sequences, batch_size=self.batch_size, collate_fn=list)


def trainers(strategy: dict[str, Any] | None = None) -> list[tuple[Callable[..., pl.Trainer], type, type]]:
    """(Trainer, module, data) of stock Lightning, then of `MegatronStrategy`, which shards no SGD."""

    def ours(**options: Any) -> pl.Trainer:
        return make_trainer({"use_distributed_optimizer": False, **(strategy or {})}, 1, **options)

    return [(stock_trainer, StockModule, StockSequences), (ours, OurModule, Sequences)]


@dataclass
class Seen:
    """What is left of a run: weights under Hugging Face names, counters, logged metrics, what the callback saw."""

    weights: dict[str, Tensor]
    step: int
    epoch: int
    metrics: dict[str, float]
    seen: Any  # what the callback has in its attribute of this name


def fit_both(
    model: Path,
    make_callback: Callable[..., pl.Callback] | None = None,
    *args: Any,
    mixin: type = object,
    **options: Any,
) -> tuple[Seen, Seen]:
    """Fit the same batches under stock Lightning and under `MegatronStrategy`.

    Args:
        model: Directory of the Hugging Face model.
        make_callback: Called with `args` once for each run.
        mixin: Hooks that both modules get.
        options: Of the Trainer.
    """
    runs = []
    for make, module_class, data_class in trainers():
        callback = make_callback(*args) if make_callback is not None else None
        kind = module_class if mixin is object else type(module_class.__name__, (mixin, module_class), {})
        module = kind(model)
        callbacks = [] if callback is None else [callback]
        trainer = make(**{"max_steps": 3, "limit_val_batches": 0, "callbacks": callbacks, **options})
        trainer.fit(module, data_class())
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        seen = getattr(callback, "seen", None)
        runs.append(Seen(module.weights(), trainer.global_step, trainer.current_epoch, metrics, seen))
    return runs[0], runs[1]
