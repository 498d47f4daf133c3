"""One layout, as each of its processes runs it: a plain Trainer on the frozen batch, and what it measures."""

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch import Tensor

from lightning_megatron_rl.models.overrides import DISPATCHER
from lightning_megatron_rl.modules.grpo import GRPOModule
from lightning_megatron_rl.modules.policy import PolicyModule
from lightning_megatron_rl.modules.ppo import PPOModule
from lightning_megatron_rl.modules.training import TrainingSettings
from lightning_megatron_rl.parallel.nodes import NodeSettings
from lightning_megatron_rl.planner.divisibility import PipelineSplit
from lightning_megatron_rl.strategy.megatron import MegatronStrategy
from lightning_megatron_rl.verify.batch import FrozenBatch
from lightning_megatron_rl.verify.gradients import export_gradients, perturb
from lightning_megatron_rl.verify.layouts import Layout
from lightning_megatron_rl.verify.pool import trainer_size

# A step that is large enough to be seen in fp32 weights, and an epsilon that keeps Adam from turning the rounding noise
# of tiny gradients into full steps: its update is then nearly linear in the gradient.
_LR, _ADAM_EPS = 1e-3, 1e-3
START = "start"  # directory of the reference's weights as they were loaded
_NAMES = "names.json"
_STAGE_OVERRIDES = {field.name for field in fields(PipelineSplit)}


@dataclass
class Subject:
    """What is verified: a fresh module and the strategy that runs it."""

    module: PolicyModule
    strategy: MegatronStrategy
    trainer: dict[str, Any] = field(default_factory=dict)  # arguments of the Trainer, such as gradient_clip_val


Build = Callable[[dict[str, Any]], Subject]
"""``layout -> Subject``, where `layout` are arguments of `MegatronStrategy`; a function at the top of a module."""


@dataclass
class Measurement:
    """What one rank saw; lists have one element per step."""

    rank: int
    losses: list[float]
    grad_norms: list[float]
    logprobs: dict[int, Tensor]  # before the first step, by index in the batch: [tokens]
    metrics: list[dict[str, float]]  # everything that was logged
    step_s: float  # of the last step
    peak_memory_gb: float
    weight_errors: list[dict[str, float]]  # ||w - reference|| of each parameter
    gradient_errors: list[dict[str, float]]  # ||g - reference|| of each parameter, per update: a step may have several
    checksum: str  # rank 0: of all weights at the end
    num_experts: int
    balance_coeff: float  # of the load-balancing loss of a mixture of experts
    # of the reference, like their errors
    weight_norms: list[dict[str, float]] = field(default_factory=list)
    movements: list[dict[str, float]] = field(default_factory=list)  # ||w - w at the start||
    gradient_norms: list[dict[str, float]] = field(default_factory=list)


class LayoutRefusedError(ValueError):
    """The module, the model or the strategy refused the layout before anything was computed."""


class LocalProcesses(TorchElasticEnvironment):
    """Processes of this machine that are there already, with their ranks in RANK and WORLD_SIZE."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Accept what was started."""


def run_layout(
    build: Build,
    batch: FrozenBatch,
    layout: Layout,
    *,
    max_tokens_per_microbatch: int | None,
    steps: int,
    device: str,
    timeout_s: float,
    directory: Path,
    is_reference: bool,
    perturbation: int | None = None,
) -> Measurement:
    """Train on `batch` for `steps` steps as one rank of `layout`.

    Args:
        build: Makes what is trained.
        batch: The batch of every step.
        layout: The layout.
        max_tokens_per_microbatch: Token budget; None for the module's own.
        steps: Optimizer steps of the Trainer.
        device: "cpu" or "cuda".
        timeout_s: Deadline of a collective.
        directory: Where the reference leaves its weights and others find them.
        is_reference: Whether to write the weights there, or to compare with them.
        perturbation: Seed of rounding errors by which all weights are moved first, to see what rounding does; or None.

    Raises:
        LayoutRefusedError: A `ValueError` before the first step.
    """
    pl.seed_everything(1234, verbose=False)
    reset_peak_memory(device)
    probe = Probe(batch, directory, is_reference=is_reference, perturbation=perturbation)
    try:
        subject = build(layout.strategy)
        module, strategy = subject.module, subject.strategy
        module.train_settings = verification_settings(module.train_settings, layout, max_tokens_per_microbatch)
        if isinstance(module, GRPOModule):
            assert batch.samples is not None
            module.replay(batch.samples)
        if isinstance(module, PPOModule):  # while a critic warms up, what is compared stands still
            module.critic_settings = replace(module.critic_settings, warmup_rollouts=0)
        strategy.cluster_environment = LocalProcesses()
        strategy.timeout_s = timeout_s
        strategy.nodes = NodeSettings(tensor_parallel_across_nodes=True)  # of one host at most, whatever it is told
        devices, num_nodes = trainer_size(layout.world_size)
        trainer = pl.Trainer(
            **subject.trainer,
            strategy=strategy,
            accelerator=device,
            devices=devices,
            num_nodes=num_nodes,
            precision="32-true",
            max_steps=steps,
            callbacks=[probe],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            limit_val_batches=0,
            use_distributed_sampler=False,  # `FrozenData` shards by itself, in order
        )
        trainer.fit(module, FrozenData(batch, steps, as_prompts=isinstance(module, GRPOModule)))
    except ValueError as error:
        if probe.has_begun:
            raise
        raise LayoutRefusedError(str(error)) from error
    return probe.measurement(module, device)


def verification_settings(
    settings: TrainingSettings, layout: Layout, max_tokens_per_microbatch: int | None
) -> TrainingSettings:
    """Return a module's settings without those that would hide a difference or that `layout` cannot take."""
    from megatron.core.optimizer import OptimizerConfig

    config, overrides = settings.optimizer or OptimizerConfig(weight_decay=0.0), settings.model_config
    if layout.strategy["pipeline_model_parallel_size"] == 1:  # there is no first and last stage to give layers to
        overrides = {name: value for name, value in overrides.items() if name not in _STAGE_OVERRIDES}
    if layout.strategy["expert_model_parallel_size"] == 1:  # no tokens travel
        overrides = {name: value for name, value in overrides.items() if name != DISPATCHER}
    return replace(
        settings,
        optimizer=replace(config, lr=_LR, min_lr=None, adam_eps=_ADAM_EPS),
        lr_scheduler=None,
        max_tokens_per_microbatch=max_tokens_per_microbatch or settings.token_budget,
        model_config=overrides,
    )


class FrozenData(pl.LightningDataModule):
    """The frozen batch, once per step; data-parallel rank r gets every dp-th item of it."""

    def __init__(self, batch: FrozenBatch, steps: int, *, as_prompts: bool) -> None:
        super().__init__()
        self.items: list[Any] = list(batch.prompts if as_prompts else batch.sequences)
        self.steps = steps

    def train_dataloader(self) -> Any:
        """Return the same batch `steps` times.

        Raises:
            ValueError: Not an item for each replica.
        """
        shard: dict[str, int] = self.trainer.distributed_sampler_kwargs  # type: ignore[union-attr, assignment]
        mine = self.items[shard["rank"] :: shard["num_replicas"]]
        if len(self.items) < shard["num_replicas"]:
            raise ValueError(f"{len(self.items)} items in the batch for {shard['num_replicas']} model replicas.")
        return torch.utils.data.DataLoader(mine * self.steps, batch_size=len(mine), collate_fn=list, shuffle=False)  # type: ignore[arg-type]

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Leave the records on the host: what the device needs is packed first."""
        return batch


class Probe(pl.Callback):
    """Measures a run: log-probs before it, gradients before each update, loss and weights after each step."""

    def __init__(
        self, batch: FrozenBatch, directory: Path, *, is_reference: bool, perturbation: int | None = None
    ) -> None:
        self.batch = batch
        self.directory = directory
        self.is_reference = is_reference
        self.perturbation = perturbation
        self.has_begun = False
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.metrics: list[dict[str, float]] = []
        self.weights = Comparison(directory, "weights", writes=is_reference)
        self.gradients = Comparison(directory, "gradients", writes=is_reference)
        self.movements: list[dict[str, float]] = []
        self.logprobs: dict[int, Tensor] = {}
        self.step_s = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Score the batch with the weights as they were loaded."""
        if self.perturbation is not None:
            perturb(list(pl_module.model), self.perturbation)
        shard = trainer.strategy.distributed_sampler_kwargs  # type: ignore[attr-defined]
        indices = range(shard["rank"], len(self.batch.sequences), shard["num_replicas"])
        scores = pl_module.score([self.batch.sequences[index] for index in indices])
        self.logprobs = dict(zip(indices, scores.logprobs, strict=True))
        if self.is_reference:
            write_tensors(pl_module.export_weights(torch.float32), self.directory / START)
        self.has_begun = True

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Start the clock."""
        self._take_metrics(trainer)
        self._started = time.perf_counter()
        self._paused = 0.0

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        """Compare the gradients of an update."""
        started = time.perf_counter()
        self.gradients.take(export_gradients(pl_module))
        self._paused += time.perf_counter() - started

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Note what the step did."""
        self.losses.append(float(outputs["loss"]))
        self.step_s = time.perf_counter() - self._started - self._paused
        self.grad_norms.append(float(trainer.optimizers[0].grad_norm))  # type: ignore[attr-defined]
        self.weights.take(pl_module.export_weights(torch.float32))
        if self.is_reference:
            self.movements.append(distances(self.weights.last, self.directory / START))

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Take what the module logged after the last step."""
        self._take_metrics(trainer)

    def _take_metrics(self, trainer: pl.Trainer) -> None:
        if len(self.metrics) < len(self.losses):  # modules log in their own hook, which comes after this callback's
            self.metrics.append({name: float(value) for name, value in trainer.logged_metrics.items()})

    def measurement(self, module: PolicyModule, device: str) -> Measurement:
        """Return what was seen."""
        from megatron.core.utils import get_model_config

        return Measurement(
            rank=int(os.environ["RANK"]),
            losses=self.losses,
            grad_norms=self.grad_norms,
            logprobs=self.logprobs,
            metrics=self.metrics,
            step_s=self.step_s,
            peak_memory_gb=peak_memory_gb(device),
            weight_errors=self.weights.errors,
            gradient_errors=self.gradients.errors,
            checksum=self.weights.checksum,
            num_experts=get_model_config(module.model[0]).num_moe_experts or 0,  # type: ignore[index]
            balance_coeff=(module.moe_in_force.aux_loss_coeff or 0.0) if module.moe_in_force else 0.0,
            weight_norms=self.weights.norms,
            movements=self.movements,
            gradient_norms=self.gradients.norms,
        )


class Comparison:
    """Tensors of each step of a run and their distances to those of the reference, which writes them to files.

    Args:
        directory: Of the files.
        kind: What they are.
        writes: Whether this is the reference.
    """

    def __init__(self, directory: Path, kind: str, *, writes: bool) -> None:
        self._directory, self._kind, self._writes = directory, kind, writes
        self.errors: list[dict[str, float]] = []  # per call of `take`: ||tensor - reference||
        self.norms: list[dict[str, float]] = []  # ||tensor||, of the reference
        self.checksum = ""  # of the last tensors

    @property
    def last(self) -> Path:
        """Where the reference's last tensors are."""
        return self._directory / f"{self._kind}-{len(self.errors)}"

    def take(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Write or compare the tensors of one more step."""
        path = self._directory / f"{self._kind}-{len(self.errors) + 1}"
        if self._writes:
            norms, self.checksum = write_tensors(tensors, path)
            self.norms.append(norms)
            self.errors.append(dict.fromkeys(norms, 0.0))
        else:
            errors, self.checksum = compare_tensors(tensors, path)
            self.errors.append(errors)


def write_tensors(tensors: Iterator[tuple[str, Tensor]], path: Path) -> tuple[dict[str, float], str]:
    """Write tensors to `path`; return the norm of each, in their order, and the checksum of all."""
    path.mkdir()
    digests: dict[str, bytes] = {}
    norms: dict[str, float] = {}
    for number, (name, tensor) in enumerate(tensors):
        tensor = tensor.cpu().contiguous()
        digests[name] = _digest(tensor)
        norms[name] = _norm(tensor)
        torch.save(tensor.clone(), path / f"{number}.pt")  # a clone: a view would be saved with all that it is part of
    (path / _NAMES).write_text(json.dumps(list(digests)))
    return norms, _checksum(digests)


def compare_tensors(tensors: Iterator[tuple[str, Tensor]], path: Path) -> tuple[dict[str, float], str]:
    """Return ||tensor - reference|| of each tensor, infinite for one that only one side has, and the checksum of all.

    Names are in the reference's order.
    """
    names: list[str] = json.loads((path / _NAMES).read_text())
    numbers = {name: number for number, name in enumerate(names)}
    errors = dict.fromkeys(names, math.inf)
    digests: dict[str, bytes] = {}
    for name, tensor in tensors:
        tensor = tensor.cpu().contiguous()
        digests[name] = _digest(tensor)
        errors.setdefault(name, math.inf)
        if name in numbers:
            reference = _load(path, numbers[name])
            if tensor.shape == reference.shape:
                errors[name] = _norm(tensor - reference)
    return errors, _checksum(digests)


def distances(path: Path, other: Path) -> dict[str, float]:
    """Return ||tensor - other|| of each pair of tensors that `write_tensors` wrote in two directories."""
    names = json.loads((path / _NAMES).read_text())
    return {name: _norm(_load(path, number) - _load(other, number)) for number, name in enumerate(names)}


def _load(path: Path, number: int) -> Tensor:
    tensor: Tensor = torch.load(path / f"{number}.pt", mmap=True)
    return tensor


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def _digest(tensor: Tensor) -> bytes:
    return hashlib.blake2b(tensor.numpy().tobytes()).digest()


def _checksum(digests: dict[str, bytes]) -> str:
    whole = hashlib.blake2b(digest_size=4)
    for name in sorted(digests):  # the order of an export depends on the layout
        whole.update(name.encode() + digests[name])
    return whole.hexdigest()


def reset_peak_memory(device: str) -> None:
    """Forget the peak of what this process did before."""
    if device == "cuda":
        torch.cuda.init()  # a fresh process knows no device by its number yet
        torch.cuda.reset_peak_memory_stats(int(os.environ["LOCAL_RANK"]))
    else:
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_gb(device: str) -> float:
    """Return the most memory since `reset_peak_memory`: allocated on this rank's GPU, or resident on the CPU, in GB."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated(int(os.environ["LOCAL_RANK"])) / 1e9
    status = Path("/proc/self/status").read_text()
    peak_kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
    return peak_kib * 1024 / 1e9
