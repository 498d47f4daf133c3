"""`MegatronStrategy`: Megatron-core's parallelism, optimizer and checkpoints behind a plain Lightning `Trainer`."""

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Optional

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as utils_rank_zero_only
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron_rl.checkpoints.keeping import check_directories
from lightning_megatron_rl.checkpoints.resuming import resumes
from lightning_megatron_rl.parallel import collectives
from lightning_megatron_rl.parallel.collectives import gather_parameters
from lightning_megatron_rl.parallel.distributed import (
    ReplicaGroup,
    data_parallel_all_reduce,
    data_parallel_rank,
    phase_deadline,
)
from lightning_megatron_rl.parallel.launching import RankLauncher
from lightning_megatron_rl.parallel.layout import ParallelLayout
from lightning_megatron_rl.parallel.nodes import NodeSettings
from lightning_megatron_rl.strategy import checks
from lightning_megatron_rl.strategy.averaging import AveragedWeights
from lightning_megatron_rl.strategy.checkpointing import RunCheckpoints
from lightning_megatron_rl.strategy.guarding import answer_nonfinite, bare, gradients_of, show_gradients
from lightning_megatron_rl.strategy.joining import check_ranks, join_run, rest, show_hosts, watch
from lightning_megatron_rl.strategy.log_directories import LogDirectories
from lightning_megatron_rl.strategy.megatron_configs import resolve_ddp_config, resolve_optimizer_config
from lightning_megatron_rl.strategy.nonfinite import OnNonfinite
from lightning_megatron_rl.strategy.offload import OffloadedState, OffloadPart, OffloadReport, check_parts
from lightning_megatron_rl.strategy.optimizer import MegatronOptimizer
from lightning_megatron_rl.strategy.precision import MegatronPrecision
from lightning_megatron_rl.strategy.products import choose_products
from lightning_megatron_rl.strategy.run_log import log_settings, seed_megatron
from lightning_megatron_rl.strategy.schedule import ForwardStep, GradientSum, forward_backward
from lightning_megatron_rl.strategy.stopping import RunStop, give_exit_code, was_interrupted
from lightning_megatron_rl.strategy.wrapping import make_optimizer, wrap_for_training
from lightning_megatron_rl.utilities.cpus import share_cpus, trainer_threads
from lightning_megatron_rl.utilities.garbage import LongLived
from lightning_megatron_rl.utilities.kinds import check_kinds
from lightning_megatron_rl.utilities.notices import forget
from lightning_megatron_rl.utilities.ranges import POSITIVE, check_ranges, check_words
from lightning_megatron_rl.utilities.spans import SpanLog

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

# its info lines are lists of every parameter, its warnings advice to Megatron's own developers
logging.getLogger("megatron").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module=r"megatron\.")


@StrategyRegistry.register("megatron", description="Megatron-core: tensor, pipeline and data parallelism")
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
        offload_while_sampling: What is moved to the host's memory while a sampler works: "optimizer", "gradients"
            (dropped: none is needed then) and "parameters"; nothing if not given.
        on_nonfinite: What a step with a non-finite loss or gradient does: "stop" ends the run and keeps the batch and
            the weights, "skip" skips the step, warns and counts it.
        save_on_interrupt: Whether Ctrl-C stops the run after the batch, with a checkpoint, as SIGTERM does.
        async_save: Write checkpoints while training goes on, from a copy in the host's memory. The next save, the end
            of the run and whatever loads a checkpoint wait for it.
        verify_checkpoints: Compare the checksum of each file of a checkpoint before loading it.
        fall_back_to_previous: Load the previous checkpoint beside it, with a warning, if one is damaged or unfinished.
        timeout_s: Seconds after which a collective fails, naming the phase it was in.
        nodes: How the ranks of several hosts meet, and what is allowed there; see `NodeSettings`.
        cluster_environment: Lightning's cluster environment; found by itself for torchrun, SLURM and single machines.

    Raises:
        ValueError: Sizes that contradict each other or, when the run starts, do not divide the world size.
    """

    is_distributed = True  # Lightning injects samplers and honours `sync_dist` only if a custom strategy says so
    restore_checkpoint_after_setup = True  # into the wrapped model and its optimizer, which `setup` makes
    lightning_restore_optimizer = False  # `load_checkpoint` restores it together with the weights

    trained_on_top_of: dict[str, Any] | None = None
    """Set by a module that trains adapters: the model that it loads by itself and what it adds, as plain data.
    Checkpoints then hold the trainable parameters only, and a run with another description refuses them."""

    saved_with_model: Mapping[str, Sequence[nn.Module]] = MappingProxyType({})
    """Set by a module that keeps other models which change while it trains: their chunks by a name, for checkpoints."""

    optimizers_saved_with_model: Mapping[str, MegatronOptimizer] = MappingProxyType({})
    """The optimizers of those that are trained (a critic), by the same names."""

    saved_beside: Mapping[str, bytes] = MappingProxyType({})
    """Set by a module: small files, by their path in a checkpoint."""

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
        offload_while_sampling: list[OffloadPart] | None = None,
        on_nonfinite: OnNonfinite = "stop",
        save_on_interrupt: bool = False,
        async_save: bool = True,
        verify_checkpoints: bool = True,
        fall_back_to_previous: bool = False,
        timeout_s: float = 1800.0,
        nodes: NodeSettings | None = None,
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
        check_kinds({"nodes": NodeSettings}, locals(), "MegatronStrategy")
        check_ranges({"timeout_s": POSITIVE.called("seconds after which a collective fails")}, locals())
        check_words({"on_nonfinite": OnNonfinite}, locals())
        self.use_distributed_optimizer = use_distributed_optimizer
        self.ddp_config = ddp_config
        self.timeout_s = timeout_s
        self.nodes = nodes or NodeSettings()
        self.offloads = check_parts(offload_while_sampling)
        self.on_nonfinite = on_nonfinite
        self.save_on_interrupt, self.async_save = save_on_interrupt, async_save
        self.verify_checkpoints = verify_checkpoints
        self.fall_back_to_previous = fall_back_to_previous
        self.num_nodes = 1
        self.replica: ReplicaGroup | None = None  # this rank's, once there are groups
        self.memory = OffloadedState(self.offloads)
        self.spans = SpanLog()  # of this rank's phases
        self.update_loss: Tensor | None = None  # of the last update, which training_step has to return
        self.checkpoints = RunCheckpoints(self)
        self._stop: RunStop | None = None  # of a fit
        self._long_lived = LongLived()
        self._logs = LogDirectories()
        self._cpu_share: int | None = None  # CPUs of this rank; None: the user says how many threads there are

    # ---- what the Trainer asks -------------------------------------------------------------------------------------

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
        return {"num_replicas": self.layout.data_parallel_size(self.world_size), "rank": data_parallel_rank()}

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Lightning's default, which is never asked: checkpoints are this strategy's own."""
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        checks.refuse_checkpoint_io(io)

    @property
    def precision_plugin(self) -> MegatronPrecision:
        """Dtypes and clipping, translated from the Trainer's `precision`."""
        plugin = self._precision_plugin
        return plugin if isinstance(plugin, MegatronPrecision) else MegatronPrecision()

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        # None, from the base class, must stay None: the Trainer takes a plugin that is there already for the user's own
        # choice, and then ignores its `precision` argument
        plugin = None if precision_plugin is None else MegatronPrecision.from_lightning(precision_plugin)
        self._precision_plugin = plugin

    # ---- start -----------------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        size = self.num_processes * self.num_nodes
        starts_others = size > 1 and not self.cluster_environment.creates_processes_externally
        if starts_others:  # one device is this process itself
            checks.refuse_interactive(size)
        # before other ranks are started, and before Lightning does it by affinity alone
        self._cpu_share = share_cpus(self.num_processes)
        if self._cpu_share is not None:
            torch.set_num_threads(self._cpu_share)
        if starts_others:
            self._launcher = RankLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def set_world_ranks(self) -> None:
        """Tell the cluster environment its ranks; called by the Trainer."""
        if self.cluster_environment is None:
            return
        self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = utils_rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def setup_environment(self) -> None:
        """Check the run, then start process groups, Megatron's parallel state and its random-number trackers."""
        assert self.cluster_environment is not None
        forget()
        checks.check_trainer(self.trainer)
        checks.avoid_inference_tensors(self.trainer)
        check_ranks(self)
        watch()
        choose_products(self.precision_plugin.precision, self.root_device)
        super().setup_environment()
        self.set_world_ranks()
        reset_seed()
        checks.warn_of_slow_links(self.parallel_devices or [], self.local_rank)
        hosts = join_run(self)
        self._start_writing(self.trainer)
        with self.phase("setup"):
            self.layout.initialize(self.timeout_s)
            show_hosts(hosts)
            self.replica = ReplicaGroup(self.timeout_s)
            seed_megatron()

    def _start_writing(self, trainer: "pl.Trainer") -> None:
        """Settle where the run writes, before loggers and callbacks open anything."""
        command = trainer.state.fn
        assert command is not None
        self.checkpoints.keeper.name_run(trainer)
        if command == TrainerFn.FITTING:
            self.checkpoints.keeper.lock_directories(trainer)
        self._logs.take(trainer.loggers, command.value, self.run_id, resumes=resumes(trainer) is True)

    def setup(self, trainer: "pl.Trainer") -> None:
        """Wrap the module's chunks for training and make the optimizer."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        with self.phase("setup"):
            for chunk in self.chunks:
                chunk.to(self.root_device)
            if trainer.state.fn == TrainerFn.FITTING:
                trainer.lightning_module.model = wrap_for_training(
                    list(self.chunks), self.resolve_ddp_config(), is_16bit=self.precision_plugin.is_16bit
                )
                self.optimizers, self.lr_scheduler_configs = [], []
                self.setup_optimizers(trainer)
                self._stop = RunStop(self, self.checkpoints.keeper)
                self.checkpoints.start(trainer)
        self.setup_precision_plugin()
        log_settings(trainer, self)
        self.checkpoints.is_set_up = True

    def setup_optimizers(self, trainer: "pl.Trainer") -> None:
        """Ask the module for its optimizer and scheduler.

        Raises:
            TypeError: There are several, or it is not one of Megatron's; with what to do.
        """
        try:
            super().setup_optimizers(trainer)
        except RuntimeError as error:
            if "multiple optimizers" not in str(error):
                raise
            # Lightning advises manual optimisation, which this strategy refuses
            raise TypeError(checks.SEVERAL_OPTIMIZERS) from error
        checks.check_optimizers(self.optimizers)

    def limit_threads(self, num_parameters: int) -> None:
        """Give torch on a CPU no more threads than this rank's parameters keep busy; what the user has set stays."""
        if self._cpu_share is not None and self.root_device.type == "cpu":
            torch.set_num_threads(trainer_threads(num_parameters, self._cpu_share))

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
            raise TypeError(checks.no_megatron_model(self.lightning_module))
        return model

    @property
    def all_chunks(self) -> list[nn.Module]:
        """The chunks of the module's model, and of the others that are saved with it."""
        return [*self.chunks, *(chunk for chunks in self.saved_with_model.values() for chunk in chunks)]

    @property
    def own_optimizers(self) -> list[MegatronOptimizer]:
        """The optimizer of the module's model, in a fit."""
        return [optimizer for optimizer in self.optimizers if isinstance(optimizer, MegatronOptimizer)]

    @property
    def all_optimizers(self) -> list[MegatronOptimizer]:
        """The optimizers of `all_chunks`."""
        return [*self.own_optimizers, *self.optimizers_saved_with_model.values()]

    @property
    def trainer(self) -> "pl.Trainer":
        """The Trainer of the run."""
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def build_optimizer(self, config: "OptimizerConfig") -> MegatronOptimizer:
        """Make Megatron's optimizer for the module's chunks; call it in `configure_optimizers`.

        Args:
            config: Megatron's own `OptimizerConfig`; dtypes, sharding and clipping are filled in from the Trainer.

        Raises:
            ValueError: No learning rate, or clipping set in two places.
        """
        return make_optimizer(self.resolve_optimizer_config(config), list(self.chunks))

    def resolve_optimizer_config(self, config: "OptimizerConfig") -> "OptimizerConfig":
        """Return what `build_optimizer` would use, or raise what it would: a check before weights are loaded."""
        return resolve_optimizer_config(
            config,
            precision=self.precision_plugin.precision,
            params_dtype=self.precision_plugin.params_dtype,
            ddp_config=self.resolve_ddp_config(),
            gradient_clip_val=self.trainer.gradient_clip_val,
            device=self.root_device,
        )

    def resolve_ddp_config(self) -> "DistributedDataParallelConfig":
        """Return the user's `ddp_config` completed, or raise what contradicts the run."""
        return resolve_ddp_config(
            self.ddp_config,
            precision=self.precision_plugin.precision,
            use_distributed_optimizer=self.use_distributed_optimizer,
            device=self.root_device,
        )

    # ---- the run ---------------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Take the signals over; end a run whose time was up before it was resumed."""
        assert self._stop is not None
        self._stop.install()
        self.checkpoints.keeper.keep_one_last(self.trainer)
        self._stop.on_train_start()
        checks.check_timers_again(self.trainer)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """End the run if it was told to; see that one batch is one step; set aside what stays for all of it."""
        assert self._stop is not None
        self._stop.stop_if_told()
        checks.check_optimisation(self.trainer)
        self._long_lived.batch_starts()

    def on_train_end(self) -> None:
        """Leave no parameter to be gathered, and no checkpoint to be written."""
        self.gather_parameters()
        self.finish_saving()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Name what runs inside, for the error of a collective that times out or loses its peer."""
        return phase_deadline(name, self.timeout_s, self.spans)

    def on_exception(self, exception: BaseException) -> None:
        """Give the process its exit code; see `stopping.give_exit_code`."""
        give_exit_code(exception, is_first=self.is_global_zero)

    def teardown(self) -> None:
        """End the run but keep model and process groups: a `validate` or a second `fit` may follow."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        if self._stop is not None:
            self._stop.forget()
            self._stop = None
        self._long_lived.release()
        try:
            self.checkpoints.keeper.stop()
        finally:
            self._logs.release()
            # not super().teardown(): it moves the model and the optimizer state to the CPU
            self.cluster_environment.teardown()
            self.precision_plugin.teardown()
            self.accelerator.teardown()
            if not was_interrupted(self.lightning_module):
                rest()  # after a failure the other rank's end is this one's, too, however long that takes

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
        gradients: GradientSum | None = None,
    ) -> list[Any]:
        """Run Megatron's schedule over all micro-batches of a mini-batch; see `schedule.forward_backward`.

        `chunks` are other ones than the module's own, e.g. a frozen reference policy. With `gradients` it is a part of
        the mini-batch.
        """
        passed = list(self.chunks) if chunks is None else list(chunks)
        in_full = gradients is None or gradients.is_last
        found = None if forward_only else gradients_of(passed, self.all_optimizers)
        with found.computing(in_full=in_full) if found else nullcontext(), torch.set_grad_enabled(not forward_only):
            return forward_backward(
                passed,
                microbatches,
                forward_step,
                sequence_length=sequence_length,
                micro_batch_size=micro_batch_size,
                forward_only=forward_only,
                gradients=gradients,
            )

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's; None skips the step."""
        self.update_loss = None
        output = super().training_step(*args, **kwargs)
        for optimizer in self.own_optimizers:
            (optimizer.gradients.drop if output is None else optimizer.gradients.hold)()
        return output

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Fire Lightning's backward hooks; the schedule has computed the gradients in `training_step` already.

        Raises:
            ValueError: The loss carries a graph, or is not the update's: neither would change the gradients.
        """
        checks.check_loss(closure_loss, self.update_loss)
        module = self.trainer.lightning_module
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        show_gradients(optimizer, self.trainer)
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Take the step and answer one that could not be taken.

        Raises:
            RuntimeError: No gradients were computed since the last step.
        """
        assert isinstance(optimizer, MegatronOptimizer)
        optimizer.set_clip_grad(0.0)  # `configure_gradient_clipping`, which may be the user's, sets it for this step

        def compute() -> Any:
            result = closure()
            show_gradients(optimizer, self.trainer)
            return result

        self.checkpoints.weights_changed()
        result = super().optimizer_step(optimizer, compute, model, **kwargs)
        self.answer_nonfinite(optimizer)
        return result

    def answer_nonfinite(self, optimizer: MegatronOptimizer) -> None:
        """End the run or warn if the optimizer's last step was skipped; see `guarding.answer_nonfinite`."""
        answer_nonfinite(optimizer, self.trainer, self.on_nonfinite, self.finish_saving)

    def gather_parameters(self) -> None:
        """Let every replica see all of the last step's parameters; see `collectives.gather_parameters`."""
        gather_parameters(list(self.chunks))

    # ---- what modules ask --------------------------------------------------------------------------------------------

    def offload(self, parts: Sequence[OffloadPart]) -> OffloadReport:
        """Move those of `parts` that the run offloads to the host's memory; see `OffloadedState.offload`."""
        return self.memory.offload(parts, self.root_device, self.all_chunks, self.all_optimizers)

    def reload(self) -> OffloadReport:
        """Bring back all offloaded parts."""
        return self.memory.reload()

    def barrier(self, name: str | None = None) -> None:
        """Wait for every rank; at the start of a fit's stage also take the signals, which Lightning has just taken."""
        if name == "run-stage" and self._stop is not None:  # before the data are loaded and the sanity check
            self._stop.install()
        collectives.barrier(self.root_device)

    def broadcast[T](self, obj: T, src: int = 0) -> T:
        """Return the object of rank `src` on every rank."""
        return collectives.broadcast(obj, src)

    def reduce(self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any = "mean") -> Tensor | Any:
        """Reduce a tensor over all ranks; see `collectives.reduce`."""
        return collectives.reduce(tensor, group, reduce_op)

    def union(self, names: Sequence[str]) -> list[str]:
        """Return the sorted names of all ranks."""
        return collectives.union(names)

    def data_parallel_all_reduce(
        self, tensor: Tensor, op: str = "sum", *, with_context_parallel: bool = False
    ) -> Tensor:
        """Reduce in place over the model replicas; see `distributed.data_parallel_all_reduce`."""
        return data_parallel_all_reduce(tensor, op, with_context_parallel=with_context_parallel)

    def broadcast_from_last_stage[T](self, obj: T) -> T:
        """Return the object of this replica's last pipeline stage on every rank of the replica."""
        assert self.replica is not None
        # Megatron orders ranks with the pipeline outermost: the last rank is of the last stage
        return self.replica.broadcast_object(obj, source=self.replica.ranks[-1])

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    @property
    def run_id(self) -> str:
        """Of this fit and all that are resumed from its checkpoints."""
        return self.checkpoints.keeper.run_id

    @property
    def averages(self) -> dict[str, AveragedWeights]:
        """Averages of the module's weights that this fit keeps, by name."""
        return {name: average for it in self.own_optimizers for name, average in it.averages.items()}

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return sharded weights per chunk, and the module's state outside `model`."""
        return self.checkpoints.module_state()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer itself: `save_checkpoint` takes its state."""
        return self.checkpoints.optimizer_state(bare(optimizer))

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write Lightning's checkpoint dictionary as a directory, by all ranks; see `checkpoints.format`."""
        checks.refuse_storage_options(storage_options)
        self.checkpoints.save(checkpoint, filepath)

    def finish_saving(self) -> None:
        """Wait until the checkpoints that were saved are complete; a collective; see `CheckpointKeeper.finish`."""
        self.checkpoints.keeper.finish()

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Delete a checkpoint directory (rank 0), when what was saved before this call is complete."""
        self.checkpoints.remove(Path(filepath))

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load weights, optimizer and random-number states from a checkpoint of any layout; see `CheckpointSaver`."""
        return self.checkpoints.load(checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load what the module holds outside `model`; `load_checkpoint` has loaded the rest."""
        self.checkpoints.load_module_state(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: `load_checkpoint` has restored the optimizer."""

    def check_saving(self, callbacks: Sequence[pl.Callback]) -> None:
        """Refuse a directory for checkpoints that takes no files; see `keeping.check_directories`."""
        check_directories(callbacks)

    def check_checkpoint(self, path: Path, *, training: bool) -> None:
        """Refuse a checkpoint that `load_checkpoint` would refuse; see `saving.check_checkpoint`."""
        self.checkpoints.check(path, training=training)

    def load_weights(self, path: Path, chunks: Sequence[nn.Module]) -> None:
        """Give freshly built chunks the weights of a checkpoint; see `CheckpointSaver.load_weights`."""
        self.checkpoints.load_weights(path, chunks)
