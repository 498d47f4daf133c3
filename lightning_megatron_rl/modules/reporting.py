"""What a run tells about itself: the table at start, metrics that are equal on every rank, and times by phase."""

import time
import warnings
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from lightning_megatron_rl.modules.exporting import ExportsWeights
from lightning_megatron_rl.modules.monitors import check_logged
from lightning_megatron_rl.parallel.distributed import peak_memory_gb, synchronize
from lightning_megatron_rl.strategy.products import asks_for_tf32
from lightning_megatron_rl.utilities.cpus import OthersLoad, busy_words, usable_cpus

START_PHASE = "start"  # from the Trainer's call of `setup` to a model and a sampler that are ready
SYNC_PHASES = ("weight_sync", "sleep", "offload")  # what may come before the step's own clock starts


class ReportsSteps(ExportsWeights):
    """The part of `ModelModule` that prints, logs and measures."""

    metrics_prefix = "policy"  # of the logged loss, gradient norm and learning rate

    samples_responses = False  # whether an engine works in turn with the trainer
    model_path: str

    def __init__(self) -> None:
        super().__init__()
        self.phase_seconds: dict[str, float] = {}  # of the current step, by phase
        self._step_tokens = 0  # this replica's tokens in the updates of the current step
        self._setup_began = time.perf_counter()  # when the Trainer called `setup`
        self._sync_seconds = 0.0  # of the current step, before its clock started
        self._described = False  # whether the table at start was printed
        self._others = OthersLoad()  # until then
        self._checked_monitors = False  # whether the first step of the fit has been logged

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what runs inside as ``time/<name>_s``, in the Trainer's profiler and in errors of collectives."""
        started = time.perf_counter()
        profiler = self.trainer.profiler  # type: ignore[attr-defined]
        with profiler.profile(f"[{type(self).__name__}]{name}"), self.strategy.phase(name):
            yield
            synchronize(self.strategy.root_device)
        self.phase_seconds[name] = self.phase_seconds.get(name, 0.0) + time.perf_counter() - started

    def on_fit_start(self) -> None:
        """Forget the times of what another Trainer did with this module; note what it took to get here."""
        self.phase_seconds.clear()
        self.phase_seconds[START_PHASE] = time.perf_counter() - self._setup_began
        self._checked_monitors = False

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Start the step's clock; before the first step, print what the run is made of."""
        if not self._described:
            self._described = True
            self._print_start_table(batch)
        # the sync before the rollout belongs to the step, but callbacks run before this module's clock starts
        self._sync_seconds = sum(self.phase_seconds.get(name, 0.0) for name in SYNC_PHASES)
        self._step_started = time.perf_counter()

    @abstractmethod
    def describe_routers(self) -> list[tuple[str, str]]:
        """Return rows for the table at start: what is in force for routers."""

    def describe_batch(self, batch: Any) -> list[tuple[str, str]]:
        """Return rows for the table at start: what one batch means, with its arithmetic."""
        return []

    @property
    def _products(self) -> str:
        """What to add to the precision's name: that fp32 matrices are multiplied as TF32."""
        strategy = self.strategy
        fp32_on_gpu = strategy.root_device.type == "cuda" and strategy.precision_plugin.precision == "32-true"
        return ", products in TF32" if fp32_on_gpu and asks_for_tf32() else ""

    @property
    def _microbatch_row(self) -> tuple[str, str]:
        settings = self.train_settings
        packing = "packed" if settings.packing else "padded"
        return "tokens per micro-batch", f"at most {settings.max_tokens_per_microbatch}, {packing}"

    def _print_start_table(self, batch: Any) -> None:
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        optimizer = "distributed optimizer" if self.strategy.use_distributed_optimizer else "optimizer on every replica"
        trained = sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)
        lora = self.train_settings.lora
        rows = [
            ("model", f"{self.model_path} ({self.hf_model.config.model_type}), {parameters:,} parameters on this rank"),
            ("layout", self.strategy.layout.describe(self.trainer.world_size)),
            ("precision", f"{self.strategy.precision_plugin.precision}{self._products}, {optimizer}"),
            *([] if lora is None else [("LoRA", f"{lora.describe()}; {trained:,} parameters are trained")]),
            *self.describe_batch(batch),
            *self.describe_routers(),
            *self._describe_cpus(),
        ]
        print_table("run", rows)

    def _describe_cpus(self) -> list[tuple[str, str]]:
        """Return rows about the CPUs of this machine, and about others that keep them busy."""
        cpus, threads = usable_cpus(), torch.get_num_threads()
        rows = [("CPUs", f"{cpus.count} by {cpus.source}; {threads} thread(s) of torch on each rank")]
        busy = busy_words(self._others.cpus(), cpus.count)
        return [*rows, *([("load", busy)] if busy else []), *([("CPU quota", cpus.problem)] if cpus.problem else [])]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log what is known only after the optimizer step: gradient norm, learning rate and times."""
        optimizer = self.trainer.strategy.optimizers[0]
        local = {f"time/{name}_s": seconds for name, seconds in sorted(self.phase_seconds.items())}
        # 0 after the first step: Lightning's logs would repeat a value that is left out
        local.setdefault("time/start_s", 0.0)
        local["time/step_s"] = time.perf_counter() - self._step_started + self._sync_seconds
        local["perf/peak_mem_gb"] = peak_memory_gb(self.strategy.root_device)
        local |= self.rank_metrics()
        tokens = self.reduce_on_device(torch.tensor([self._step_tokens], dtype=torch.float64), "sum").item()
        self.phase_seconds.clear()
        self._step_tokens = 0
        largest = self._largest_of_ranks(local)
        self.log_metrics(
            {
                f"{self.metrics_prefix}/grad_norm": optimizer.grad_norm,  # type: ignore[attr-defined]
                f"{self.metrics_prefix}/lr": optimizer.last_lr,  # type: ignore[attr-defined]
                **optimizer.take_step_metrics(self.metrics_prefix),  # type: ignore[attr-defined]
                "perf/tokens_per_s_per_gpu": tokens / largest["time/step_s"] / self.trainer.world_size,
                **largest,
            }
        )
        if not self._checked_monitors:
            self._checked_monitors = True
            check_logged(self.trainer)

    def evaluation_metrics(self, stage: str, sets: Sequence[str]) -> list[str]:
        """Return the names that a validation of these sets logs; none here."""
        return []

    def reward_components(self) -> list[str]:
        """Return the names of its rewards, if it has any."""
        return []

    def rank_metrics(self) -> dict[str, float]:
        """Return what more this rank has to say; the largest of all ranks is logged."""
        return {}

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
