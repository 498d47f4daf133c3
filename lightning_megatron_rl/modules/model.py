"""`ModelModule`: a Hugging Face model trained by Megatron, and the two passes every method is made of."""

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_megatron_rl.algorithms.tally import Tally
from lightning_megatron_rl.callbacks.weight_average import WeightAverage
from lightning_megatron_rl.checkpoints.manifest import read_manifest
from lightning_megatron_rl.checkpoints.resuming import starting_checkpoint
from lightning_megatron_rl.data.packing import MicroBatch, TokenSequence, scatter_to_sequences
from lightning_megatron_rl.data.planning import SequenceCost
from lightning_megatron_rl.models.flops import sequence_flops
from lightning_megatron_rl.modules.monitors import check_monitors
from lightning_megatron_rl.modules.reporting import ReportsSteps
from lightning_megatron_rl.modules.sharing import Share, share_sequences
from lightning_megatron_rl.modules.start import check_gpu
from lightning_megatron_rl.modules.steps import OutputProcessor, TakesSteps, TokenLoss
from lightning_megatron_rl.modules.training import RefusesMovedArguments, TrainingSettings
from lightning_megatron_rl.parallel.distributed import context_parallel_sum, run_on_all_ranks
from lightning_megatron_rl.planner.divisibility import PipelineSplit
from lightning_megatron_rl.rollout.protocol import RolloutEngine
from lightning_megatron_rl.strategy.nonfinite import UpdateTrace
from lightning_megatron_rl.strategy.optimizer import MegatronOptimizer
from lightning_megatron_rl.utilities.notices import finish
from lightning_megatron_rl.utilities.text_files import user_path

if TYPE_CHECKING:
    from megatron.core.optimizer import OptimizerConfig

    from lightning_megatron_rl.models.hf.model import HFModel
    from lightning_megatron_rl.models.layers.routers import RoutingMode
    from lightning_megatron_rl.strategy.megatron import MegatronStrategy


class ModelModule(TakesSteps, ReportsSteps, RefusesMovedArguments):
    """A model on Megatron: builds it, scores sequences with it, updates it.

    What its last layer gives per token (log-probs, values) is `output_processor`, which subclasses choose.

    Args:
        model: Hugging Face hub name, or a directory that `save_pretrained` wrote.
        train: How the model is built and trained.
        init_from: Distributed checkpoint of a run of this model, in any layout, whose weights replace those of `model`.

    Raises:
        ValueError: Adapters on the weights of a distributed checkpoint.
    """

    default_lr = 1e-6

    def __init__(
        self,
        model: str,
        train: TrainingSettings | None = None,
        init_from: str | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(train, TrainingSettings | None):
            raise TypeError(f"{type(self).__name__}: train is a TrainingSettings, not a {type(train).__name__}.")
        self.train_settings = train or TrainingSettings()
        if init_from is not None and self.train_settings.lora is not None:
            raise ValueError(
                f"init_from={init_from!r} with lora: adapters belong to the weights of a model directory. Export"
                " the checkpoint's model (HFExport) and give the directory as `model`."
            )
        self.model_path = model
        self.init_from = init_from
        self._hf_model: HFModel | None = None

    # ---- model and optimizer ---------------------------------------------------------------------------------------

    @property
    def strategy(self) -> "MegatronStrategy":
        """The Trainer's strategy.

        Raises:
            TypeError: It is not a `MegatronStrategy`.
        """
        from lightning_megatron_rl.strategy.megatron import MegatronStrategy

        strategy = self.trainer.strategy
        if not isinstance(strategy, MegatronStrategy):
            raise TypeError(
                f"{type(self).__name__} runs on MegatronStrategy, the Trainer has {type(strategy).__name__}:"
                " use Trainer(strategy=MegatronStrategy(...)) or strategy='megatron'."
            )
        return strategy

    @property
    def hf_model(self) -> "HFModel":
        """The Hugging Face side of the model: config, tokenizer, conversion."""
        assert self._hf_model is not None, "the model is found in setup()"
        return self._hf_model

    def setup(self, stage: str) -> None:
        """Find and check the model, that the layout can hold it, and the optimizer's settings, before weights load."""
        self._setup_began = time.perf_counter()
        if stage == "fit":
            self.strategy.resolve_optimizer_config(self._optimizer_config())
        if self.strategy.offloads and not self.samples_responses:
            rank_zero_warn(
                f"offload_while_sampling={list(self.strategy.offloads)} does nothing: {type(self).__name__} has no"
                " sampler to make room for; leave it out."
            )
        if self._hf_model is None:
            self._hf_model = self.find_model()
        self.resolve_moe(self._hf_model.config, self.train_settings.model_config)
        layout = self.strategy.layout
        self._hf_model.check_layout(
            tensor_model_parallel_size=layout.tensor_model_parallel_size,
            pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=layout.virtual_pipeline_model_parallel_size,
            pipeline_split=PipelineSplit.from_overrides(self.train_settings.model_config),
            expert_model_parallel_size=layout.expert_model_parallel_size,
            expert_tensor_parallel_size=layout.expert_tensor_parallel_size,
            sequence_parallel=layout.sequence_parallel,
        )
        self._hf_model.check_computation(self.train_settings.model_config)
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
            self.train_settings.lora.check_layout(layout.tensor_model_parallel_size)
            self.strategy.trained_on_top_of = self.train_settings.lora.identity(self._hf_model.fingerprint)
        start = starting_checkpoint(self.trainer)
        if start is not None:
            self.strategy.check_checkpoint(start, training=stage == "fit")
            self._hf_model.check_checkpoint(start)
        if "model" not in self._modules:
            check_gpu(self, training=stage == "fit", engine=self.sampler, frozen_copies=self.frozen_copies)

    @property
    def logprob_chunk_size(self) -> int:
        """Tokens whose logits exist at one time; a model without an output layer has none."""
        return 0

    @property
    def sampler(self) -> RolloutEngine | None:
        """The engine that shares the GPU."""
        return None

    @property
    def frozen_copies(self) -> int:
        """Copies of the model that stay on the GPU beside it."""
        return 0

    @property
    def num_averages(self) -> int:
        """Averages of the weights that a fit keeps beside the optimizer's state."""
        return sum(isinstance(callback, WeightAverage) for callback in self.trainer.callbacks)  # type: ignore[attr-defined]

    def find_model(self) -> "HFModel":
        """Return the Hugging Face side of `model_path`."""
        from lightning_megatron_rl.models.hf.model import HFModel

        return HFModel(self.model_path, verify=self.train_settings.verify_model)

    def configure_model(self) -> None:
        """Build this rank's chunks with the model's weights; called again, it does nothing."""
        if "model" not in self._modules:
            chunks = self.build_chunks()
            self.attach_routers(chunks, self.strategy.root_device)
            self.model = nn.ModuleList(chunks)
            self.strategy.limit_threads(sum(parameter.numel() for parameter in self.model.parameters()))

    def build_chunks(self) -> list[nn.Module]:
        """Return freshly built chunks holding the weights of `model_path`, or of the checkpoint `init_from`."""
        chunks = list(
            self.hf_model.build_chunks(
                params_dtype=self.strategy.precision_plugin.params_dtype,
                layer_backend=self.train_settings.layer_backend,
                device=self.strategy.root_device,
                sequence_parallel=self.strategy.layout.sequence_parallel,
                load_weights=self.init_from is None,
                config_overrides=self.train_settings.model_config | self.moe_fields(),
                lora=self.train_settings.lora,
            )
        )
        if self.init_from is not None:
            self.strategy.load_weights(user_path(self.init_from), chunks)
        return chunks

    def teardown(self, stage: str) -> None:
        """Repeat what was lost in this run.

        Raises:
            RunFailedError: On every rank, if something failed that the run was for. Callbacks have had their teardown.
        """
        super().teardown(stage)
        if stage == "fit":
            run_on_all_ranks(finish)

    def configure_optimizers(self) -> Any:
        """Return Megatron's optimizer and the scheduler, stepped once per `global_step`."""
        optimizer = self.strategy.build_optimizer(self._optimizer_config())
        make_scheduler = self.train_settings.lr_scheduler
        if make_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make_scheduler(optimizer), "interval": "step"}}

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

    # ---- the two passes --------------------------------------------------------------------------------------------

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
        self.begin_routing(share, routing, self.reduce_tokens)
        was_training = [chunk.training for chunk in scored]
        for chunk in scored:
            chunk.eval()  # no dropout in a scoring pass
        step = partial(self._score_step, processor=processor or self.output_processor())
        outputs = self._run_schedule(share.microbatches, step, forward_only=True, chunks=scored)
        recorded = self.end_routing()
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
    ) -> dict[str, float]:
        """Compute gradients of the aggregated `token_loss` over all data-parallel ranks' sequences.

        Args:
            sequences: This replica's; field "weights" holds each token's weight (missing: 1, the token mean).
            token_loss: Loss per token.
            chunks: Another trained model's, e.g. a critic's.
            optimizer: That of those, which will take the step.
            processor: What the last stage of those makes of hidden states.
            prefix: Of that model's metrics.

        Returns:
            Metrics, equal on every rank; "policy/loss" among them.
        """
        trained = list(self.model) if chunks is None else chunks
        for chunk in trained:
            chunk.train()
        if chunks is None:
            self._step_tokens += sum(len(sequence.token_ids) for sequence in sequences)
        name = f"{prefix or self.metrics_prefix}/loss"
        token_losses: list[tuple[Tensor, Tensor]] = []
        step = partial(
            self._train_step,
            token_loss=token_loss,
            processor=processor or self.output_processor(),
            name=name,
            token_losses=token_losses,
        )
        share = self._share(sequences)
        replays = chunks is None and self.replays_routing
        self.begin_routing(share, "replay" if replays else "free", self.reduce_tokens)
        tallies = self._run_schedule(share.microbatches, step, forward_only=False, chunks=trained)
        metrics: dict[str, float] = {}
        if tallies:
            total = Tally(self.strategy.root_device)
            for tally in tallies:
                total.merge(tally)
            metrics = total.reduce(self.reduce_tokens).compute()
        metrics = self.strategy.broadcast_from_last_stage(metrics)
        self.end_routing()
        stepping = optimizer or self.strategy.optimizers[0]
        stepping.trace = UpdateTrace(trained, name, metrics[name], share.describe_samples(), token_losses)  # type: ignore[attr-defined]
        if chunks is not None:
            return metrics
        return {
            **metrics,
            **self.routing_metrics(),
            "perf/padding_frac": share.padding_frac,
            "perf/imbalance": share.imbalance,
        }

    def _share(self, sequences: list[TokenSequence]) -> Share:
        """This replica's part of all replicas' sequences, as micro-batches; a collective."""
        from megatron.core.utils import get_model_config

        config = get_model_config(self.model[0])
        return share_sequences(
            sequences,
            self.train_settings.max_tokens_per_microbatch,
            self.strategy.layout,
            self.strategy.root_device,
            packed=self.train_settings.packing,
            cost=SequenceCost(*sequence_flops(config, self.hf_model.config.vocab_size)),
            fp8=config.fp8 is not None,
        )

    def _run_schedule(
        self, microbatches: list[MicroBatch], step: Any, *, forward_only: bool, chunks: list[nn.Module]
    ) -> list[Any]:
        longest = max(microbatch.tokens.shape[1] for microbatch in microbatches)
        return self.strategy.forward_backward(
            microbatches,
            step,
            sequence_length=longest * self.strategy.layout.context_parallel_size,
            micro_batch_size=microbatches[0].tokens.shape[0],
            forward_only=forward_only,
            chunks=chunks,
        )
