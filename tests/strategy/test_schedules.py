"""Schedulers and `LearningRateMonitor` find in Megatron's optimizer what they look for in torch's."""

import csv
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR

from tests.training import fit_sft

STEPS = 3
ADAM = {"lr": 1e-3, "adam_beta1": 0.8}
SGD = {"lr": 1e-3, "optimizer": "sgd", "sgd_momentum": 0.7}


class Groups(pl.Callback):
    """Notes the learning rate and momentum that each step is about to use."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        optimizer: Any = trainer.optimizers[0]
        (pair,) = {rate_and_momentum(group) for group in optimizer.megatron.param_groups}
        self.seen.append(pair)


def rate_and_momentum(group: dict[str, Any]) -> tuple[float, float]:
    return group["lr"], group["betas"][0] if "betas" in group else group["momentum"]


def fit_scheduled(
    model: Path, root: Path, cases: list[tuple[dict[str, Any], Any]]
) -> list[tuple[list[tuple[float, float]], list[tuple[float, float]]]]:
    """Rates and momenta of each case, in the optimizer and as they were logged."""
    found = []
    for number, (optimizer, scheduler) in enumerate(cases):
        groups, logger = Groups(), CSVLogger(root, name=str(number))
        fit_sft(
            model,
            {"use_distributed_optimizer": False},
            1,
            steps=STEPS,
            module={"lr_scheduler": scheduler},
            optimizer=optimizer,
            callbacks=[groups, LearningRateMonitor(log_momentum=True)],
            trainer={"logger": logger, "log_every_n_steps": 1},
        )
        with Path(logger.log_dir, "metrics.csv").open() as lines:
            rows = [row for row in csv.DictReader(lines) if row["lr-MegatronOptimizer/pg1"]]
        name = "lr-MegatronOptimizer/pg1"
        found.append((groups.seen, [(float(row[name]), float(row[f"{name}-momentum"])) for row in rows]))
    return found


def of_torch(optimizer: dict[str, Any], make: Any) -> list[tuple[float, float]]:
    """The same of torch's own optimizer."""
    parameter, lr = torch.nn.Parameter(torch.zeros(1)), optimizer["lr"]
    if "sgd_momentum" in optimizer:
        own: torch.optim.Optimizer = torch.optim.SGD([parameter], lr=lr, momentum=optimizer["sgd_momentum"])
    else:
        own = torch.optim.AdamW([parameter], lr=lr, betas=(optimizer["adam_beta1"], 0.999))
    scheduler: LRScheduler | None = None if make is None else make(own)
    seen = []
    for _ in range(STEPS):
        seen.append(rate_and_momentum(own.param_groups[0]))
        own.step()
        if scheduler is not None:
            scheduler.step()
    return seen


def test_schedulers_that_cycle_momentum_and_the_monitor_that_logs_it(worker_pool, qwen3_dir, tmp_path):
    """By default `OneCycleLR` and `CyclicLR` refuse an optimizer in whose defaults there is no momentum."""
    cyclic = partial(CyclicLR, base_lr=1e-4, max_lr=1e-2, step_size_up=2)
    cases = [(ADAM, partial(OneCycleLR, max_lr=1e-2, total_steps=10)), (ADAM, cyclic), (SGD, cyclic), (SGD, None)]
    arguments = (fit_scheduled, qwen3_dir, tmp_path, cases)
    (found,) = worker_pool.run(*arguments, world_size=1, init_process_group=False)
    for (optimizer, scheduler), (used, logged) in zip(cases, found, strict=True):
        expected = of_torch(optimizer, scheduler)
        assert len({momentum for _, momentum in expected}) == (1 if scheduler is None else STEPS)
        for mine, theirs in zip(used, expected, strict=True):
            assert mine == pytest.approx(theirs)
        if scheduler is not None:  # without one Lightning's callback logs nothing
            for mine, theirs in zip(logged, expected, strict=True):
                assert mine == pytest.approx(theirs)
