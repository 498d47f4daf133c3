"""`ModelModule`: a Hugging Face model trained by Megatron, and the two passes every method is made of."""

import warnings
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_megatron_rl.callbacks.weight_average import WeightAverage
from lightning_megatron_rl.checkpoints.manifest import read_manifest
from lightning_megatron_rl.checkpoints.resuming import starting_checkpoint
from lightning_megatron_rl.data.packing import MicroBatch, TokenSequence, scatter_to_sequences
from lightning_megatron_rl.data.planning import SequenceCost
from lightning_megatron_rl.models.flops import sequence_flops
from lightning_megatron_rl.models.layers.moe import MoESettings, resolve_moe_settings
from lightning_megatron_rl.modules.batches import check_tokenizer
from lightning_megatron_rl.modules.budget import Budget
from lightning_megatron_rl.modules.exporting import PlannedViews, no_single_file, no_whole_model
from lightning_megatron_rl.modules.monitors import check_monitors
from lightning_megatron_rl.modules.parts import UpdateParts
from lightning_megatron_rl.modules.reporting import StepReport
from lightning_megatron_rl.modules.routing import routed_pass
from lightning_megatron_rl.modules.rows import CountsRows
from lightning_megatron_rl.modules.sharing import Share, share_sequences
from lightning_megatron_rl.modules.start import check_gpu, check_positions, check_sampled, describe_plan
from lightning_megatron_rl.modules.steps import OutputProcessor, TokenLoss, score_step, train_step
from lightning_megatron_rl.modules.training import RefusesMovedArguments, TrainingSettings
from lightning_megatron_rl.parallel.distributed import context_parallel_sum, run_on_all_ranks
from lightning_megatron_rl.planner.moments import MemoryPlan
from lightning_megatron_rl.rollout.protocol import RolloutEngine
from lightning_megatron_rl.rollout.watch import Watched
from lightning_megatron_rl.strategy.checks import refuse_plateau
from lightning_megatron_rl.strategy.nonfinite import UpdateTrace
from lightning_megatron_rl.strategy.optimizer import MegatronOptimizer
from lightning_megatron_rl.strategy.required import require_megatron
from lightning_megatron_rl.strategy.schedule import GradientSum
from lightning_megatron_rl.utilities.kinds import check_kinds
from lightning_megatron_rl.utilities.notices import finish
from lightning_megatron_rl.utilities.text_files import user_path
from lightning_megatron_rl.weights.source import WeightSource

if TYPE_CHECKING:
    from megatron.core.optimizer import OptimizerConfig

    from lightning_megatron_rl.models.hf.model import HFModel
    from lightning_megatron_rl.models.layers.routers import RouterHooks, RoutingMode
    from lightning_megatron_rl.strategy.megatron import MegatronStrategy

# modules and data of this package both leave batches on the CPU, each for those of a user's own; modules count rows
warnings.filterwarnings("ignore", message="You have overridden `(transfer_batch_to_device|on_before_batch_transfer)`")


class ModelModule(CountsRows, RefusesMovedArguments):
    """A model on Megatron: builds it, scores sequences with it, updates it.

    What its last layer gives per token (log-probs, values) is `output_processor`, which subclasses choose.

    Args:
        model: Hugging Face hub name, or a directory that `save_pretrained` wrote.
        train: How the model is built and trained.
        init_from: Distributed checkpoint of a run of this model, in any layout, whose weights replace those of `model`.

    Raises:
        ValueError: Adapters on the weights of a distributed checkpoint.
    """

    metrics_prefix = "policy"  # of the logged loss, gradient norm and learning rate
    default_lr = 1e-6
    temperature = 1.0  # of the distribution that is scored: logits are divided by it in every pass
    exports_classifier = False  # whether exports are Transformers' sequence classifiers, else language models
    default_aux_loss_coeff = 0.0  # where `train.moe` does not say: the reward is what RL optimises
    has_old_logprobs = False  # whether sequences can be scored before they are trained on, and their routing replayed
    moe_in_force: MoESettings | None = None  # None on a dense model
    routers: "RouterHooks | None" = None  # of a mixture of experts, from `configure_model` on
    engine: RolloutEngine | None = None  # that works in turn with the trainer, where a method samples

    def __init__(self, model: str, train: TrainingSettings | None = None, init_from: str | None = None) -> None:
        super().__init__()
        check_kinds({"model": str, "train": TrainingSettings}, locals(), type(self).__name__)
        self.train_settings = train or TrainingSettings()
        if init_from is not None and self.train_settings.lora is not None:
            raise ValueError(
                f"init_from={init_from!r} with lora: adapters belong to the weights of a model directory. Export"
                " the checkpoint's model (HFExport) and give the directory as `model`."
            )
        self.model_path = model
        self.init_from = init_from
        self._hf_model: HFModel | None = None
        self.report = StepReport(self)
        self.budget = Budget(self)
        self.planned_views = PlannedViews()
        self.memory_plan: MemoryPlan | None = None  # of this rank's GPU

    # ---- model and optimizer ---------------------------------------------------------------------------------------

    @property
    def strategy(self) -> "MegatronStrategy":
        """The Trainer's strategy.

        Raises:
            TypeError: It is not a `MegatronStrategy`.
        """
        return require_megatron(self.trainer, self)

    @property
    def hf_model(self) -> "HFModel":
        """The Hugging Face side of the model: config, tokenizer, conversion."""
        assert self._hf_model is not None, "the model is found in setup()"
        return self._hf_model

    def configure_callbacks(self) -> list[Callback]:
        """Add none; refuse another strategy before callbacks and loggers open their files."""
        require_megatron(self.trainer, self)
        return []

    def setup(self, stage: str) -> None:
        """Find and check the model, that the layout can hold it, and the optimizer's settings, before weights load."""
        self.report.begin_setup()
        if stage == "fit":
            self.strategy.resolve_optimizer_config(self._optimizer_config())
        if self.strategy.offloads and self.engine is None:
            rank_zero_warn(
                f"offload_while_sampling={list(self.strategy.offloads)} does nothing: {type(self).__name__} has no"
                " sampler to make room for; leave it out."
            )
        if self._hf_model is None:
            self._hf_model = self.find_model()
        check_tokenizer(self)
        check_sampled(self, self._hf_model.config)
        check_positions(self, self.trainer.datamodule, self._hf_model.config.rope_parameters or {})  # type: ignore[attr-defined]
        self.budget.settle(training=stage == "fit")
        self.moe_in_force = resolve_moe_settings(
            self.train_settings.moe,
            self._hf_model.config,
            self.train_settings.model_config,
            # as with frozen routers: beside adapters they do not learn
            default_aux_loss_coeff=0.0 if self.train_settings.lora is not None else self.default_aux_loss_coeff,
            has_old_logprobs=self.has_old_logprobs,
        )
        self.check_model(self._hf_model, self.train_settings.model_config)
        if self.init_from is not None:
            read_manifest(user_path(self.init_from))
            self._hf_model.check_checkpoint(user_path(self.init_from))
        if stage == "fit":
            check_monitors(self.trainer, self)
            self.strategy.check_saving(self.trainer.checkpoint_callbacks)  # type: ignore[attr-defined]
        self.strategy.saved_with_model = {}  # no other model, until there is one
        self.strategy.optimizers_saved_with_model = {}
        self.strategy.trained_on_top_of = None
        self.strategy.saved_beside = self._hf_model.settings_files("hf")
        if self.train_settings.lora is not None:
            self.train_settings.lora.check_layout(self.strategy.layout.tensor_model_parallel_size)
            self.strategy.trained_on_top_of = self.train_settings.lora.identity(self._hf_model.fingerprint)
        start = starting_checkpoint(self.trainer)
        if start is not None:
            self.strategy.check_checkpoint(start, training=stage == "fit")
            self._hf_model.check_checkpoint(start)
        if "model" not in self._modules:
            copies = self.frozen_copies
            self.memory_plan = check_gpu(self, training=stage == "fit", engine=self.engine, frozen_copies=copies)

    @property
    def scores_first(self) -> bool:
        """Whether a pass gives the old policy's log-probs before sequences are trained on."""
        return False

    @property
    def logprob_chunk_size(self) -> int:
        """Tokens whose logits exist at one time; a model without an output layer has none."""
        return 0

    @property
    def frozen_copies(self) -> int:
        """Copies of the model that stay on the GPU beside it."""
        return 0

    @property
    def num_averages(self) -> int:
        """Averages of the weights that a fit keeps beside the optimizer's state."""
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        return sum(isinstance(callback, WeightAverage) for callback in callbacks) + self.own_averages

    @property
    def own_averages(self) -> int:
        """Those of them that are no callback's."""
        return 0

    def describe_plan(self) -> list[tuple[str, str]]:
        """Return rows for the table at start: what "auto" chose, planned memory, expected seconds of a step."""
        device, data = self.strategy.root_device, self.trainer.datamodule  # type: ignore[attr-defined]
        planned = describe_plan(self, data, torch.cuda.get_device_name(device) if device.type == "cuda" else None)
        return [*self.budget.describe(), *planned]

    def find_model(self) -> "HFModel":
        """Return the Hugging Face side of `model_path`."""
        from lightning_megatron_rl.models.hf.model import HFModel

        return HFModel(self.model_path, verify=self.train_settings.verify_model)

    def check_model(self, model: "HFModel", model_config: dict[str, Any]) -> None:
        """Refuse a model that this layout cannot hold, or that Megatron may compute in another way; a collective."""
        model.check_layout(self.strategy.layout, model_config)
        model.check_computation(model_config)

    def configure_model(self) -> None:
        """Build this rank's chunks with the model's weights; called again, it does nothing."""
        if "model" not in self._modules:
            chunks = self.build_chunks()
            if self.moe_in_force is not None:  # hooked before Megatron wraps the chunks
                from lightning_megatron_rl.models.layers.routers import RouterHooks

                self.routers = RouterHooks(chunks, self.moe_in_force, self.strategy.root_device)
            self.model = nn.ModuleList(chunks)
            self.strategy.limit_threads(sum(parameter.numel() for parameter in self.model.parameters()))

    def build_chunks(self) -> list[nn.Module]:
        """Return freshly built chunks holding the weights of `model_path`, or of the checkpoint `init_from`."""
        moe_fields = {} if self.moe_in_force is None else self.moe_in_force.megatron_fields()
        chunks = list(
            self.hf_model.build_chunks(
                **self.build_options,
                load_weights=self.init_from is None,
                config_overrides=self.train_settings.model_config | moe_fields,
                lora=self.train_settings.lora,
            )
        )
        if self.init_from is not None:
            self.strategy.load_weights(user_path(self.init_from), chunks)
        return chunks

    @property
    def build_options(self) -> dict[str, Any]:
        """Arguments of `HFModel.build_chunks` that are the same for every model of a run."""
        return {
            "params_dtype": self.strategy.precision_plugin.params_dtype,
            "layer_backend": self.train_settings.layer_backend,
            "device": self.strategy.root_device,
            "sequence_parallel": self.strategy.layout.sequence_parallel,
        }

    @property
    def replays_routing(self) -> bool:
        """Whether updates send each token to the experts that its sequence's routing names."""
        return self.moe_in_force is not None and self.moe_in_force.router_replay != "none"

    def on_fit_start(self) -> None:
        """Start the report of a fit."""
        self.report.begin_fit()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Start the report of a step."""
        super().on_train_batch_start(batch, batch_idx)
        self.report.begin_step(batch)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """Take the step and log its gradient norm, before callbacks see the batch's end."""
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.report.log_update()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log what is known only when all is done."""
        self.report.end_step()
        self.budget.end_step()

    def on_validation_end(self) -> None:
        """Begin the next step's times anew."""
        self.report.end_validation()

    def teardown(self, stage: str) -> None:
        """Give the memory of pushes back, and repeat what was lost in this run.

        Raises:
            RunFailedError: On every rank, if something failed that the run was for. Callbacks have had their teardown.
        """
        super().teardown(stage)
        try:
            if stage == "fit":
                run_on_all_ranks(finish)
        finally:
            self.planned_views.let_go()  # not before other ranks' engines have let go of it

    def configure_optimizers(self) -> Any:
        """Return Megatron's optimizer and the scheduler, stepped once per `global_step`.

        Raises:
            ValueError: The scheduler is a `ReduceLROnPlateau`.
        """
        optimizer = self.strategy.build_optimizer(self._optimizer_config())
        make_scheduler = self.train_settings.lr_scheduler
        if make_scheduler is None:
            return optimizer
        scheduler = make_scheduler(optimizer)
        refuse_plateau(scheduler)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _optimizer_config(self) -> "OptimizerConfig":
        from megatron.core.optimizer import OptimizerConfig

        return self.train_settings.optimizer or OptimizerConfig(lr=self.default_lr, weight_decay=0.0)

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Do nothing: there is one optimizer, and its parameters stay trainable."""

    def untoggle_optimizer(self, optimizer: Any) -> None:
        """Do nothing, as `toggle_optimizer`."""

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Leave the batch on the CPU: sequences are laid out there, and only micro-batches go to the device."""
        return batch

    # ---- what a run tells ------------------------------------------------------------------------------------------

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time what runs inside as ``time/<name>_s``, in the Trainer's profiler and in errors of collectives."""
        return self.report.phase(name)

    def describe_batch(self, batch: Any) -> list[tuple[str, str]]:
        """Return rows for the table at start: what one batch means, with its arithmetic."""
        return []

    def evaluation_metrics(self, stage: str, sets: Sequence[str]) -> list[str]:
        """Return the names that a validation of these sets logs; none here."""
        return []

    def reward_components(self) -> list[str]:
        """Return the names of its rewards, if it has any."""
        return []

    def rank_metrics(self) -> dict[str, float]:
        """Return what more this rank has to say of a step; the largest of all ranks is logged."""
        return {}

    def rank_totals(self) -> dict[str, float]:
        """Return what of a step is summed over all ranks before it is logged."""
        return {}

    def watched(self) -> Watched:
        """Return what this rank can be watched by, for timelines."""
        return Watched()

    def start_facts(self) -> dict[str, Any]:
        """Return the table at start and the memory plan of this rank's GPU, if it has one, as plain data."""
        plan = self.memory_plan
        return {"table": self.report.table, "memory_plan": None if plan is None else plan.record()}

    def log_metrics(self, metrics: dict[str, float], prog_bar: tuple[str, ...] = ()) -> None:
        """Log values that are already equal on every rank (which is why Lightning's hint at sync_dist is silenced)."""
        warnings.filterwarnings("ignore", message=r".*sync_dist=True.*")
        for name, value in metrics.items():
            self.log(name, value, prog_bar=name in prog_bar, sync_dist=False, batch_size=1)

    def reduce_on_device(self, vector: Tensor, op: Literal["sum", "max"] = "sum") -> Tensor:
        """Reduce a CPU vector over the model replicas, for a `Tally` that lives on the CPU."""
        return self.strategy.data_parallel_all_reduce(vector.to(self.strategy.root_device), op).cpu()

    def reduce_tokens(self, vector: Tensor, op: Literal["sum", "max"] = "sum") -> Tensor:
        """Reduce what belongs to this rank's tokens over the ranks that share the batch's tokens."""
        return self.strategy.data_parallel_all_reduce(vector, op, with_context_parallel=True)

    # ---- weights on their way out ----------------------------------------------------------------------------------

    def weights_to_push(self, *, direct: bool = False) -> WeightSource:
        """Return the policy's weights for an engine, which takes them in any precision: in that of training.

        Where this rank has the whole model, views of its parameters; otherwise a push that all ranks take part in.
        Both are planned at the first call, a collective of the world; what cannot be planned, and adapters, come as
        `export_weights` yields them. Biases that balance experts are in fp32 in any case.

        Args:
            direct: Whether the ranks of a replica may send what each has straight to the engine's workers.
        """
        self.strategy.gather_parameters()
        chunks, model = list(self.model), self.hf_model
        plan = model.plan_export_views if self.strategy.layout.is_whole else model.plan_sharded_views
        views = self.planned_views.of(chunks, plan) if self.train_settings.lora is None else None
        if views is None:
            exported = model.export_weights(chunks, self.strategy.precision_plugin.params_dtype)
            return WeightSource.streamed(exported, next(self.model.parameters()).device)
        replica = self.strategy.replica if direct else None
        return views.weights(stays="parameters" not in self.strategy.offloads, replica=replica)

    def export_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield the policy's weights under Hugging Face names in `dtype` (default: the checkpoint's); a collective."""
        self.strategy.gather_parameters()
        return self.hf_model.export_weights(list(self.model), dtype)

    @abstractmethod
    def export_outputs(self, sequences: list[TokenSequence]) -> list[Tensor]:
        """Return per sequence what an export, loaded back, must compute as well; a collective."""

    def save_pretrained(self, directory: Path, max_shard_size: int = 5_000_000_000) -> None:
        """Write the policy as a Hugging Face directory, adapters merged; a collective of all ranks.

        Args:
            directory: New, or empty.
            max_shard_size: Of a file of weights, in bytes.
        """
        self.strategy.gather_parameters()
        self.hf_model.save_pretrained(list(self.model), directory, max_shard_size=max_shard_size)

    def export_differences(self, directory: Path) -> list[str]:
        """Return how the tensors of a directory differ from what `save_pretrained` would write now; a collective."""
        self.strategy.gather_parameters()
        return self.hf_model.differences(list(self.model), directory)

    def save_adapter(self, directory: Path) -> None:
        """Write the adapters in PEFT's format; a collective of all ranks.

        Raises:
            ValueError: The policy has none, or the directory cannot be written.
        """
        if self.train_settings.lora is None:
            raise ValueError(
                f"{type(self).__name__}(train.lora=None) has no adapters: save_pretrained writes its weights."
            )
        self.strategy.gather_parameters()
        self.hf_model.save_adapter(list(self.model), directory, self.train_settings.lora)

    def adapter_differences(self, directory: Path) -> list[str]:
        """Return how the adapters of a directory differ from what `save_adapter` would write now; a collective."""
        self.strategy.gather_parameters()
        return self.hf_model.adapter_differences(list(self.model), directory)

    def to_onnx(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: the chunks are parts of a model.

        Raises:
            ValueError: Always, with what to do in its place.
        """
        raise ValueError(no_whole_model(type(self).__name__))

    to_torchscript = to_tensorrt = to_onnx

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> "ModelModule":
        """Refuse: a checkpoint is a directory of shards that only a Trainer with process groups can read.

        Raises:
            ValueError: Always, with what to do in its place.
        """
        raise ValueError(no_single_file(cls.__name__, str(checkpoint_path)))

    # ---- the two passes --------------------------------------------------------------------------------------------

    @abstractmethod
    def output_processor(self) -> OutputProcessor:
        """Return what the last pipeline stage makes of hidden states."""

    @torch.no_grad()
    def score_rows(
        self,
        sequences: list[TokenSequence],
        chunks: list[nn.Module] | None = None,
        *,
        processor: OutputProcessor | None = None,
        routing: "RoutingMode" = "free",
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return per sequence the outputs ``[outputs, tokens]`` of the model, or of other `chunks`, and its routing.

        Every rank of the replica gets them, on the CPU. They are aligned with the tokens that they predict: position 0
        has none and holds 0. `routing` says whether the model's choice of experts is recorded or each sequence's
        replayed; a recorded one is ``[tokens, expert layers of this pipeline stage, topk]`` int16.
        """
        scored = list(self.model) if chunks is None else chunks
        share = self._share(sequences)
        was_training = [chunk.training for chunk in scored]
        step = partial(score_step, processor=processor or self.output_processor(), routers=self.routers)
        with routed_pass(self.routers, share, routing, self.reduce_tokens) as recorded:
            for chunk in scored:
                chunk.eval()  # no dropout in a scoring pass
            outputs = self._run_schedule(share.microbatches, step, forward_only=True, chunks=scored)
        for chunk, training in zip(scored, was_training, strict=True):
            chunk.train(training)
        values: Tensor | None = None
        if outputs:  # only the last pipeline stage has any
            rows = [
                scatter_to_sequences([output[row] for output in outputs], share.microbatches, share.sequences)
                for row in range(len(outputs[0]))
            ]
            values = torch.stack([torch.cat([torch.empty(0, device=outputs[0].device), *row]) for row in rows])
            values = context_parallel_sum(values).cpu()
        whole = self.strategy.broadcast_from_last_stage(values)
        assert whole is not None
        pieces = whole.split([len(sequence) for sequence in share.sequences], dim=1)
        # each with memory of its own: a view would keep that of the whole pass, and take it along when it is pickled
        found = share.give_back([piece.clone() for piece in pieces])
        return found, share.give_back(recorded) if routing == "record" else []

    def update(
        self,
        sequences: list[TokenSequence],
        token_loss: TokenLoss,
        chunks: list[nn.Module] | None = None,
        *,
        optimizer: MegatronOptimizer | None = None,
        processor: OutputProcessor | None = None,
        prefix: str | None = None,
        parts: UpdateParts | None = None,
    ) -> dict[str, float]:
        """Compute gradients of the aggregated `token_loss` over all data-parallel ranks' sequences.

        Args:
            sequences: This replica's; field "weights" holds each token's weight (missing: 1, the token mean).
            token_loss: Loss per token.
            chunks: Another trained model's, e.g. a critic's.
            optimizer: That of those, which will take the step.
            processor: What the last stage of those makes of hidden states.
            prefix: Of that model's metrics.
            parts: What the parts of an update add up to, of which `sequences` are the next; None: they are all.

        Returns:
            Metrics, equal on every rank; "policy/loss" among them. None before the last part.
        """
        self.strategy.update_loss = None
        parts = parts or UpdateParts(self.strategy.root_device)
        trained = list(self.model) if chunks is None else chunks
        for chunk in trained:
            chunk.train()
        if chunks is None:
            self.report.num_tokens += sum(len(sequence.token_ids) for sequence in sequences)
        name = f"{prefix or self.metrics_prefix}/loss"
        token_losses: list[tuple[Tensor, Tensor]] = []
        step = partial(
            train_step,
            processor=processor or self.output_processor(),
            routers=self.routers,
            token_loss=token_loss,
            name=name,
            token_losses=token_losses,
        )
        share = self._share(sequences)
        replays = chunks is None and self.replays_routing
        with routed_pass(self.routers, share, "replay" if replays else "free", self.reduce_tokens):
            tallies = self._run_schedule(
                share.microbatches, step, forward_only=False, chunks=trained, gradients=parts.gradients
            )
        parts.add(share, tallies, token_losses)
        if not parts.gradients.is_last:
            return {}
        metrics: dict[str, float] = {}
        if parts.tally is not None:
            metrics = parts.tally.reduce(self.reduce_tokens).compute()
            metrics[name] *= parts.gradients.scale
        metrics = self.strategy.broadcast_from_last_stage(metrics)
        stepping = optimizer or self.strategy.optimizers[0]
        stepping.trace = UpdateTrace(trained, name, metrics[name], parts.samples, parts.token_losses)  # type: ignore[attr-defined]
        if chunks is not None:
            return metrics
        return {
            **metrics,
            **(self.routers.metrics() if self.routers is not None else {}),
            **parts.metrics(),
        }

    def loss_of_update(self, value: float) -> Tensor:
        """Return the loss of an update, for `training_step` to return: any other is refused from now on."""
        self.strategy.update_loss = torch.tensor(value, device=self.strategy.root_device)
        return self.strategy.update_loss.clone()

    def _share(self, sequences: list[TokenSequence]) -> Share:
        """This replica's part of all replicas' sequences, as micro-batches; a collective."""
        from megatron.core.utils import get_model_config

        config = get_model_config(self.model[0])
        return share_sequences(
            sequences,
            self.train_settings.token_budget,
            self.strategy.layout,
            self.strategy.root_device,
            packed=self.train_settings.packing,
            cost=SequenceCost(*sequence_flops(config, self.hf_model.config.vocab_size)),
            fp8=config.fp8 is not None,
        )

    def _run_schedule(
        self,
        microbatches: list[MicroBatch],
        step: Any,
        *,
        forward_only: bool,
        chunks: list[nn.Module],
        gradients: GradientSum | None = None,
    ) -> list[Any]:
        longest = max(microbatch.tokens.shape[1] for microbatch in microbatches)
        return self.strategy.forward_backward(
            microbatches,
            step,
            sequence_length=longest * self.strategy.layout.context_parallel_size,
            micro_batch_size=microbatches[0].tokens.shape[0],
            forward_only=forward_only,
            chunks=chunks,
            gradients=gradients,
        )
