"""The checkpoint half of the strategy: Lightning's checkpoint hooks answered with distributed checkpoints."""

import warnings
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import nn
from torch.optim import Optimizer

from lightning_megatron_rl.checkpoints import format as checkpoint_io
from lightning_megatron_rl.checkpoints.manifest import DamagedCheckpointError, check_files, is_checkpoint, read_manifest
from lightning_megatron_rl.checkpoints.optimizer_state import OptimizerState
from lightning_megatron_rl.checkpoints.resuming import run_arguments
from lightning_megatron_rl.parallel.distributed import run_on_all_ranks
from lightning_megatron_rl.parallel.layout import ParallelLayout
from lightning_megatron_rl.strategy.averaging import AveragedWeights
from lightning_megatron_rl.strategy.keeping import KeepsCheckpoints
from lightning_megatron_rl.strategy.optimizer import MegatronOptimizer
from lightning_megatron_rl.strategy.wrapping import gather_parameters
from lightning_megatron_rl.utilities.files import check_local
from lightning_megatron_rl.utilities.finite import nonfinite_names, not_finite
from lightning_megatron_rl.utilities.notices import tell_loss
from lightning_megatron_rl.utilities.text_files import user_path

_OPTIMIZER = "optimizer"  # in Lightning's dictionary its state is still to be taken from this


@dataclass(frozen=True)
class SavedMoment:
    """What was saved last in this fit, and the weights it holds."""

    path: Path
    has_optimizer: bool
    sums: list[float]  # of this rank's parameters and buffers


class DistributedCheckpointStrategy(KeepsCheckpoints):
    """Saves and loads weights, optimizer and random-number states as directories, in any layout; see `checkpoint`."""

    layout: ParallelLayout
    use_distributed_optimizer: bool
    verify_checkpoints: bool = True
    fall_back_to_previous: bool = False
    _is_set_up = False  # whether there is a model to save
    _saved: SavedMoment | None = None
    _resumed_from: tuple[Path, dict[str, Any]] | None = None  # the checkpoint that this fit goes on from, its manifest
    trained_on_top_of: dict[str, Any] | None = None
    """Set by a module that trains parameters added to a model which it loads by itself (adapters): what it loads and
    adds, as plain data. Checkpoints then hold the trainable parameters only, with this description, and a run with
    another one refuses them."""

    saved_with_model: Mapping[str, Sequence[nn.Module]] = MappingProxyType({})
    """Set by a module that keeps other models which change while it trains (a refreshed reference): their chunks by a
    name. Checkpoints hold their weights too, and a run that has them needs them in the checkpoint."""

    optimizers_saved_with_model: Mapping[str, MegatronOptimizer] = MappingProxyType({})
    """The optimizers of those that are trained (a critic), by the same names."""

    saved_beside: Mapping[str, bytes] = MappingProxyType({})
    """Set by a module whose checkpoints are to be understood without it: small files, by their path in a checkpoint."""

    @property
    @abstractmethod
    def chunks(self) -> nn.ModuleList:
        """This rank's model chunks."""

    def gather_parameters(self) -> None:
        """Let every replica see all of the last step's parameters: a collective, needed under `overlap_param_gather`.

        Forward passes, checkpoints and the module's exports do it themselves.
        """
        gather_parameters(list(self.chunks))

    def _model_state(self) -> dict[str, Any]:
        from megatron.core.utils import unwrap_model

        metadata = checkpoint_io.content_metadata()
        state = {}
        for index, chunk in enumerate(unwrap_model(list(self.chunks))):
            state[f"model{index}"] = chunk.sharded_state_dict(metadata=metadata)
            if self.trained_on_top_of is not None:
                state[f"model{index}"] = {name: state[f"model{index}"][name] for name in _trainable(chunk)}
        return state

    def _other_models_state(self) -> dict[str, Any]:
        from megatron.core.utils import unwrap_model

        state = {}
        for name, chunks in self.saved_with_model.items():
            metadata = checkpoint_io.content_metadata()
            gather_parameters(chunks)
            for index, chunk in enumerate(unwrap_model(list(chunks))):
                state[f"{name}{index}"] = chunk.sharded_state_dict(prefix=f"{name}.", metadata=metadata)
        return state

    def _optimizer_states(
        self,
        optimizers: Sequence[Optimizer],
        models: Mapping[str, Any],
        *,
        is_loading: bool,
        averages: Mapping[str, int] | None = None,
    ) -> dict[str, tuple[MegatronOptimizer, OptimizerState]]:
        """The state of each optimizer, and of `optimizers_saved_with_model`, by its name in the checkpoint.

        Args:
            optimizers: Of the module's own model, if they are saved at all.
            models: Sharded state dicts of all models.
            is_loading: Whether they are to be loaded.
            averages: Names of the averages that are to be loaded.
        """
        if not optimizers:
            return {}
        named = {f"optimizer{index}": optimizer for index, optimizer in enumerate(optimizers)}
        named.update({f"optimizer_{name}": other for name, other in self.optimizers_saved_with_model.items()})
        found = {}
        for name, optimizer in named.items():
            assert isinstance(optimizer, MegatronOptimizer)
            found[name] = optimizer, optimizer.state_of(dict(models), is_loading=is_loading, averages=averages)
        return found

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return sharded weights per chunk, and whatever the module holds outside `model`."""
        assert self.lightning_module is not None
        if not self._is_set_up:
            return {}
        self.gather_parameters()
        other = dict(_state_outside_model(self.lightning_module).items())
        return {**self._model_state(), **self._other_models_state(), "other": other}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer itself: `save_checkpoint` takes its state, if that is not saved already."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        return {_OPTIMIZER: optimizer}

    def start_keeping(self, trainer: "pl.Trainer") -> None:
        """Get ready for a fit, whose optimizer is a new one."""
        self._saved, self._resumed_from = None, None
        super().start_keeping(trainer)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Take a step; what was saved before is of another moment."""
        self._saved = None
        return super().optimizer_step(*args, **kwargs)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        """Write Lightning's checkpoint dictionary as a directory, by all ranks; see `strategy.checkpoint`."""
        if storage_options is not None:
            raise ValueError(
                f"storage_options={storage_options!r}: distributed checkpoints are written to a local or shared file"
                " system and take no storage options."
            )
        if not self._is_set_up:  # asked for by a callback that answers the error which has ended the run
            rank_zero_only(tell_loss)(
                f"no checkpoint {filepath} was written: the run ended before its model was there."
            )
            return
        check_local(filepath, "checkpoint")
        with self.phase("checkpoint save"):
            path = Path(self.broadcast(str(filepath)))
            step, has_optimizer = checkpoint.get("global_step", 0), bool(checkpoint.get("optimizer_states"))
            if self.links(path, step, has_optimizer):
                return
            state = checkpoint.pop("state_dict")
            optimizers = [saved[_OPTIMIZER] for saved in checkpoint.pop("optimizer_states", [])]
            moment = SavedMoment(path, has_optimizer, self._weight_sums())
            sharded: dict[str, Any] = {key: value for key, value in state.items() if key != "other"}
            source = self._already_saved(moment)
            if source is None:
                self.finish_saving()
                found = self._optimizer_states(optimizers, sharded, is_loading=False)
                sharded.update({name: optimizer_state.sharded() for name, (_, optimizer_state) in found.items()})
            description = {
                "layout": asdict(self.layout),
                "world_size": self.world_size,
                "run_id": self.run_id,
                "global_step": step,
                "has_optimizer": has_optimizer,
                "use_distributed_optimizer": self.use_distributed_optimizer,
                "trained_on_top_of": self.trained_on_top_of,
                "averages": {name: average.count for name, average in self.averages.items()} if optimizers else {},
            }
            trainer_state = {**checkpoint, "state_dict": state["other"]}
            content = sharded if source is None else source
            pending = checkpoint_io.PendingCheckpoint(
                path, content, trainer_state, description, later=self.saves_later, beside=self.saved_beside
            )
            self.keep(pending)
            self._saved = moment if self.is_fitting else None

    def _weight_sums(self) -> list[float]:
        """A sum per parameter and buffer: enough to see that weights were exchanged without a step."""
        from megatron.core.utils import unwrap_model

        others = [chunk for chunks in self.saved_with_model.values() for chunk in chunks]
        chunks = unwrap_model([*self.chunks, *others])
        tensors = (tensor for chunk in chunks for tensor in (*chunk.parameters(), *chunk.buffers()))
        sums = [tensor.detach().sum(dtype=torch.float64) for tensor in tensors if tensor.is_floating_point()]
        return torch.stack([total.to(self.root_device) for total in sums]).tolist()

    def _already_saved(self, moment: SavedMoment) -> Path | None:
        """Return the path of a checkpoint of this moment, such as the best one when the last one is saved."""
        saved = self._saved
        same = saved is not None and saved.has_optimizer == moment.has_optimizer and saved.sums == moment.sums
        same = bool(self.reduce_boolean_decision(same)) and self.is_fitting
        return saved.path if same and saved is not None else None

    def remove_checkpoint(self, filepath: _PATH) -> None:
        """Delete a checkpoint directory (rank 0), when what was saved before this call is complete."""
        if self._saved is not None and self._saved.path == Path(filepath):
            self._saved = None
        super().remove_checkpoint(filepath)

    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """Load weights, optimizer and random-number states from a checkpoint of any layout.

        `weights_only` is that of `trainer.fit`, `validate` and so on, which Lightning does not pass on to here.

        Raises:
            FileNotFoundError: There is no such directory.
            ValueError: It is not a checkpoint, damaged, of another model or other adapters, or holds objects that are
                not plain data.
        """
        assert self.lightning_module is not None
        if weights_only is None:
            weights_only = (run_arguments(self.lightning_module.trainer) or {}).get("weights_only")
        check_local(checkpoint_path, "ckpt_path")
        with self.phase("checkpoint load"):
            self.finish_saving()
            self._saved = None
            given = user_path(self.broadcast(str(checkpoint_path)))
            path, layout = self._open_checkpoint(given, self.trained_on_top_of, bool(self.optimizers))
            _check_base(path, layout["trained_on_top_of"], self.trained_on_top_of)
            sharded: dict[str, Any] = self._model_state()
            _check_optimizer(path, layout, bool(self.optimizers))
            trainer_state = checkpoint_io.load_trainer_state(path, weights_only=weights_only is not False)
            generators = self._load_generators(path, layout) if self.optimizers else None
            sharded.update(self._other_models_state())
            averages = layout.get("averages", {})  # not in checkpoints of older versions
            optimizers = self._optimizer_states(self.optimizers, sharded, is_loading=True, averages=averages)
            sharded.update({name: optimizer_state.sharded() for name, (_, optimizer_state) in optimizers.items()})
            loaded = checkpoint_io.load_sharded(path, sharded)
            self._load_weights(loaded)
            held = [*self.chunks, *(chunk for chunks in self.saved_with_model.values() for chunk in chunks)]
            run_on_all_ranks(lambda: _check_finite(path, held))
            for name, (optimizer, optimizer_state) in optimizers.items():
                optimizer.load_state(optimizer_state, loaded[name])
            self._count_averages(path, averages)
            if generators is not None:
                checkpoint_io.set_rng_state(generators)
            if self.optimizers:
                self._resumed_from = path.resolve(), layout
            return trainer_state

    @property
    def averages(self) -> dict[str, AveragedWeights]:
        """Averages of the module's weights that this fit keeps, by name."""
        return {
            name: average
            for optimizer in self.optimizers
            if isinstance(optimizer, MegatronOptimizer)
            for name, average in optimizer.averages.items()
        }

    def _count_averages(self, path: Path, saved: Mapping[str, int]) -> None:
        for name, average in self.averages.items():
            if name in saved:
                average.count = saved[name]
                continue
            average.restart()
            rank_zero_only(tell_loss)(f"checkpoint {path} has no average {name!r}: it starts from the weights loaded.")

    def check_checkpoint(self, path: Path, *, training: bool) -> None:
        """Refuse a checkpoint that `load_checkpoint` would refuse, as far as its manifest tells; a collective.

        Args:
            path: That the run starts from.
            training: Whether its optimizer is needed.

        Raises:
            FileNotFoundError: There is no such directory.
            ValueError: It is not a checkpoint, damaged, of other adapters, or holds weights only.
        """
        path = user_path(self.broadcast(str(path)))

        def check() -> None:
            try:
                manifest = read_manifest(path)
                check_files(path, manifest, verify=False)
            except DamagedCheckpointError:
                if self.fall_back_to_previous:  # another one is taken
                    return
                raise
            _check_base(path, manifest["trained_on_top_of"], self.trained_on_top_of)
            _check_optimizer(path, manifest, training)

        if self.fall_back_to_previous and path.is_dir() and not is_checkpoint(path):
            return
        run_on_all_ranks(check)

    def load_weights(self, path: Path, chunks: Sequence[nn.Module]) -> None:
        """Give freshly built chunks the weights of a checkpoint of any layout, and nothing else of it; a collective.

        Raises:
            FileNotFoundError: There is no such directory.
            ValueError: It is not a checkpoint, of another model, or of adapters.
        """
        with self.phase("checkpoint load"):
            self.finish_saving()
            path, layout = self._open_checkpoint(path, None, False)
            _check_base(path, layout["trained_on_top_of"], None)
            metadata = checkpoint_io.content_metadata()
            state = {f"model{index}": chunk.sharded_state_dict(metadata=metadata) for index, chunk in enumerate(chunks)}  # type: ignore[operator]
            loaded = checkpoint_io.load_sharded(path, state)
            for index, chunk in enumerate(chunks):
                chunk.load_state_dict(loaded[f"model{index}"])
            run_on_all_ranks(lambda: _check_finite(path, chunks))

    def _open_checkpoint(
        self, path: Path, base: dict[str, Any] | None, with_optimizer: bool
    ) -> tuple[Path, dict[str, Any]]:
        return checkpoint_io.open_checkpoint(
            path,
            verify=self.verify_checkpoints,
            fall_back=self.fall_back_to_previous,
            suits=lambda saved: (
                saved.get("trained_on_top_of") == base
                and (saved.get("has_optimizer", False) or not with_optimizer)
                and (not with_optimizer or saved.get("run_id") in (None, self.run_id))
            ),
        )

    def _load_generators(self, path: Path, layout: dict[str, Any]) -> dict[str, Any] | None:
        """Return the states of this rank's random-number generators, if the checkpoint is of the same layout."""
        if layout["layout"] != asdict(self.layout) or layout["world_size"] != self.world_size:
            rank_zero_only(tell_loss)(
                f"checkpoint {path} was saved in another layout ({layout['layout']}, world size"
                f" {layout['world_size']}): random-number states start anew from the seed."
            )
            return None
        return checkpoint_io.load_rng_state(path)

    def _load_weights(self, loaded: dict[str, Any]) -> None:
        from megatron.core.utils import unwrap_model

        for index, chunk in enumerate(unwrap_model(list(self.chunks))):
            state = loaded[f"model{index}"]
            if self.trained_on_top_of is None:
                found = chunk.load_state_dict(state, strict=False)
                lacking = [name for name in found.missing_keys if not name.endswith(checkpoint_io.EXTRA_STATE)]
                assert not lacking, lacking
                assert not found.unexpected_keys, found.unexpected_keys
                continue
            result = chunk.load_state_dict(state, strict=False)  # frozen weights are there already
            assert state.keys() == _trainable(chunk)
            assert not result.unexpected_keys

        for name, chunks in self.saved_with_model.items():
            for index, chunk in enumerate(unwrap_model(list(chunks))):
                state = loaded[f"{name}{index}"]
                chunk.load_state_dict({key.removeprefix(f"{name}."): value for key, value in state.items()})

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load what the module holds outside `model`; `load_checkpoint` has loaded the rest.

        Raises:
            ValueError: Names what the checkpoint lacks, has too many, or has in another shape; with `strict` off
                (`LightningModule.strict_loading`) only the last.
        """
        assert self.lightning_module is not None
        _load_outside_model(self.lightning_module, checkpoint["state_dict"], strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: `load_checkpoint` has restored the optimizer."""


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


def _state_outside_model(module: "pl.LightningModule") -> dict[str, Any]:
    """The module's own parameters and persistent buffers, and the state of its submodules other than `model`."""
    state: dict[str, Any] = {}
    module._save_to_state_dict(state, "", keep_vars=False)  # torch's hook for a module without its submodules
    untrained = [name for name, parameter in module.named_parameters(recurse=False) if parameter.requires_grad]
    for name, child in module.named_children():
        if name != "model":
            state.update(child.state_dict(prefix=f"{name}."))
            untrained += [f"{name}.{key}" for key, value in child.named_parameters() if value.requires_grad]
    if untrained:
        warnings.warn(
            f"{type(module).__name__} holds parameters outside `model` ({', '.join(untrained[:3])}): they are saved,"
            " but MegatronStrategy does not train them.",
            stacklevel=2,
        )
    return state


def _load_outside_model(module: "pl.LightningModule", saved: Mapping[str, Any], strict: bool) -> None:
    own = _state_outside_model(module)
    missing = sorted(own.keys() - saved.keys()) if strict else []
    extra = sorted(saved.keys() - own.keys()) if strict else []
    shapes = [
        f"{name} {_shape(saved[name])} != {_shape(own[name])}"
        for name in sorted(own.keys() & saved.keys())
        if _shape(saved[name]) != _shape(own[name])
    ]
    if missing or extra or shapes:
        found = {"not in the checkpoint": missing, "not in the module": extra, "of another shape": shapes}
        named = "; ".join(f"{what}: {', '.join(names)}" for what, names in found.items() if names)
        raise ValueError(
            f"what {type(module).__name__} holds outside `model` is not what the checkpoint holds: {named} (checkpoint"
            " != module). Register the same parameters, buffers and submodules, change them in on_load_checkpoint, or"
            " set strict_loading=False on the module to load what fits by name."
        )
    module.load_state_dict({name: value for name, value in saved.items() if name in own}, strict=False)


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None
