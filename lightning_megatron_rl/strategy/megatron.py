"""`MegatronStrategy`: Megatron-core's parallelism, optimizer and checkpoints behind a plain Lightning `Trainer`."""

import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, TypeVar

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.fabric.utilities.seed import reset_seed
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import ClusterEnvironment
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
from lightning_utilities.core.rank_zero import rank_zero_only as utils_rank_zero_only
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import Optimizer

from lightning_megatron_rl.compat.adam import install_adam
from lightning_megatron_rl.compat.cpu import install_cpu_support
from lightning_megatron_rl.strategy import checkpoint as checkpoint_io
from lightning_megatron_rl.strategy.distributed import (
    ReplicaGroup,
    data_parallel_all_reduce,
    phase_deadline,
)
from lightning_megatron_rl.strategy.layout import ParallelLayout
from lightning_megatron_rl.strategy.optimizer import MegatronOptimizer, resolve_optimizer_config
from lightning_megatron_rl.strategy.precision import MegatronPrecision
from lightning_megatron_rl.strategy.schedule import ForwardStep, forward_backward

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

_DEFAULT_SEED = 1234
# its info lines are lists of every parameter, its warnings advice to Megatron's own developers
logging.getLogger("megatron").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module=r"megatron\.")
T = TypeVar("T")


class MegatronStrategy(ParallelStrategy):
    """Train a LightningModule whose `model` is an `nn.ModuleList` of Megatron model chunks.

    The module builds its chunks in `configure_model` (unwrapped, for this rank), makes its optimizer with
    `trainer.strategy.build_optimizer` and runs forward and backward with `trainer.strategy.forward_backward`; that call
    computes the gradients, and Lightning's own loop then takes the optimizer step, clips, schedules and counts.

    Args:
        tensor_model_parallel_size: Ways each weight matrix is split.
        pipeline_model_parallel_size: Number of pipeline stages.
        virtual_pipeline_model_parallel_size: Model chunks per pipeline stage (interleaved schedule).
        context_parallel_size: Ways each sequence is split.
        expert_model_parallel_size: Ways the experts of an MoE layer are distributed.
        expert_tensor_parallel_size: Ways each expert's matrices are split; None means as the dense layers.
        sequence_parallel: Split activations between tensor-parallel regions along the sequence.
        use_distributed_optimizer: Shard optimizer state and main parameters over the data-parallel ranks.
        ddp_config: Megatron's own `DistributedDataParallelConfig`, for everything else about gradient reduction.
        timeout_s: Seconds after which a collective fails, naming the phase it was in.
        cluster_environment: Lightning's cluster environment; found by itself for torchrun, SLURM and single machines.

    Raises:
        ValueError: Sizes that contradict each other or, when the run starts, do not divide the world size.

    Example:
        ``L.Trainer(strategy=MegatronStrategy(tensor_model_parallel_size=2), devices=4, accelerator="cpu")``
    """

    def __init__(
        self,
        tensor_model_parallel_size: int = 1,
        pipeline_model_parallel_size: int = 1,
        virtual_pipeline_model_parallel_size: int | None = None,
        context_parallel_size: int = 1,
        expert_model_parallel_size: int = 1,
        expert_tensor_parallel_size: int | None = None,
        sequence_parallel: bool = False,
        use_distributed_optimizer: bool = True,
        ddp_config: Optional["DistributedDataParallelConfig"] = None,
        timeout_s: float = 1800.0,
        cluster_environment: ClusterEnvironment | None = None,
    ) -> None:
        super().__init__(cluster_environment=cluster_environment)
        self.layout = ParallelLayout(
            tensor_model_parallel_size=tensor_model_parallel_size,
            pipeline_model_parallel_size=pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=virtual_pipeline_model_parallel_size,
            context_parallel_size=context_parallel_size,
            expert_model_parallel_size=expert_model_parallel_size,
            expert_tensor_parallel_size=expert_tensor_parallel_size,
            sequence_parallel=sequence_parallel,
        )
        if timeout_s <= 0:
            raise ValueError(f"timeout_s={timeout_s}: the process-group timeout is a positive number of seconds.")
        self.use_distributed_optimizer = use_distributed_optimizer
        self.ddp_config = ddp_config
        self.timeout_s = timeout_s
        self.num_nodes = 1
        self.replica: ReplicaGroup | None = None
        self.phase_name = "setup"

    # ---- what the Trainer asks -------------------------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """Lightning injects samplers and honours `sync_dist` only if a custom strategy says so."""
        return True

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Shards of the data: one per model replica, the same for all ranks of a replica."""
        from megatron.core import parallel_state

        return {
            "num_replicas": parallel_state.get_data_parallel_world_size(),
            "rank": parallel_state.get_data_parallel_rank(),
        }

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Weights are loaded into the wrapped model and its optimizer, which `setup` makes."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """`load_checkpoint` restores the optimizer together with the weights."""
        return False

    @property
    def precision_plugin(self) -> MegatronPrecision:
        """Dtypes and clipping, translated from the Trainer's `precision`."""
        assert isinstance(self._precision_plugin, MegatronPrecision)
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        # the base class sets None before the Trainer's own plugin arrives
        plugin = MegatronPrecision() if precision_plugin is None else MegatronPrecision.from_lightning(precision_plugin)
        self._precision_plugin = plugin

    # ---- start -----------------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def set_world_ranks(self) -> None:
        """Tell the cluster environment its ranks; called by the Trainer."""
        if self.cluster_environment is None:
            return
        self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = utils_rank_zero_only.rank = self.global_rank

    def setup_environment(self) -> None:
        """Check the run, then start process groups, Megatron's parallel state and its random-number trackers."""
        assert self.lightning_module is not None and self.cluster_environment is not None
        check_trainer(self.lightning_module.trainer)
        self.layout.data_parallel_size(self.world_size)
        super().setup_environment()
        self.set_world_ranks()
        reset_seed()
        install_cpu_support(self.root_device)
        install_adam(self.root_device)
        self._init_process_group()
        with self.phase("setup"):
            self.layout.initialize(self.timeout_s)
            self.replica = ReplicaGroup(self.timeout_s)
            self._seed_megatron()

    def _init_process_group(self) -> None:
        assert self.cluster_environment is not None
        on_cuda = self.root_device.type == "cuda"
        try:
            _init_dist_connection(
                self.cluster_environment,
                "nccl" if on_cuda else "gloo",
                timeout=timedelta(seconds=self.timeout_s),
                device_id=self.root_device if on_cuda else None,
            )
        except RuntimeError as error:
            address = f"{self.cluster_environment.main_address}:{self.cluster_environment.main_port}"
            if "EADDRINUSE" not in str(error) and "address already in use" not in str(error).lower():
                raise
            raise RuntimeError(
                f"the rendezvous port of this run is in use: {address}. Another run on this machine may hold it: unset"
                f" MASTER_PORT so that a free one is chosen, or set it to another port. Original error: {error}"
            ) from error

    def _seed_megatron(self) -> None:
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        seed = int(os.environ.get("PL_GLOBAL_SEED", _DEFAULT_SEED))
        # the tracker gives tensor- and pipeline-parallel ranks different streams on purpose
        model_parallel_cuda_manual_seed(seed, force_reset_rng=True)

    def setup(self, trainer: "pl.Trainer") -> None:
        """Wrap the module's chunks for training and make the optimizer."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        with self.phase("setup"):
            chunks = self.chunks
            for chunk in chunks:
                chunk.to(self.root_device)
            if trainer.state.fn == TrainerFn.FITTING:
                self._wrap_for_training()
                self._reset_optimizers_and_schedulers()
                self.setup_optimizers(trainer)
                self._check_optimizers()
        self.setup_precision_plugin()

    def model_to_device(self) -> None:
        """Move the chunks to this rank's device (done in `setup`)."""

    @property
    def chunks(self) -> nn.ModuleList:
        """This rank's model chunks, as the module built them or wrapped for training.

        Raises:
            TypeError: The module has no `model` of the right kind.
        """
        model = getattr(self.lightning_module, "model", None)
        if not isinstance(model, nn.ModuleList) or len(model) == 0:
            raise TypeError(
                f"{type(self.lightning_module).__name__}.model is {type(model).__name__}: MegatronStrategy trains an"
                " nn.ModuleList of Megatron model chunks, which `configure_model` must assign to `self.model`."
            )
        return model

    def _wrap_for_training(self) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.transformer.module import Float16Module
        from megatron.core.utils import get_model_config

        ddp_config = self.ddp_config or DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        # the optimizer's flag is set from the same attribute, so the two cannot disagree
        ddp_config.use_distributed_optimizer = self.use_distributed_optimizer
        assert self.lightning_module is not None
        wrapped = nn.ModuleList()
        for index, chunk in enumerate(self.chunks):
            if isinstance(chunk, DistributedDataParallel):
                wrapped.append(chunk)
                continue
            config = get_model_config(chunk)
            if self.precision_plugin.is_mixed and not isinstance(chunk, Float16Module):
                chunk = Float16Module(config, chunk)
            ddp = DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
            ddp.broadcast_params()
            wrapped.append(ddp)
        self.lightning_module.model = wrapped

    def build_optimizer(self, config: "OptimizerConfig") -> MegatronOptimizer:
        """Make Megatron's optimizer for the module's chunks; call it in `configure_optimizers`.

        Args:
            config: Megatron's own `OptimizerConfig`; dtypes, sharding and clipping are filled in from the Trainer.

        Raises:
            ValueError: No learning rate, or clipping set in two places.

        Example:
            ``return self.trainer.strategy.build_optimizer(OptimizerConfig(lr=1e-6, weight_decay=0.0))``
        """
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.optimizer import get_megatron_optimizer
        from megatron.core.utils import get_model_config

        assert self.lightning_module is not None
        resolved = resolve_optimizer_config(
            config,
            params_dtype=self.precision_plugin.params_dtype,
            use_distributed_optimizer=self.use_distributed_optimizer,
            gradient_clip_val=self.lightning_module.trainer.gradient_clip_val,
        )
        chunks = list(self.chunks)
        optimizer = get_megatron_optimizer(resolved, chunks)
        for chunk in chunks:
            chunk_config = get_model_config(chunk)
            chunk_config.finalize_model_grads_func = finalize_model_grads
            chunk_config.grad_scale_func = optimizer.scale_loss
        return MegatronOptimizer(optimizer)

    def _check_optimizers(self) -> None:
        if len(self.optimizers) != 1 or not isinstance(self.optimizers[0], MegatronOptimizer):
            names = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers) or "none"
            raise TypeError(
                f"configure_optimizers returned {names}: MegatronStrategy needs exactly one optimizer, made with"
                " `self.trainer.strategy.build_optimizer(OptimizerConfig(lr=...))`."
            )

    # ---- step ------------------------------------------------------------------------------------------------------

    def forward_backward(
        self,
        microbatches: Sequence[Any],
        forward_step: ForwardStep,
        *,
        sequence_length: int,
        micro_batch_size: int = 1,
        forward_only: bool = False,
        chunks: Sequence[nn.Module] | None = None,
    ) -> list[Any]:
        """Run Megatron's schedule over all micro-batches of a mini-batch; see `schedule.forward_backward`.

        Args:
            microbatches: All micro-batches of this rank.
            forward_step: ``(chunk, microbatch) -> (output, loss_function)``.
            sequence_length: Longest sequence length of a micro-batch.
            micro_batch_size: Sequences per micro-batch (1 when packed).
            forward_only: No gradients.
            chunks: Other chunks than the module's own, e.g. a frozen reference policy.
        """
        with torch.set_grad_enabled(not forward_only):
            return forward_backward(
                list(self.chunks) if chunks is None else list(chunks),
                microbatches,
                forward_step,
                sequence_length=sequence_length,
                micro_batch_size=micro_batch_size,
                forward_only=forward_only,
            )

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Fire Lightning's backward hooks; gradients are there already unless the loss carries a graph."""
        if closure_loss.requires_grad:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        self.pre_backward(closure_loss)
        assert self.lightning_module is not None
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        return closure_loss

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what runs inside, for the error of a collective that times out or loses its peer."""
        outer, self.phase_name = self.phase_name, name
        try:
            with phase_deadline(name, self.timeout_s):
                yield
        finally:
            self.phase_name = outer

    # ---- collectives -----------------------------------------------------------------------------------------------

    def data_parallel_all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce in place over the model replicas; `op` is "sum" or "max"."""
        return data_parallel_all_reduce(tensor, op)

    def union(self, names: Sequence[str]) -> list[str]:
        """Return the sorted names of all ranks."""
        everywhere: list[Sequence[str]] = [()] * self.world_size
        dist.all_gather_object(everywhere, list(names))
        return sorted({name for rank in everywhere for name in rank})

    def broadcast_from_last_stage(self, obj: T) -> T:
        """Return the object of this replica's last pipeline stage on every rank of the replica."""
        assert self.replica is not None
        # Megatron orders ranks with the pipeline outermost: the last rank is of the last stage
        return self.replica.broadcast_object(obj, source=self.replica.ranks[-1])

    def barrier(self, name: str | None = None) -> None:
        """Wait for every rank."""
        if not dist.is_initialized():
            return
        if self.root_device.type == "cuda":
            dist.barrier(device_ids=[self.root_device.index])
        else:
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank `src` on every rank."""
        if not dist.is_initialized():
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    def reduce(self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any = "mean") -> Tensor | Any:
        """Reduce a tensor over all ranks ("mean" or "sum"); anything else is returned as it is."""
        if not isinstance(tensor, Tensor) or not dist.is_initialized():
            return tensor
        tensor = tensor.clone()
        is_mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
        op = dist.ReduceOp.SUM if is_mean or isinstance(reduce_op, str) else reduce_op
        dist.all_reduce(tensor, op=op, group=group)
        return tensor / dist.get_world_size(group) if is_mean else tensor

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def _model_state(self) -> dict[str, Any]:
        from megatron.core.utils import unwrap_model

        metadata = checkpoint_io.content_metadata()
        chunks = unwrap_model(list(self.chunks))
        return {f"model{index}": chunk.sharded_state_dict(metadata=metadata) for index, chunk in enumerate(chunks)}

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return sharded weights per chunk, and whatever the module holds outside `model`."""
        assert self.lightning_module is not None
        other = {key: value for key, value in _state_outside_model(self.lightning_module).items()}
        return {**self._model_state(), "other": other}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state as sharded tensors."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        assert isinstance(optimizer, MegatronOptimizer)
        return self._optimizer_state(optimizer, self._model_state(), is_loading=False)

    def _optimizer_state(self, optimizer: MegatronOptimizer, model: dict[str, Any], is_loading: bool) -> dict[str, Any]:
        metadata = checkpoint_io.content_metadata()
        model_state = model["model0"] if len(model) == 1 else model
        return optimizer.sharded_state_dict(model_state, metadata, is_loading)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        """Write Lightning's checkpoint dictionary as a directory, by all ranks; see `strategy.checkpoint`."""
        if storage_options is not None:
            raise ValueError(
                f"storage_options={storage_options!r}: distributed checkpoints are written to a local or shared file"
                " system and take no storage options."
            )
        with self.phase("checkpoint save"):
            path = Path(self.broadcast(str(filepath)))
            state = checkpoint.pop("state_dict")
            sharded = {key: value for key, value in state.items() if key != "other"}
            for index, optimizer_state in enumerate(checkpoint.pop("optimizer_states", [])):
                sharded[f"optimizer{index}"] = optimizer_state
            has_optimizer = any(key.startswith("optimizer") for key in sharded)
            layout = {
                "layout": asdict(self.layout),
                "world_size": self.world_size,
                "global_step": checkpoint.get("global_step", 0),
                "has_optimizer": has_optimizer,
            }
            checkpoint_io.save(path, sharded, {**checkpoint, "state_dict": state["other"]}, layout)

    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """Load weights, optimizer and random-number states from a checkpoint of any layout.

        Raises:
            FileNotFoundError: There is no such directory.
            ValueError: It is not a checkpoint, of another model, or holds objects that are not plain data.
        """
        assert self.lightning_module is not None
        with self.phase("checkpoint load"):
            path = Path(self.broadcast(str(checkpoint_path)))
            layout = checkpoint_io.read_layout(path)
            sharded: dict[str, Any] = self._model_state()
            if self.optimizers and not layout["has_optimizer"]:
                raise ValueError(
                    f"checkpoint {path} holds weights only (ModelCheckpoint(save_weights_only=True)), so training cannot"
                    " resume from it. Start a new run from a Hugging Face export, or save full checkpoints."
                )
            for index, optimizer in enumerate(self.optimizers):
                assert isinstance(optimizer, MegatronOptimizer)
                sharded[f"optimizer{index}"] = self._optimizer_state(optimizer, dict(sharded), is_loading=True)
            loaded = checkpoint_io.load_sharded(path, sharded)
            self._load_weights(loaded)
            for index, optimizer in enumerate(self.optimizers):
                optimizer.load_sharded_state(loaded[f"optimizer{index}"])  # type: ignore[attr-defined]
            if self.optimizers and not self._restore_rng(path, layout):
                rank_zero_warn(
                    f"checkpoint {path} was saved in another layout ({layout['layout']}, world size"
                    f" {layout['world_size']}): random-number states start anew from the seed."
                )
            return checkpoint_io.load_trainer_state(path, weights_only=weights_only is not False)

    def _restore_rng(self, path: Path, layout: dict[str, Any]) -> bool:
        if layout["layout"] != asdict(self.layout) or layout["world_size"] != self.world_size:
            return False
        return checkpoint_io.restore_rng_state(path)

    def _load_weights(self, loaded: dict[str, Any]) -> None:
        from megatron.core.utils import unwrap_model

        for index, chunk in enumerate(unwrap_model(list(self.chunks))):
            chunk.load_state_dict(loaded[f"model{index}"])

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load what the module holds outside `model`; `load_checkpoint` has loaded the rest."""
        assert self.lightning_module is not None
        if checkpoint["state_dict"]:
            self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=False)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: `load_checkpoint` has restored the optimizer."""

    def remove_checkpoint(self, filepath: _PATH) -> None:
        """Delete a checkpoint directory (rank 0)."""
        if self.is_global_zero:
            checkpoint_io.remove(Path(filepath))

    def teardown(self) -> None:
        """End the run but keep model and process groups: a `validate` or a second `fit` may follow."""
        assert self.cluster_environment is not None and self.accelerator is not None
        # not super().teardown(): it moves the model and the optimizer state to the CPU
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()


def check_trainer(trainer: "pl.Trainer") -> None:
    """Refuse Trainer settings that would change numbers or cannot work with Megatron's schedule.

    Raises:
        ValueError: Naming the setting, its value and what to use in its place.
    """
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches}: one batch is one mini-batch here, and Megatron's"
            " schedule accumulates over its micro-batches. Set accumulate_grad_batches=1, raise the data module's"
            " batch_size for a larger mini-batch, and lower max_tokens_per_microbatch to save memory."
        )
    module = trainer.lightning_module
    if not module.automatic_optimization:
        raise ValueError(
            f"{type(module).__name__}.automatic_optimization=False: under manual optimisation Lightning neither clips"
            " gradients nor steps learning-rate schedulers, and counts steps differently. Keep automatic optimisation;"
            " for several updates per batch call self.optimizers().step() for all but the last."
        )


def _state_outside_model(module: "pl.LightningModule") -> dict[str, Any]:
    state = {}
    for name, child in module.named_children():
        if name != "model":
            state.update({f"{name}.{key}": value for key, value in child.state_dict().items()})
    state.update({name: parameter for name, parameter in module.named_parameters(recurse=False)})
    if state:
        warnings.warn(
            f"{type(module).__name__} holds tensors outside `model` ({', '.join(list(state)[:3])}): they are saved, but"
            " MegatronStrategy does not train them.",
            stacklevel=2,
        )
    return state
