"""`RunCheckpoints`: Lightning's checkpoint hooks for a strategy's model, optimizers and settings."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import nn
from torch.optim import Optimizer

from lightning_megatron_rl.checkpoints.keeping import CheckpointKeeper, is_fitting
from lightning_megatron_rl.checkpoints.outside_model import load_outside_model, state_outside_model
from lightning_megatron_rl.checkpoints.resuming import note_due_validation
from lightning_megatron_rl.checkpoints.saving import CheckpointSaver, Contents, RunFacts, check_checkpoint
from lightning_megatron_rl.compat.lightning import run_arguments
from lightning_megatron_rl.parallel.collectives import broadcast
from lightning_megatron_rl.strategy.saved_schedulers import check_schedulers
from lightning_megatron_rl.utilities.files import check_local
from lightning_megatron_rl.utilities.notices import tell_loss
from lightning_megatron_rl.utilities.text_files import user_path

if TYPE_CHECKING:
    from lightning_megatron_rl.strategy.megatron import MegatronStrategy

_OPTIMIZER = "optimizer"  # the optimizer in Lightning's dictionary, whose state `save` takes


class RunCheckpoints:
    """Saves, loads and checks checkpoints of a strategy's run.

    Args:
        strategy: Whose model, optimizers and settings they are.
    """

    def __init__(self, strategy: "MegatronStrategy") -> None:
        self._strategy = strategy
        self.keeper = CheckpointKeeper(strategy.phase)
        self._saver = CheckpointSaver(self.keeper)
        self.is_set_up = False  # whether there is a model to save

    def start(self, trainer: "pl.Trainer") -> None:
        """Get ready for a fit, whose optimizer is a new one."""
        self._saver.forget()
        self.keeper.start(trainer, self._strategy.timeout_s)

    def weights_changed(self) -> None:
        """Share no files with earlier checkpoints."""
        self._saver.forget()

    def module_state(self) -> dict[str, Any]:
        """Return sharded weights per chunk, and the module's state outside `model`."""
        if not self.is_set_up:
            return {}
        self._strategy.reload()  # a hook may save while a sampler works, which is in a validation
        self._strategy.gather_parameters()
        return {**self._contents().weights(), "other": state_outside_model(self._strategy.trainer.lightning_module)}

    @staticmethod
    def optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer itself: `save` takes its state if needed."""
        return {_OPTIMIZER: optimizer}

    def save(self, checkpoint: dict[str, Any], filepath: str | Path) -> None:
        """Write Lightning's checkpoint dictionary as a directory, by all ranks; see `checkpoints.format`."""
        if not self.is_set_up:  # asked for by a callback that answers the error which has ended the run
            rank_zero_only(tell_loss)(
                f"no checkpoint {filepath} was written: the run ended before its model was there."
            )
            return
        check_local(filepath, "checkpoint")
        trainer = self._strategy.trainer
        note_due_validation(checkpoint, trainer)
        in_fit, batches = is_fitting(trainer), trainer.fit_loop.epoch_loop.batch_progress.current
        if in_fit and batches.processed < batches.ready:  # type: ignore[attr-defined]
            rank_zero_only(tell_loss)(
                f"{filepath} was saved in the middle of a step: a run that resumes from it leaves that batch out."
                " Save in on_train_batch_end."
            )
        optimizers = [saved[_OPTIMIZER] for saved in checkpoint.pop("optimizer_states", [])]
        with self._strategy.phase("checkpoint save"), ExitStack() as stack:
            for average in self._strategy.averages.values():  # the model may have it, in a validation
                stack.enter_context(average.set_aside())
            path, later = Path(broadcast(str(filepath))), in_fit and self._strategy.async_save
            self._saver.save(path, checkpoint, self._contents(optimizers), self._facts(), in_fit=in_fit, later=later)
        if in_fit and trainer.is_global_zero:
            self.keeper.supersede(Path(filepath), trainer)

    def remove(self, path: Path) -> None:
        """Delete a checkpoint directory (rank 0), when what was saved before this call is complete."""
        self._saver.forget(path)
        self.keeper.remove(path)

    def load(self, path: str | Path, weights_only: bool | None) -> dict[str, Any]:
        """Load everything from a checkpoint of any layout and return Lightning's part; see `CheckpointSaver.load`.

        Outside of a fit no optimizer is loaded, and none is kept.

        `weights_only` is that of `trainer.fit`, `validate` and so on, which Lightning does not pass on.
        """
        if weights_only is None:
            weights_only = (run_arguments(self._strategy.trainer) or {}).get("weights_only")
        check_local(path, "ckpt_path")
        if self._strategy.trainer.state.fn != TrainerFn.FITTING:
            self._strategy.optimizers = []  # an earlier fit's, which are not of the weights that come now
        with self._strategy.phase("checkpoint load"):
            contents, given = self._contents(self._strategy.own_optimizers), user_path(broadcast(str(path)))
            return self._saver.load(given, contents, self._facts(), weights_only=weights_only is not False)

    def load_module_state(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Load what the module holds outside `model`, and check the schedulers, to which Lightning gives theirs next.

        Raises:
            ValueError: One of them is not what the checkpoint has.
        """
        strategy = self._strategy
        load_outside_model(strategy.trainer.lightning_module, checkpoint["state_dict"], strict)
        if strategy.trainer.state.fn == TrainerFn.FITTING:
            schedulers = [config.scheduler for config in strategy.lr_scheduler_configs]
            check_schedulers(schedulers, checkpoint["lr_schedulers"])

    def load_weights(self, path: Path, chunks: Sequence[nn.Module]) -> None:
        """Give freshly built chunks the weights of a checkpoint; see `CheckpointSaver.load_weights`."""
        with self._strategy.phase("checkpoint load"):
            self._saver.load_weights(path, chunks, self._facts())

    def check(self, path: Path, *, training: bool) -> None:
        """Refuse a checkpoint that `load` would refuse; see `saving.check_checkpoint`."""
        strategy = self._strategy
        check_checkpoint(
            user_path(broadcast(str(path))),
            strategy.trained_on_top_of,
            training=training,
            fall_back=strategy.fall_back_to_previous,
        )

    def _contents(self, optimizers: Sequence[Any] = ()) -> Contents:
        """What a checkpoint holds with these optimizers of the module's own model; none: weights only."""
        strategy = self._strategy
        named = {f"optimizer{index}": optimizer for index, optimizer in enumerate(optimizers)}
        if named:
            named |= {f"optimizer_{name}": it for name, it in strategy.optimizers_saved_with_model.items()}
        return Contents(
            list(strategy.chunks), named, strategy.trained_on_top_of, strategy.saved_with_model, strategy.saved_beside
        )

    def _facts(self) -> RunFacts:
        strategy = self._strategy
        return RunFacts(
            strategy.layout,
            strategy.world_size,
            self.keeper.run_id,
            strategy.use_distributed_optimizer,
            verify=strategy.verify_checkpoints,
            fall_back=strategy.fall_back_to_previous,
        )
