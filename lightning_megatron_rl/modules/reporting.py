"""`StepReport`: what a run tells about itself: the table at start, times by phase, and what a step used."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities import rank_zero_only

from lightning_megatron_rl.modules.monitors import check_logged
from lightning_megatron_rl.parallel.distributed import peak_memory_gb, synchronize
from lightning_megatron_rl.strategy.products import asks_for_tf32
from lightning_megatron_rl.utilities.cpus import OthersLoad, busy_words, usable_cpus

if TYPE_CHECKING:
    from lightning_megatron_rl.modules.model import ModelModule

START_PHASE = "start"  # from the Trainer's call of `setup` to a model and a sampler that are ready
SYNC_PHASES = ("rollout", "weight_sync", "sleep", "offload")  # what may come before the step's own clock starts
MEMORY_PHASES = ("sleep", "offload")  # which a validation goes through as well as a step


class StepReport:
    """Prints the table at start and measures the steps of a module.

    Args:
        module: Whose steps they are.
    """

    def __init__(self, module: "ModelModule") -> None:
        self._module = module
        self.phase_seconds: dict[str, float] = {}  # of the current step, by phase
        self._known_phases = {START_PHASE}  # of all steps
        self.num_tokens = 0  # this replica's, in the updates of the current step
        self._setup_began = self._step_began = self._step_ended = time.monotonic()
        self._sync_seconds = 0.0  # of the current step, before its clock started
        self._validation_ended = 0.0  # the last one
        self.table: list[tuple[str, str]] = []  # at start, once it was printed
        self._others = OthersLoad()  # until then
        self._checked_monitors = False  # whether the first step of the fit has been logged
        self._has_logged_update = False  # of the current step

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what runs inside as ``time/<name>_s``, in the Trainer's profiler and in errors of collectives."""
        began, module = time.monotonic(), self._module
        profiler = module.trainer.profiler  # type: ignore[attr-defined]
        with profiler.profile(f"[{type(module).__name__}]{name}"), module.strategy.phase(name):
            yield
            synchronize(module.strategy.root_device)
        self.phase_seconds[name] = self.phase_seconds.get(name, 0.0) + time.monotonic() - began

    def begin_setup(self) -> None:
        """Take the time at which the Trainer called `setup`."""
        self._setup_began = time.monotonic()

    def begin_fit(self) -> None:
        """Forget what another Trainer did with this module; note what it took to get here."""
        self.phase_seconds.clear()
        self.phase_seconds[START_PHASE] = time.monotonic() - self._setup_began
        self._checked_monitors = False
        self.table = []

    def begin_step(self, batch: Any) -> None:
        """Start the step's clock; before the first step, print what the run is made of."""
        if not self.table:
            self.table = self._describe(batch)
            print_table("run", self.table)
        # the sync before the rollout belongs to the step, but callbacks run before this module's clock starts
        self._sync_seconds = sum(self.phase_seconds.get(name, 0.0) for name in SYNC_PHASES)
        self._step_began = time.monotonic()

    def end_validation(self) -> None:
        """Leave what a validation did out of the next step, but for the weights, which both sample with."""
        for name in MEMORY_PHASES:
            self.phase_seconds.pop(name, None)
        self._validation_ended = time.monotonic()

    def step_window(self) -> tuple[float, float]:
        """Return when the step began, the sync before it included, and when it ended. # seconds of time.monotonic

        A sync before a validation is not included: the sampler drew the validation's responses in between.
        """
        return max(self._step_began - self._sync_seconds, self._validation_ended), self._step_ended

    def log_update(self) -> None:
        """Log gradient norm and learning rate of the step that was taken, and how many were skipped."""
        module = self._module
        optimizer: Any = module.strategy.optimizers[0]
        module.log_metrics(
            {
                f"{module.metrics_prefix}/grad_norm": optimizer.grad_norm,
                f"{module.metrics_prefix}/lr": optimizer.last_lr,
                **optimizer.take_step_metrics(module.metrics_prefix),
            }
        )
        self._has_logged_update = True
        self._step_ended = time.monotonic()  # what callbacks do at the end of a batch, an export say, is no part of it

    def end_step(self) -> None:
        """Log what is known only at the end of a step: times and memory; a collective."""
        module = self._module
        if not self._has_logged_update:  # an `optimizer_step` of the user's own
            self.log_update()
        self._has_logged_update = False
        self._known_phases |= self.phase_seconds.keys()
        # 0 in a step without the phase: Lightning's logs would repeat a value that is left out
        local = {f"time/{name}_s": self.phase_seconds.get(name, 0.0) for name in sorted(self._known_phases)}
        local["time/step_s"] = self._step_ended - self._step_began + self._sync_seconds
        local["perf/peak_mem_gb"] = peak_memory_gb(module.strategy.root_device)
        local |= module.rank_metrics()
        totals = self._over_ranks(module.rank_totals(), torch.distributed.ReduceOp.SUM)
        tokens = module.reduce_on_device(torch.tensor([self.num_tokens], dtype=torch.float64), "sum").item()
        self.phase_seconds.clear()
        self.num_tokens = 0
        largest = self._over_ranks(local, torch.distributed.ReduceOp.MAX)
        module.log_metrics(
            {
                "perf/tokens_per_s_per_gpu": tokens / largest["time/step_s"] / module.trainer.world_size,
                **largest,
                **totals,
            }
        )
        if not self._checked_monitors:
            self._checked_monitors = True
            check_logged(module.trainer)

    def _over_ranks(self, metrics: dict[str, float], reduce_op: Any) -> dict[str, float]:
        values = torch.tensor(list(metrics.values()), dtype=torch.float64, device=self._module.strategy.root_device)
        if metrics:
            torch.distributed.all_reduce(values, op=reduce_op)
        return dict(zip(metrics, values.tolist(), strict=True))

    # ---- the table at start ----------------------------------------------------------------------------------------

    def _describe(self, batch: Any) -> list[tuple[str, str]]:
        module, strategy, lora = self._module, self._module.strategy, self._module.train_settings.lora
        parameters = sum(parameter.numel() for parameter in module.model.parameters())
        trained = sum(parameter.numel() for parameter in module.model.parameters() if parameter.requires_grad)
        optimizer = "distributed optimizer" if strategy.use_distributed_optimizer else "optimizer on every replica"
        fp32_on_gpu = strategy.root_device.type == "cuda" and strategy.precision_plugin.precision == "32-true"
        products = ", products in TF32" if fp32_on_gpu and asks_for_tf32() else ""
        model_type = module.hf_model.config.model_type
        return [
            ("model", f"{module.model_path} ({model_type}), {parameters:,} parameters on this rank"),
            ("layout", strategy.layout.describe(module.trainer.world_size)),
            ("precision", f"{strategy.precision_plugin.precision}{products}, {optimizer}"),
            *([] if lora is None else [("LoRA", f"{lora.describe()}; {trained:,} parameters are trained")]),
            *module.describe_batch(batch),
            *module.describe_plan(),
            *(module.routers.describe() if module.routers is not None else []),
            *self._describe_cpus(),
        ]

    def _describe_cpus(self) -> list[tuple[str, str]]:
        """Return rows about the CPUs of this machine, and about others that keep them busy."""
        cpus, threads = usable_cpus(), torch.get_num_threads()
        rows = [("CPUs", f"{cpus.count} by {cpus.source}; {threads} thread(s) of torch on each rank")]
        busy = busy_words(self._others.cpus(), cpus.count)
        return [*rows, *([("load", busy)] if busy else []), *([("CPU quota", cpus.problem)] if cpus.problem else [])]


@rank_zero_only
def print_table(title: str, rows: list[tuple[str, str]]) -> None:
    """Print two columns on rank 0."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")  # a path is one long word
    for row in rows:
        table.add_row(*map(Text, row))  # brackets are no markup
    Console().print(table)
