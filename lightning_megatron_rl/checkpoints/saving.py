"""`CheckpointSaver`: a run's weights, optimizer and random-number states, as distributed checkpoints of any layout."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import nn

from lightning_megatron_rl.checkpoints import format as checkpoint_io
from lightning_megatron_rl.checkpoints.keeping import CheckpointKeeper
from lightning_megatron_rl.checkpoints.manifest import DamagedCheckpointError, check_files, is_checkpoint, read_manifest
from lightning_megatron_rl.checkpoints.optimizer_state import OptimizerState
from lightning_megatron_rl.parallel.collectives import gather_parameters
from lightning_megatron_rl.parallel.distributed import run_on_all_ranks
from lightning_megatron_rl.parallel.layout import ParallelLayout
from lightning_megatron_rl.utilities.finite import nonfinite_names, not_finite
from lightning_megatron_rl.utilities.notices import tell_loss


class Average(Protocol):
    """An average of the weights, kept beside an optimizer's state."""

    count: int  # updates

    def restart(self) -> None:
        """Start again from the weights at hand."""


class StatefulOptimizer(Protocol):
    """An optimizer whose state is saved; `strategy.optimizer.MegatronOptimizer` is one."""

    @property
    def averages(self) -> Mapping[str, Average]:
        """Averages of the weights, by name."""

    def state_of(
        self, model: dict[str, Any], *, is_loading: bool, averages: Container[str] | None = None
    ) -> OptimizerState:
        """Return the state as a distributed checkpoint has it."""

    def load_state(self, state: OptimizerState, loaded: dict[str, Any]) -> None:
        """Take over a state that was loaded."""


@dataclass(frozen=True)
class Contents:
    """Content of a checkpoint beside Lightning's part, on this rank."""

    chunks: Sequence[nn.Module]  # of the module's model
    optimizers: Mapping[str, StatefulOptimizer]  # by their names in the checkpoint; none: weights only
    trained_on_top_of: dict[str, Any] | None  # what adapters were added to; None: the whole model is saved
    others: Mapping[str, Sequence[nn.Module]]  # chunks of other models that change while the module trains, by a name
    beside: Mapping[str, bytes]  # small files, by their path in the checkpoint

    @property
    def all_chunks(self) -> list[nn.Module]:
        """Chunks of all models."""
        return [*self.chunks, *(chunk for chunks in self.others.values() for chunk in chunks)]

    @property
    def averages(self) -> dict[str, Average]:
        """Averages of the weights, by name."""
        return {name: it for optimizer in self.optimizers.values() for name, it in optimizer.averages.items()}

    def weights(self) -> dict[str, Any]:
        """Return Megatron's sharded state dict of each chunk; a collective under `overlap_param_gather`."""
        from megatron.core.utils import unwrap_model

        metadata = checkpoint_io.content_metadata()
        state = {}
        for index, chunk in enumerate(unwrap_model(list(self.chunks))):
            state[f"model{index}"] = chunk.sharded_state_dict(metadata=metadata)
            if self.trained_on_top_of is not None:
                state[f"model{index}"] = {name: state[f"model{index}"][name] for name in _trainable(chunk)}
        for name, chunks in self.others.items():
            gather_parameters(chunks)
            for index, chunk in enumerate(unwrap_model(list(chunks))):
                state[f"{name}{index}"] = chunk.sharded_state_dict(prefix=f"{name}.", metadata=metadata)
        return state

    def optimizer_states(
        self, weights: Mapping[str, Any], *, is_loading: bool, averages: Mapping[str, int] | None = None
    ) -> dict[str, OptimizerState]:
        """Return the state of each optimizer by its name.

        Args:
            weights: What `weights` returned.
            is_loading: Whether the states are to be loaded.
            averages: Names of the averages that are to be loaded; None: all.
        """
        return {
            name: optimizer.state_of(dict(weights), is_loading=is_loading, averages=averages)
            for name, optimizer in self.optimizers.items()
        }

    def load_weights(self, loaded: dict[str, Any]) -> None:
        """Give all chunks what was loaded for `weights`."""
        from megatron.core.utils import unwrap_model

        for index, chunk in enumerate(unwrap_model(list(self.chunks))):
            state = loaded[f"model{index}"]
            found = chunk.load_state_dict(state, strict=False)
            assert not found.unexpected_keys, found.unexpected_keys
            if self.trained_on_top_of is None:
                lacking = [name for name in found.missing_keys if not name.endswith(checkpoint_io.EXTRA_STATE)]
                assert not lacking, lacking
            else:  # frozen weights are there already
                assert state.keys() == _trainable(chunk)
        for name, chunks in self.others.items():
            for index, chunk in enumerate(unwrap_model(list(chunks))):
                state = loaded[f"{name}{index}"]
                chunk.load_state_dict({key.removeprefix(f"{name}."): value for key, value in state.items()})


@dataclass(frozen=True)
class RunFacts:
    """The run that saves or loads."""

    layout: ParallelLayout
    world_size: int
    run_id: str  # see `CheckpointKeeper.run_id`
    use_distributed_optimizer: bool
    verify: bool  # compare the checksum of each file that is loaded
    fall_back: bool  # take the checkpoint before one that is damaged or unfinished


@dataclass(frozen=True)
class SavedMoment:
    """The last checkpoint of this fit, and the weights it holds."""

    path: Path
    step: int
    has_optimizer: bool
    averages: dict[str, int]  # updates of each
    sums: list[float]  # of this rank's parameters and buffers


class CheckpointSaver:
    """Saves and loads what a run holds; two checkpoints of one moment share their files.

    Args:
        keeper: Writes what is saved.
    """

    def __init__(self, keeper: CheckpointKeeper) -> None:
        self._keeper = keeper
        self._saved: SavedMoment | None = None

    def forget(self, path: Path | None = None) -> None:
        """Share no files with earlier checkpoints: the weights change, or `path` is removed."""
        if self._saved is not None and path in (None, self._saved.path):
            self._saved = None

    def save(
        self,
        path: Path,
        checkpoint: dict[str, Any],
        contents: Contents,
        run: RunFacts,
        *,
        in_fit: bool,
        later: bool,
    ) -> None:
        """Write Lightning's checkpoint dictionary as a directory, by all ranks.

        Args:
            path: The same on every rank.
            checkpoint: Lightning's; its "state_dict" is `contents.weights()` and, as "other", the rest of the module.
            contents: What else it holds.
            run: For the manifest.
            in_fit: Whether a fit is under way.
            later: Write beside training.
        """
        step, has_optimizer = checkpoint.get("global_step", 0), bool(contents.optimizers)
        if self._keeper.links(path, step, has_optimizer, later=later):
            return
        state = checkpoint.pop("state_dict")
        averages = {name: average.count for name, average in contents.averages.items()}
        moment = SavedMoment(path, step, has_optimizer, averages, _weight_sums(contents.all_chunks))
        sharded: dict[str, Any] = {key: value for key, value in state.items() if key != "other"}
        source = self._already_saved(moment, in_fit)
        if source is None:
            self._keeper.finish()
            states = contents.optimizer_states(sharded, is_loading=False)
            sharded.update({name: optimizer_state.sharded() for name, optimizer_state in states.items()})
        else:  # two callbacks may have one last.ckpt
            self._keeper.finish_if_under_way(path)
        description = {
            "layout": asdict(run.layout),
            "world_size": run.world_size,
            "run_id": run.run_id,
            "global_step": step,
            "has_optimizer": has_optimizer,
            "use_distributed_optimizer": run.use_distributed_optimizer,
            "trained_on_top_of": contents.trained_on_top_of,
            "averages": averages,
        }
        trainer_state = {**checkpoint, "state_dict": state["other"]}
        pending = checkpoint_io.PendingCheckpoint(
            path,
            sharded if source is None else source,
            trainer_state,
            description,
            later=later,
            beside=contents.beside,
        )
        self._keeper.keep(pending, later=later)
        self._saved = moment if in_fit else None

    def _already_saved(self, moment: SavedMoment, in_fit: bool) -> Path | None:
        """Return the path of a checkpoint of this moment, such as the best one when the last one is saved."""
        saved = self._saved
        same = saved is not None and replace(saved, path=moment.path) == moment
        same = all(run_on_all_ranks(lambda: same)) and in_fit
        return saved.path if same and saved is not None else None

    def load(self, path: Path, contents: Contents, run: RunFacts, *, weights_only: bool) -> dict[str, Any]:
        """Load weights, optimizer and random-number states from a checkpoint of any layout; return Lightning's part.

        Args:
            path: The same on every rank.
            contents: What is loaded; changed in place.
            run: That loads it.
            weights_only: Whether Lightning's part must be plain data.

        Raises:
            FileNotFoundError: There is no such directory.
            ValueError: It is not a checkpoint, damaged, of another model or other adapters, or holds objects that are
                not plain data.
        """
        self._keeper.finish()
        self.forget()
        trains = bool(contents.optimizers)
        path, manifest = _open(path, run, contents.trained_on_top_of, trains)
        _check_base(path, manifest["trained_on_top_of"], contents.trained_on_top_of)
        sharded = contents.weights()
        _check_optimizer(path, manifest, trains)
        trainer_state = checkpoint_io.load_trainer_state(path, weights_only=weights_only)
        generators = _load_generators(path, manifest, run) if trains else None
        averages = manifest.get("averages", {})  # not in checkpoints of older versions
        states = contents.optimizer_states(sharded, is_loading=True, averages=averages)
        sharded.update({name: optimizer_state.sharded() for name, optimizer_state in states.items()})
        loaded = checkpoint_io.load_sharded(path, sharded)
        contents.load_weights(loaded)
        run_on_all_ranks(lambda: _check_finite(path, contents.all_chunks))
        for name, optimizer in contents.optimizers.items():
            optimizer.load_state(states[name], loaded[name])
        _count_averages(path, contents.averages, averages)
        if generators is not None:
            checkpoint_io.set_rng_state(generators)
        if trains:
            self._keeper.resumed_from = path.resolve(), manifest
        return trainer_state

    def load_weights(self, path: Path, chunks: Sequence[nn.Module], run: RunFacts) -> None:
        """Give freshly built chunks the weights of a checkpoint of any layout, and nothing else of it; a collective.

        Raises:
            FileNotFoundError: There is no such directory.
            ValueError: It is not a checkpoint, of another model, or of adapters.
        """
        self._keeper.finish()
        path, manifest = _open(path, run, None, False)
        _check_base(path, manifest["trained_on_top_of"], None)
        metadata = checkpoint_io.content_metadata()
        state = {f"model{index}": chunk.sharded_state_dict(metadata=metadata) for index, chunk in enumerate(chunks)}  # type: ignore[operator]
        loaded = checkpoint_io.load_sharded(path, state)
        for index, chunk in enumerate(chunks):
            chunk.load_state_dict(loaded[f"model{index}"])
        run_on_all_ranks(lambda: _check_finite(path, chunks))


def check_checkpoint(path: Path, trained_on_top_of: dict[str, Any] | None, *, training: bool, fall_back: bool) -> None:
    """Refuse a checkpoint that `CheckpointSaver.load` would refuse, as far as its manifest tells; a collective.

    Args:
        path: That the run starts from; the same on every rank.
        trained_on_top_of: See `Contents`.
        training: Whether its optimizer is needed.
        fall_back: Whether another one is taken if it is damaged or unfinished.

    Raises:
        FileNotFoundError: There is no such directory.
        ValueError: It is not a checkpoint, damaged, of other adapters, or holds weights only.
    """

    def check() -> None:
        try:
            manifest = read_manifest(path)
            check_files(path, manifest, verify=False)
        except DamagedCheckpointError:
            if fall_back:  # another one is taken
                return
            raise
        _check_base(path, manifest["trained_on_top_of"], trained_on_top_of)
        _check_optimizer(path, manifest, training)

    if fall_back and path.is_dir() and not is_checkpoint(path):
        return
    run_on_all_ranks(check)


def _open(path: Path, run: RunFacts, base: dict[str, Any] | None, with_optimizer: bool) -> tuple[Path, dict[str, Any]]:
    return checkpoint_io.open_checkpoint(
        path,
        verify=run.verify,
        fall_back=run.fall_back,
        suits=lambda saved: (
            saved.get("trained_on_top_of") == base
            and (saved.get("has_optimizer", False) or not with_optimizer)
            and (not with_optimizer or saved.get("run_id") in (None, run.run_id))
        ),
    )


def _load_generators(path: Path, manifest: dict[str, Any], run: RunFacts) -> dict[str, Any] | None:
    """Return the states of this rank's random-number generators, if the checkpoint is of the same layout."""
    if manifest["layout"] != asdict(run.layout) or manifest["world_size"] != run.world_size:
        saved = ParallelLayout(**manifest["layout"]).describe(manifest["world_size"])
        rank_zero_only(tell_loss)(
            f"checkpoint {path} was saved in another layout ({saved}; this run: {run.layout.describe(run.world_size)}):"
            " random-number states start anew from the seed."
        )
        return None
    return checkpoint_io.load_rng_state(path)


def _count_averages(path: Path, averages: Mapping[str, Average], saved: Mapping[str, int]) -> None:
    for name, average in averages.items():
        if name in saved:
            average.count = saved[name]
            continue
        average.restart()
        rank_zero_only(tell_loss)(f"checkpoint {path} has no average {name!r}: it starts from the weights loaded.")


def _weight_sums(chunks: Sequence[nn.Module]) -> list[float]:
    """A sum per parameter and buffer: enough to detect weights that were exchanged without a step."""
    from megatron.core.utils import unwrap_model

    tensors = (tensor for chunk in unwrap_model(list(chunks)) for tensor in (*chunk.parameters(), *chunk.buffers()))
    sums = [tensor.detach().sum(dtype=torch.float64) for tensor in tensors if tensor.is_floating_point()]
    return torch.stack([total.to(sums[0].device) for total in sums]).tolist()


def _trainable(chunk: nn.Module) -> set[str]:
    return {name for name, parameter in chunk.named_parameters() if parameter.requires_grad}


def _check_finite(path: Path, chunks: Iterable[nn.Module]) -> None:
    """Refuse weights with NaN or infinity, which a checkpoint brought."""
    bad = nonfinite_names(pair for chunk in chunks for pair in chain(chunk.named_parameters(), chunk.named_buffers()))
    if bad:
        raise ValueError(f"checkpoint {path}: {not_finite(bad)}")


def _check_optimizer(path: Path, manifest: Mapping[str, Any], training: bool) -> None:
    if training and not manifest["has_optimizer"]:
        raise ValueError(
            f"checkpoint {path} holds weights only (ModelCheckpoint(save_weights_only=True)), so training cannot resume"
            " from it. Save full checkpoints, or start a new run with these weights:"
            f" init_from={str(path)!r} of the module."
        )


def _check_base(path: Path, saved: dict[str, Any] | None, own: dict[str, Any] | None) -> None:
    """Refuse a checkpoint of adapters that were trained on another model, or that is not one of adapters at all."""
    if saved == own:
        return
    if saved is None:
        raise ValueError(
            f"checkpoint {path} holds a whole model, and this run trains adapters on the weights of its model"
            " directory: start it from an export of that run, or turn adapters off (train.lora: null)."
        )
    if own is None:
        raise ValueError(
            f"checkpoint {path} holds adapters only, and this run trains a whole model: set the adapters it was"
            f" trained with ({saved}), or start from a merged export."
        )
    differences = [
        f"{name}: {saved.get(name)} in the checkpoint, {own.get(name)} in this run"
        for name in sorted({*saved, *own})
        if saved.get(name) != own.get(name)
    ]
    raise ValueError(
        f"checkpoint {path} holds adapters that do not belong to this run: {'; '.join(differences)}. Resume with the"
        " model directory and the adapter settings that it was trained with."
    )
