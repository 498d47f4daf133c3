"""`MegatronStrategy`: Megatron-core's parallelism, optimizer and checkpoints behind a plain Lightning `Trainer`."""

import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Optional

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as utils_rank_zero_only
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import Optimizer

from lightning_megatron_rl.checkpoints.resuming import resumes
from lightning_megatron_rl.compat.adam import install_adam
from lightning_megatron_rl.compat.cpu import install_cpu_support
from lightning_megatron_rl.compat.gloo import install_shared_gloo
from lightning_megatron_rl.parallel.distributed import ReplicaGroup, phase_deadline
from lightning_megatron_rl.parallel.launching import RankLauncher
from lightning_megatron_rl.parallel.layout import ParallelLayout
from lightning_megatron_rl.parallel.leader import rest, watch
from lightning_megatron_rl.parallel.rendezvous import local_store
from lightning_megatron_rl.strategy.checks import (
    SEVERAL_OPTIMIZERS,
    avoid_inference_tensors,
    check_optimisation,
    check_optimizers,
    check_timers_again,
    check_trainer,
    no_megatron_model,
    refuse_checkpoint_io,
    warn_of_slow_links,
)
from lightning_megatron_rl.strategy.garbage import LongLived
from lightning_megatron_rl.strategy.log_directories import LogDirectories
from lightning_megatron_rl.strategy.nonfinite import OnNonfinite
from lightning_megatron_rl.strategy.offload import OffloadPart, check_parts
from lightning_megatron_rl.strategy.optimizer import MegatronOptimizer
from lightning_megatron_rl.strategy.precision import MegatronPrecision
from lightning_megatron_rl.strategy.products import choose_products
from lightning_megatron_rl.strategy.schedule import ForwardStep, forward_backward
from lightning_megatron_rl.strategy.settings import resolve_ddp_config, resolve_optimizer_config
from lightning_megatron_rl.strategy.stopping import StopsTogether
from lightning_megatron_rl.strategy.wrapping import make_optimizer, wrap_for_training
from lightning_megatron_rl.utilities.cpus import share_cpus, trainer_threads
from lightning_megatron_rl.utilities.notices import forget
from lightning_megatron_rl.utilities.ranges import POSITIVE, check_ranges
from lightning_megatron_rl.utilities.run_settings import describe_settings
from lightning_megatron_rl.utilities.versions import installed_versions

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

_DEFAULT_SEED = 1234
_PACKAGES = ("lightning-megatron-rl", "torch", "lightning", "megatron-core", "megatron-bridge", "transformers", "vllm")
# its info lines are lists of every parameter, its warnings advice to Megatron's own developers
logging.getLogger("megatron").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module=r"megatron\.")


@StrategyRegistry.register("megatron", description="Megatron-core: tensor, pipeline and data parallelism")
class MegatronStrategy(StopsTogether):
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
        on_nonfinite: What a step with a loss or gradient that is no number does: "stop" ends the run and keeps the
            batch and the weights, "skip" leaves the weights as they are, warns and counts it.
        save_on_interrupt: Whether Ctrl-C stops the run after the batch, with a checkpoint, as SIGTERM does.
        async_save: Write checkpoints while training goes on, from a copy in the host's memory. The next save, the end
            of the run and whatever loads a checkpoint wait for it.
        verify_checkpoints: Compare the checksum of each file of a checkpoint before loading it.
        fall_back_to_previous: Load the previous checkpoint beside it, with a warning, if one is damaged or unfinished.
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
        offload_while_sampling: list[OffloadPart] | None = None,
        on_nonfinite: OnNonfinite = "stop",
        save_on_interrupt: bool = False,
        async_save: bool = True,
        verify_checkpoints: bool = True,
        fall_back_to_previous: bool = False,
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
        check_ranges({"timeout_s": POSITIVE.called("seconds after which a collective fails")}, locals())
        self.use_distributed_optimizer = use_distributed_optimizer
        self.ddp_config = ddp_config
        self.timeout_s = timeout_s
        self.offloads = check_parts(offload_while_sampling)
        self.on_nonfinite = on_nonfinite
        self.save_on_interrupt = save_on_interrupt
        self.async_save = async_save
        self.verify_checkpoints = verify_checkpoints
        self.fall_back_to_previous = fall_back_to_previous
        self.num_nodes = 1
        self.phase_name = "setup"
        self._long_lived = LongLived()
        self._logs = LogDirectories()
        self._cpu_share: int | None = None  # CPUs of this rank; None: the user says how many threads there are

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
    def checkpoint_io(self) -> CheckpointIO:
        """Lightning's default, which is never asked: checkpoints are this strategy's own."""
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        refuse_checkpoint_io(io)

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
        external = self.cluster_environment.creates_processes_externally
        if not external and size > 1 and (hasattr(sys, "ps1") or sys.flags.interactive):
            raise ValueError(
                f"MegatronStrategy on {size} devices in a notebook or an interactive Python: each device is a process"
                " that runs a script from its beginning, and there is none. Use Trainer(devices=1), or put the code"
                " into a script and run it with python, torchrun or `lightning-megatron-rl fit`."
            )
        # before other ranks are started, and before Lightning does it by affinity alone
        self._cpu_share = share_cpus(self.num_processes)
        if self._cpu_share is not None:
            torch.set_num_threads(self._cpu_share)
        if not external and size > 1:  # one device is this process itself
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
        assert self.lightning_module is not None
        assert self.cluster_environment is not None
        forget()
        check_trainer(self.lightning_module.trainer)
        avoid_inference_tensors(self.lightning_module.trainer)
        self.layout.data_parallel_size(self.world_size)
        watch()
        choose_products(self.precision_plugin.precision, self.root_device)
        super().setup_environment()
        self.set_world_ranks()
        reset_seed()
        warn_of_slow_links(self.parallel_devices or [], self.local_rank)
        install_cpu_support(self.root_device)
        install_shared_gloo(self.root_device)
        install_adam(self.root_device)
        self._init_process_group()
        self._start_writing(self.lightning_module.trainer)
        with self.phase("setup"):
            self.layout.initialize(self.timeout_s)
            self.replica = ReplicaGroup(self.timeout_s)
            self._seed_megatron()

    def _start_writing(self, trainer: "pl.Trainer") -> None:
        """Settle where the run writes, before loggers and callbacks open anything."""
        command = trainer.state.fn
        assert command is not None
        self.name_run(trainer)
        if command == TrainerFn.FITTING:
            self.lock_directories(trainer)
        self._logs.take(trainer.loggers, command.value, self.run_id, resumes=resumes(trainer) is True)

    def _log_settings(self, trainer: "pl.Trainer") -> None:
        """Give the loggers what the run is made of, as Lightning does with what a module saves as hyper-parameters."""
        if not trainer.enable_autolog_hparams or not trainer.loggers:
            return
        module, data = trainer.lightning_module, trainer.datamodule  # type: ignore[attr-defined]
        strategy = describe_settings(self) | asdict(self.layout)
        settings = {
            "run_id": self.run_id,
            "model": describe_settings(module),
            "data": None if data is None else describe_settings(data),
            "strategy": strategy,
            "trainer": {
                "precision": self.precision_plugin.precision,
                "world_size": self.world_size,
                "max_steps": trainer.max_steps,
                "max_epochs": trainer.max_epochs,
                "gradient_clip_val": trainer.gradient_clip_val,
            },
            "seed": int(os.environ.get("PL_GLOBAL_SEED", _DEFAULT_SEED)),
            "versions": installed_versions(_PACKAGES),
        }
        for logger in trainer.loggers:
            logger.log_hyperparams(settings)

    def _init_process_group(self) -> None:
        assert self.cluster_environment is not None
        if isinstance(self._launcher, RankLauncher):
            self._launcher.release_port()
        try:
            # without a device_id: each of Megatron's groups, most of which nobody uses, would get a communicator at
            # once, with 388 MiB of the GPU's memory
            _init_dist_connection(
                self.cluster_environment,
                "nccl" if self.root_device.type == "cuda" else "gloo",
                timeout=timedelta(seconds=self.timeout_s),
                store=self._local_store(),
            )
        except (RuntimeError, OSError) as error:
            address = f"{self.cluster_environment.main_address}:{self.cluster_environment.main_port}"
            if "EADDRINUSE" not in str(error) and "address already in use" not in str(error).lower():
                raise
            raise RuntimeError(
                f"the rendezvous port of this run is in use: {address}. Another run on this machine may hold it: unset"
                f" MASTER_PORT so that a free one is chosen, or set it to another port. Original error: {error}"
            ) from error

    def _local_store(self) -> dist.Store | None:
        """The store of a run whose processes are all on this machine; None: torch's own rendezvous."""
        environment = self.cluster_environment
        assert environment is not None
        served_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
        if dist.is_initialized() or served_by_torchrun or environment.world_size() != self.num_processes:
            return None
        return local_store(
            environment.global_rank(),
            environment.world_size(),
            environment.main_port,
            timedelta(seconds=self.timeout_s),
        )

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
                assert self.lightning_module is not None
                self.lightning_module.model = wrap_for_training(
                    list(self.chunks),
                    self.resolve_ddp_config(),
                    is_16bit=self.precision_plugin.is_16bit,
                )
                self._reset_optimizers_and_schedulers()
                self.setup_optimizers(trainer)
                self.watch_signals(trainer)
                self.start_keeping(trainer)
        self.setup_precision_plugin()
        self._log_settings(trainer)
        self._is_set_up = True

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
            raise TypeError(SEVERAL_OPTIMIZERS) from error
        check_optimizers(self.optimizers)

    def limit_threads(self, num_parameters: int) -> None:
        """Give torch on a CPU no more threads than a model of this size keeps busy; what the user has set stays.

        Args:
            num_parameters: Of this rank.
        """
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
            raise TypeError(no_megatron_model(self.lightning_module))
        return model

    def build_optimizer(self, config: "OptimizerConfig") -> MegatronOptimizer:
        """Make Megatron's optimizer for the module's chunks; call it in `configure_optimizers`.

        Args:
            config: Megatron's own `OptimizerConfig`; dtypes, sharding and clipping are filled in from the Trainer.

        Raises:
            ValueError: No learning rate, or clipping set in two places.

        Example:
            ``return self.trainer.strategy.build_optimizer(OptimizerConfig(lr=1e-6, weight_decay=0.0))``
        """
        return make_optimizer(self.resolve_optimizer_config(config), list(self.chunks))

    def resolve_optimizer_config(self, config: "OptimizerConfig") -> "OptimizerConfig":
        """Return what `build_optimizer` would use, or raise what it would: a check before weights are loaded."""
        assert self.lightning_module is not None
        return resolve_optimizer_config(
            config,
            precision=self.precision_plugin.precision,
            params_dtype=self.precision_plugin.params_dtype,
            ddp_config=self.resolve_ddp_config(),
            gradient_clip_val=self.lightning_module.trainer.gradient_clip_val,
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

    def on_train_start(self) -> None:
        """Take the signals over; end a run whose time was up before it was resumed."""
        assert self.lightning_module is not None
        super().on_train_start()
        check_timers_again(self.lightning_module.trainer)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """End the run if it was told to; see that one batch is one step; set aside what stays for all of it."""
        assert self.lightning_module is not None
        super().on_train_batch_start(batch, batch_idx)
        check_optimisation(self.lightning_module.trainer)
        self._long_lived.batch_starts()

    def on_train_end(self) -> None:
        """Leave no parameter to be gathered, and no checkpoint to be written."""
        self.gather_parameters()
        self.finish_saving()

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
        passed = list(self.chunks) if chunks is None else list(chunks)
        gradients = None if forward_only else self._gradients_of(passed)
        if gradients is not None:
            gradients.begin()
        with torch.set_grad_enabled(not forward_only):
            results = forward_backward(
                passed,
                microbatches,
                forward_step,
                sequence_length=sequence_length,
                micro_batch_size=micro_batch_size,
                forward_only=forward_only,
            )
        if gradients is not None:
            gradients.state = "computed"
        return results

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Fire Lightning's backward hooks; the schedule has computed the gradients in `training_step` already.

        Raises:
            ValueError: The loss carries a graph, whose gradients would be neither reduced nor divided.
        """
        if closure_loss.requires_grad:
            raise ValueError(
                "training_step returned a loss with an autograd graph: Megatron's schedule computes the gradients in"
                " self.update(...) or strategy.forward_backward(...), and those of another backward pass would not be"
                " reduced over the ranks. Return loss.detach(), and add further terms to the loss per token."
            )
        assert self.lightning_module is not None
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        self._show_gradients(optimizer)
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

    def teardown(self) -> None:
        """End the run but keep model and process groups: a `validate` or a second `fit` may follow."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.forget_signals()
        self._long_lived.release()
        try:
            self.stop_keeping()
        finally:
            self._logs.release()
            # not super().teardown(): it moves the model and the optimizer state to the CPU
            self.cluster_environment.teardown()
            self.precision_plugin.teardown()
            self.accelerator.teardown()
            if not self._was_interrupted():
                rest()  # after a failure the other rank's end is this one's, too, however long that takes

    def _was_interrupted(self) -> bool:
        """Whether an exception has ended the run; not, if it was refused before the module had a Trainer."""
        try:
            return self.lightning_module is not None and bool(self.lightning_module.trainer.interrupted)
        except RuntimeError:  # Lightning's, of a module without one
            return False
