"""`PolicyModule`: a Hugging Face language model trained by Megatron, and the two passes every method is made of."""

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Optional

import torch
from lightning.pytorch.cli import LRSchedulerCallable
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn

from lightning_megatron_rl.algorithms.tally import Tally
from lightning_megatron_rl.data.packing import MicroBatch, TokenSequence, scatter_to_sequences
from lightning_megatron_rl.data.planning import SequenceCost
from lightning_megatron_rl.models.flops import sequence_flops
from lightning_megatron_rl.models.layout_check import PipelineSplit
from lightning_megatron_rl.models.lora import LoRASettings
from lightning_megatron_rl.models.moe import MoESettings
from lightning_megatron_rl.modules.exporting import ExportsWeights
from lightning_megatron_rl.modules.sharing import Share, share_sequences
from lightning_megatron_rl.modules.steps import TakesSteps, TokenLoss
from lightning_megatron_rl.strategy.distributed import context_parallel_sum, peak_memory_gb, synchronize

if TYPE_CHECKING:
    from megatron.core.optimizer import OptimizerConfig

    from lightning_megatron_rl.models.hf_model import HFModel
    from lightning_megatron_rl.models.routers import RoutingMode
    from lightning_megatron_rl.strategy.megatron import MegatronStrategy


@dataclass  # not frozen: `Trainer.predict` moves results to the CPU, and writes the fields of dataclasses to do so
class Scores:
    """Log-probs and entropies of sequences, aligned with their tokens; position 0 has none and holds 0."""

    logprobs: list[Tensor]  # per sequence: [tokens]
    entropies: list[Tensor]  # per sequence: [tokens]
    routing: list[Tensor]  # per sequence, if recorded: [tokens, expert layers of this pipeline stage, topk] int16


class PolicyModule(TakesSteps, ExportsWeights):
    """A language model on Megatron: builds it, scores sequences with it, updates it.

    Args:
        model: Hugging Face hub name, or a directory that `save_pretrained` wrote.
        optimizer: Megatron's own `OptimizerConfig` (lr, weight_decay, adam_beta2, ...).
        lr_scheduler: Called with the optimizer; stepped once per `global_step`.
        max_tokens_per_microbatch: Token budget of one micro-batch, padding included.
        packing: Lay sequences end to end in a micro-batch instead of padding each to the longest.
        layer_backend: "auto", "torch" or "transformer_engine"; auto takes TransformerEngine on CUDA if installed.
        model_config: Overrides of Megatron's `TransformerConfig`, e.g. ``{"recompute_granularity": "full"}``.
        logprob_chunk_size: Tokens whose fp32 logits exist at one time.
        moe: How the routers of a mixture-of-experts model are trained.
        lora: Train low-rank adapters and leave the model's own weights as they are.
    """

    temperature: float = 1.0  # of the distribution that is scored: logits are divided by it in every pass

    def __init__(
        self,
        model: str,
        optimizer: Optional["OptimizerConfig"] = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        max_tokens_per_microbatch: int = 8192,
        packing: bool = True,
        layer_backend: Literal["auto", "torch", "transformer_engine"] = "auto",
        model_config: dict[str, Any] | None = None,
        logprob_chunk_size: int = 1024,
        moe: MoESettings | None = None,
        lora: LoRASettings | None = None,
    ) -> None:
        super().__init__()
        for name, value in (
            ("max_tokens_per_microbatch", max_tokens_per_microbatch),
            ("logprob_chunk_size", logprob_chunk_size),
        ):
            if value < 1:
                raise ValueError(f"{name}={value}: it is a number of tokens, at least 1.")
        self.model_path = model
        self.optimizer_config = optimizer
        self.lr_scheduler = lr_scheduler
        self.max_tokens_per_microbatch = max_tokens_per_microbatch
        self.packing = packing
        self.layer_backend = layer_backend
        self.model_config = model_config or {}
        self.logprob_chunk_size = logprob_chunk_size
        self.moe = moe
        self.lora = lora
        self.phase_seconds: dict[str, float] = {}  # of the current step, by phase
        self._hf_model: HFModel | None = None
        self._step_tokens = 0  # this replica's tokens in the updates of the current step
        self._described = False  # whether the table at start was printed

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
        """Find the model, check that the layout can hold it and the optimizer's settings, before weights are loaded."""
        from lightning_megatron_rl.models.hf_model import HFModel

        if stage == "fit":
            self.strategy.resolve_optimizer_config(self._optimizer_config())
        if self._hf_model is None:
            self._hf_model = HFModel(self.model_path)
        self.resolve_moe(self._hf_model.config, self.model_config)
        layout = self.strategy.layout
        self._hf_model.check_layout(
            tensor_model_parallel_size=layout.tensor_model_parallel_size,
            pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=layout.virtual_pipeline_model_parallel_size,
            pipeline_split=PipelineSplit.from_overrides(self.model_config),
            expert_model_parallel_size=layout.expert_model_parallel_size,
            expert_tensor_parallel_size=layout.expert_tensor_parallel_size,
            sequence_parallel=layout.sequence_parallel,
        )
        self.strategy.trained_on_top_of = None
        if self.lora is not None:
            self.lora.check_layout(layout.tensor_model_parallel_size)
            self.strategy.trained_on_top_of = self.lora.identity(self._hf_model.fingerprint)

    def configure_model(self) -> None:
        """Build this rank's chunks with the model's weights; called again, it does nothing."""
        if "model" not in self._modules:
            chunks = self.build_chunks()
            self.attach_routers(chunks, self.strategy.root_device)
            self.model = nn.ModuleList(chunks)

    def build_chunks(self) -> list[nn.Module]:
        """Return freshly built chunks holding the weights of `model_path`."""
        return list(
            self.hf_model.build_chunks(
                params_dtype=self.strategy.precision_plugin.params_dtype,
                layer_backend=self.layer_backend,
                device=self.strategy.root_device,
                sequence_parallel=self.strategy.layout.sequence_parallel,
                config_overrides=self.model_config | self.moe_fields(),
                lora=self.lora,
            )
        )

    def configure_optimizers(self) -> Any:
        """Return Megatron's optimizer and the scheduler, stepped once per `global_step`."""
        optimizer = self.strategy.build_optimizer(self._optimizer_config())
        if self.lr_scheduler is None:
            return optimizer
        scheduler = {"scheduler": self.lr_scheduler(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def _optimizer_config(self) -> "OptimizerConfig":
        from megatron.core.optimizer import OptimizerConfig

        return self.optimizer_config or OptimizerConfig(lr=1e-6, weight_decay=0.0)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """Do nothing: Lightning zeroes after `training_step`, when Megatron's gradients are already there."""

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Leave the batch on the CPU: sequences are laid out there, and only micro-batches go to the device."""
        return batch

    # ---- the two passes --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def score(
        self,
        sequences: list[TokenSequence],
        chunks: list[nn.Module] | None = None,
        *,
        routing: "RoutingMode" = "free",
    ) -> Scores:
        """Return log-probs and entropies of `sequences` under the policy, or under other `chunks`.

        Every rank of the replica gets them. Log-probs are of the distribution that is sampled: logits divided by
        `temperature`. `routing` says whether the policy's choice of experts is recorded or each sequence's replayed.
        """
        scored = list(self.model) if chunks is None else chunks
        share = self._share(sequences)
        self.begin_routing(share, routing, self.reduce_tokens)
        was_training = [chunk.training for chunk in scored]
        for chunk in scored:
            chunk.eval()  # no dropout in a log-prob pass
        outputs = self._run_schedule(share.microbatches, self._score_step, forward_only=True, chunks=scored)
        recorded = self.end_routing()
        for chunk, training in zip(scored, was_training, strict=True):
            chunk.train(training)
        values: Tensor | None = None
        if outputs:  # only the last pipeline stage has any
            rows = [
                scatter_to_sequences([output[row] for output in outputs], share.microbatches, share.sequences)
                for row in (0, 1)
            ]
            values = torch.stack([torch.cat([torch.empty(0, device=outputs[0].device), *row]) for row in rows])
            values = context_parallel_sum(values).cpu()
        whole = self.strategy.broadcast_from_last_stage(values)
        assert whole is not None
        found = share.give_back(list(whole.split([len(sequence) for sequence in share.sequences], dim=1)))
        chosen = share.give_back(recorded) if routing == "record" else []
        return Scores([both[0] for both in found], [both[1] for both in found], chosen)

    def update(self, sequences: list[TokenSequence], token_loss: TokenLoss) -> dict[str, float]:
        """Compute gradients of the aggregated `token_loss` over all data-parallel ranks' sequences.

        Args:
            sequences: This replica's; field "weights" holds each token's weight (missing: 1, the token mean).
            token_loss: Loss per token.

        Returns:
            Metrics, equal on every rank; "policy/loss" among them.
        """
        for chunk in self.model:
            chunk.train()
        self._step_tokens += sum(len(sequence.token_ids) for sequence in sequences)
        step = partial(self._train_step, token_loss=token_loss)
        share = self._share(sequences)
        self.begin_routing(share, "replay" if self.replays_routing else "free", self.reduce_tokens)
        tallies = self._run_schedule(share.microbatches, step, forward_only=False, chunks=list(self.model))
        metrics: dict[str, float] = {}
        if tallies:
            total = Tally(self.strategy.root_device)
            for tally in tallies:
                total.merge(tally)
            metrics = total.reduce(self.reduce_tokens).compute()
        metrics = self.strategy.broadcast_from_last_stage(metrics)
        self.end_routing()
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
            self.max_tokens_per_microbatch,
            self.strategy.layout,
            self.strategy.root_device,
            packed=self.packing,
            cost=SequenceCost(*sequence_flops(config, self.hf_model.config.vocab_size)),
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

    # ---- phases and logging ----------------------------------------------------------------------------------------

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what runs inside as ``time/<name>_s``, in the Trainer's profiler and in errors of collectives."""
        started = time.perf_counter()
        profiler = self.trainer.profiler  # type: ignore[attr-defined]
        with profiler.profile(f"[{type(self).__name__}]{name}"), self.strategy.phase(name):
            yield
            synchronize(self.strategy.root_device)
        self.phase_seconds[name] = self.phase_seconds.get(name, 0.0) + time.perf_counter() - started

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Start the step's clock; before the first step, print what the run is made of."""
        if not self._described:
            self._described = True
            self._print_start_table(batch)
        self._step_started = time.perf_counter()

    def describe_batch(self, batch: Any) -> list[tuple[str, str]]:
        """Return rows for the table at start: what one batch means, with its arithmetic."""
        return []

    @property
    def _packing_name(self) -> str:
        return "packed" if self.packing else "padded"

    def _print_start_table(self, batch: Any) -> None:
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        optimizer = "distributed optimizer" if self.strategy.use_distributed_optimizer else "optimizer on every replica"
        trained = sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)
        rows = [
            ("model", f"{self.model_path} ({self.hf_model.config.model_type}), {parameters:,} parameters on this rank"),
            ("layout", self.strategy.layout.describe(self.trainer.world_size)),
            ("precision", f"{self.strategy.precision_plugin.precision}, {optimizer}"),
            *([] if self.lora is None else [("LoRA", f"{self.lora.describe()}; {trained:,} parameters are trained")]),
            *self.describe_batch(batch),
            *self.describe_moe(),
        ]
        print_table("run", rows)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log what is known only after the optimizer step: gradient norm, learning rate and times."""
        optimizer = self.trainer.strategy.optimizers[0]
        local = {f"time/{name}_s": seconds for name, seconds in sorted(self.phase_seconds.items())}
        # the sync before the rollout belongs to the step, but callbacks run before this module's clock starts
        sync_s = self.phase_seconds.get("weight_sync", 0.0)
        local["time/step_s"] = time.perf_counter() - self._step_started + sync_s
        local["perf/peak_mem_gb"] = peak_memory_gb(self.strategy.root_device)
        tokens = self.reduce_on_device(torch.tensor([self._step_tokens], dtype=torch.float64), "sum").item()
        self.phase_seconds.clear()
        self._step_tokens = 0
        largest = self._largest_of_ranks(local)
        self.log_metrics(
            {
                "policy/grad_norm": optimizer.grad_norm,  # type: ignore[attr-defined]
                "policy/lr": optimizer.last_lr,  # type: ignore[attr-defined]
                **optimizer.take_step_metrics(),  # type: ignore[attr-defined]
                "perf/tokens_per_s_per_gpu": tokens / largest["time/step_s"] / self.trainer.world_size,
                **largest,
            }
        )

    def _largest_of_ranks(self, metrics: dict[str, float]) -> dict[str, float]:
        values = torch.tensor(list(metrics.values()), dtype=torch.float64, device=self.strategy.root_device)
        torch.distributed.all_reduce(values, op=torch.distributed.ReduceOp.MAX)
        return dict(zip(metrics, values.tolist(), strict=True))

    def log_metrics(self, metrics: dict[str, float], prog_bar: tuple[str, ...] = ()) -> None:
        """Log values that are already equal on every rank (which is why Lightning's hint at sync_dist is silenced)."""
        warnings.filterwarnings("ignore", message=r".*sync_dist=True.*")
        for name, value in metrics.items():
            self.log(name, value, prog_bar=name in prog_bar, sync_dist=False, batch_size=1)

    def reduce_on_device(self, vector: Tensor, op: Literal["sum", "max"]) -> Tensor:
        """Reduce a CPU vector over the model replicas, for a `Tally` that lives on the CPU."""
        return self.strategy.data_parallel_all_reduce(vector.to(self.strategy.root_device), op).cpu()

    def reduce_tokens(self, vector: Tensor, op: Literal["sum", "max"] = "sum") -> Tensor:
        """Reduce what belongs to this rank's tokens over the ranks that share the batch's tokens."""
        return self.strategy.data_parallel_all_reduce(vector, op, with_context_parallel=True)


@rank_zero_only
def print_table(title: str, rows: list[tuple[str, str]]) -> None:
    """Print two columns on rank 0."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
