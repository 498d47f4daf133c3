"""The runs that tests and drills interrupt and resume: small, with everything in them that must be found again."""

import json
import os
import random
import signal
import zlib
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightning_megatron_rl.checkpoints.format import rng_state
from lightning_megatron_rl.data.arithmetic import ArithmeticRows
from lightning_megatron_rl.data.prompts import PromptDataModule
from lightning_megatron_rl.data.sft import SFTDataModule
from lightning_megatron_rl.modules.critic import CriticSettings
from lightning_megatron_rl.modules.grpo import GRPOModule
from lightning_megatron_rl.modules.grpo_config import GRPOLossConfig
from lightning_megatron_rl.modules.ppo import PPOModule
from lightning_megatron_rl.modules.reference import ReferenceSettings
from lightning_megatron_rl.modules.sft import SFTModule
from lightning_megatron_rl.modules.streaming import StreamingSettings
from lightning_megatron_rl.rollout.protocol import (
    Generation,
    GenerationRequest,
    RolloutEngine,
    SamplingParams,
    SyncReport,
)
from lightning_megatron_rl.rollout.vllm.engine import VLLMEngine
from lightning_megatron_rl.weights.source import WeightSource
from tests.drills.faults import Point, die_at
from tests.module_options import nested
from tests.modules.runs import length, parity
from tests.rollout.seeded_engine import SeededEngine
from tests.training import make_trainer

Kind = Literal["sft", "grpo", "ppo"]
STEPS, SAVED_EVERY, VALIDATED_EVERY = 7, 2, 2
STEPS_PER_EPOCH = 3
STREAMED_TOKENS = 40  # of a response at most


class WeighedEngine(SeededEngine):
    """Draws depend on every bit of the weights that were pushed: samples of other weights are other samples."""

    _digest = 0

    def update_weights(self, source: WeightSource, version: int) -> SyncReport:
        self._digest = 0
        num_bytes = 0
        for name, weight in source.tensors():
            content = weight.detach().float().contiguous().numpy().tobytes()
            self._digest = zlib.crc32(name.encode() + content, self._digest)
            num_bytes += len(content)
        self.weight_version = version
        return SyncReport(num_bytes, seconds=0.0, extra_bytes=0, transport="none")

    def generate(self, requests: list[GenerationRequest], params: SamplingParams) -> list[list[Generation]]:
        seeds = [[request.seed + self._digest + i for i in range(request.num_generations)] for request in requests]
        return [
            [self._draw(GenerationRequest(request.token_ids, seed), params) for seed in row]
            for row, request in zip(seeds, requests, strict=True)
        ]


class Notes(pl.Callback):
    """Writes what this rank sees, line by line, as it happens: a run that is killed has told all it did."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def _write(self, trainer: pl.Trainer, **content: Any) -> None:
        with (self.directory / f"seen-{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps(content) + "\n")

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, *_: Any) -> None:
        rows = [item.index if isinstance(module, GRPOModule) else item.origin for item in batch]
        self._write(trainer, step=trainer.global_step, rows=rows)

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if isinstance(module, GRPOModule):
            assert module.last_rollout is not None
            samples, step = module.last_rollout.samples, trainer.global_step - 1
            self._write(trainer, step=step, samples=[sample.response_ids for sample in samples])
            if module.streamed is not None:
                used = [sample.prompt.index for sample in samples[:: module.num_generations]]
                age = max(step - sample.weight_version for sample in samples)
                self._write(trainer, step=step, used=used, age=age)

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        values = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
        self._write(trainer, step=trainer.global_step, validation=values)


class Draws(pl.Callback):
    """Draws from every generator in each step, so that their states are those of the step."""

    def on_train_batch_start(self, *_: Any) -> None:
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        torch.rand(3)
        np.random.standard_normal()  # one of a pair: the other half is state as well
        random.random()
        with get_cuda_rng_tracker().fork():
            torch.rand(3)


class IsTold(pl.Callback):
    """Sends a signal to this process in the batch that begins at `step`, on one rank."""

    def __init__(self, step: int, number: int = signal.SIGTERM, rank: int = 0) -> None:
        self.step, self.number, self.rank = step, number, rank

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step and trainer.global_rank == self.rank:
            os.kill(os.getpid(), self.number)


@dataclass
class Job:
    """One attempt at a run.

    Args:
        model: Directory of the tiny model.
        directory: Of checkpoints, notes and logs.
        kind: Of the module.
        strategy: Arguments of the strategy.
        fault: Where it ends; nowhere if not given.
        resumes: Whether it goes on from the last checkpoint, if there is one.
        saves_every: Steps between checkpoints.
        keeps: How many of them stay; -1 for all.
        vllm: Whether vLLM samples.
        streaming: Arguments of its stream; with none it is synchronous.
        rows: Of the training set, four of which make a batch.
        callbacks: Others.
        trainer: Other arguments of the Trainer.
    """

    model: Path
    directory: Path
    kind: Kind = "grpo"
    strategy: dict[str, Any] = field(default_factory=dict)
    fault: Point | None = None
    resumes: bool = False
    saves_every: int = SAVED_EVERY
    keeps: int = 1
    vllm: bool = False
    streaming: dict[str, Any] = field(default_factory=dict)
    rows: int = 14
    callbacks: list[pl.Callback] = field(default_factory=list)
    trainer: dict[str, Any] = field(default_factory=dict)


def make_module(job: Job) -> Any:
    """The module of a run, with a schedule, a reference that is refreshed, and several updates per rollout."""
    from megatron.core.optimizer import OptimizerConfig

    def optimizer(lr: float) -> OptimizerConfig:
        return OptimizerConfig(lr=lr, weight_decay=0.01, adam_eps=1e-3)

    options: dict[str, Any] = {
        "model": str(job.model),
        "optimizer": optimizer(1e-3),
        "lr_scheduler": partial(torch.optim.lr_scheduler.LinearLR, start_factor=0.2, total_iters=8),
        "max_tokens_per_microbatch": 96,
    }
    if job.kind == "sft":
        return SFTModule(**nested(options))
    engine: RolloutEngine = WeighedEngine()
    if job.vllm:
        engine = VLLMEngine(max_model_len=64, dtype="float32", kv_cache_memory_gb=0.05, max_num_seqs=8, num_threads=1)
    options |= {
        "rewards": [parity, length],
        "engine": engine,
        "num_generations": 2,
        "updates_per_rollout": 2,
        "sampling": SamplingParams(temperature=0.9, max_tokens=6),
        "validation_sampling": SamplingParams(temperature=0.9, max_tokens=6),
        "loss": GRPOLossConfig(kl_coef=0.1),
        "reference": ReferenceSettings(refresh_every_n_steps=2),
    }
    if job.streaming:  # long enough for responses to be under way at an update
        options |= {
            "streaming": StreamingSettings(**job.streaming),
            "updates_per_rollout": 1,
            "sampling": SamplingParams(temperature=0.9, max_tokens=STREAMED_TOKENS),
            "loss": GRPOLossConfig(kl_coef=0.1, correction="tis"),
        }
    if job.kind == "grpo":
        return GRPOModule(**nested(options))
    return PPOModule(critic=CriticSettings(warmup_rollouts=1), critic_optimizer=optimizer(2e-3), **nested(options))


def make_data(job: Job) -> Any:
    """Three batches per shuffled epoch, or as many as there are rows for, and two rows to validate on."""
    rows: dict[str, Any] = {
        "train": ArithmeticRows("train", size=job.rows),
        "val": {"held_out": ArithmeticRows("val", size=2)},
        "tokenizer": str(job.model),
        "batch_size": 4,
    }
    return SFTDataModule(completion_column="answer", **rows) if job.kind == "sft" else PromptDataModule(**rows)


def train(job: Job, world_size: int) -> dict[str, Any]:
    """Train; returns the exit code of a run that was told to stop, or 0 and everything of one that reached its end."""
    pl.seed_everything(7)
    module = make_module(job)
    keeper = ModelCheckpoint(
        job.directory / "checkpoints",
        "{step}",
        every_n_train_steps=job.saves_every,
        save_top_k=job.keeps,
        save_last=True,
    )
    monitored = "val/loss" if job.kind == "sft" else "val/held_out/mean_at_1"
    best = ModelCheckpoint(
        job.directory / "best",
        "best-{step}",
        monitor=monitored,
        every_n_epochs=1,
        save_top_k=2,
        save_weights_only=True,
        enable_version_counter=False,  # a validation that is run again saves under the same name
    )
    stopper = EarlyStopping(monitored, patience=100)
    logs = CSVLogger(job.directory, name="logs", flush_logs_every_n_steps=1)
    trainer = make_trainer(
        job.strategy,
        world_size,
        **{
            "max_steps": STEPS,
            "enable_checkpointing": True,
            "default_root_dir": job.directory,
            "callbacks": [Notes(job.directory), Draws(), keeper, best, stopper, *job.callbacks],
            "logger": logs,
            "log_every_n_steps": 1,
            "val_check_interval": VALIDATED_EVERY,
            "check_val_every_n_epoch": None,
            **job.trainer,
        },
    )
    try:
        trainer.fit(module, make_data(job), ckpt_path="last" if job.resumes else None)
    except SystemExit as end:
        return {"code": end.code, "global_step": trainer.global_step}
    if job.vllm:
        module.close_engine()
    state = final_state(trainer, module)
    state["early stopping"] = stopper.state_dict()
    state["best"] = {Path(path).name: score for path, score in best.best_k_models.items()}
    return {"code": 0, "state": state}


def final_state(trainer: pl.Trainer, module: Any) -> dict[str, Any]:
    """Everything that decides how the run would go on: weights, optimizers, schedule, generators, counters."""
    optimizers: list[Any] = list(trainer.optimizers)
    others = []
    if isinstance(module, GRPOModule):
        others += module.reference.chunks or []
    if isinstance(module, PPOModule) and module.critic is not None:
        others += module.critic.chunks
        optimizers.append(module.critic.optimizer)
    loops = trainer.fit_loop.state_dict()
    for counts in loops["epoch_progress"].values():  # Lightning counts no beginning of an epoch at which it resumes
        del counts["ready"], counts["started"]
    return {
        "weights": {name: weight.detach().clone() for name, weight in module.model.named_parameters()},
        "others": [{name: weight.detach().clone() for name, weight in chunk.named_parameters()} for chunk in others],
        "moments": [
            {name: value.clone() for name, value in state.items() if isinstance(value, Tensor)}
            for optimizer in optimizers
            for part in optimizer.parts()
            for state in part.optimizer.state.values()
        ],
        "groups": [
            {name: value for name, value in group.items() if name != "params"}
            for optimizer in optimizers
            for group in optimizer.param_groups
        ],
        "scheduler": {
            name: value
            for name, value in trainer.lr_scheduler_configs[0].scheduler.state_dict().items()
            if not callable(value)
        },
        "generators": rng_state(),
        "loops": loops,
        "global_step": trainer.global_step,
    }


def run_rank(job: Job, rank: int, world_size: int, port: int) -> int:
    """Train as rank `rank`, ending at the job's fault; a run that reaches its end leaves its state in a file."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    if job.fault is not None and rank in job.fault.ranks:
        die_at(job.fault)
    result = train(job, world_size)
    if result["code"] == 0:
        torch.save(result["state"], job.directory / f"final-{rank}.pt")
    return int(result["code"])


def history(directory: Path, world_size: int) -> list[dict[str, Any]]:
    """Return per rank what a run did in the end: of a step that was done again only the last time counts."""
    ranks = []
    for rank in range(world_size):
        lines = [json.loads(line) for line in (directory / f"seen-{rank}.jsonl").read_text().splitlines()]
        kinds: dict[str, dict[int, Any]] = {"rows": {}, "samples": {}, "validation": {}, "used": {}, "age": {}}
        for line in lines:
            for kind, values in kinds.items():
                if kind in line:
                    values[line["step"]] = line[kind]
        ranks.append({kind: {step: values[step] for step in sorted(values)} for kind, values in kinds.items()})
    return ranks


def differences(mine: Any, theirs: Any, where: str = "") -> list[str]:
    """Return the places at which two nested states are not bitwise equal."""
    if isinstance(theirs, dict):
        if not isinstance(mine, dict) or mine.keys() != theirs.keys():
            return [f"{where}: {mine if not isinstance(mine, dict) else sorted(mine.keys() ^ theirs.keys())}"]
        return [found for key in theirs for found in differences(mine[key], theirs[key], f"{where}/{key}")]
    if isinstance(theirs, list | tuple):
        if len(mine) != len(theirs):
            return [f"{where}: {len(mine)} instead of {len(theirs)}"]
        pairs = enumerate(zip(mine, theirs, strict=True))
        return [found for index, (left, right) in pairs for found in differences(left, right, f"{where}/{index}")]
    if isinstance(theirs, Tensor):
        return [] if torch.equal(mine, theirs) else [where]
    return [] if mine == theirs else [f"{where}: {mine!r} instead of {theirs!r}"]
