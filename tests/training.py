"""Small training runs for tests: functions that a gloo worker runs as one rank of a job."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch import Tensor

from lightning_megatron_rl.data.packing import TokenSequence
from lightning_megatron_rl.verify.pool import trainer_size
from tests.module_options import nested
from tests.tiny_models import SPECIAL_TOKENS, VOCAB_SIZE


class WorkerEnvironment(TorchElasticEnvironment):
    """Ranks from RANK and WORLD_SIZE, as torchrun sets them."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Accept what the pool has started."""


def frozen_sequences(count: int = 8, seed: int = 0) -> list[TokenSequence]:
    """Ragged sequences with a prompt part that is not trained on."""
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for _ in range(count):
        length = int(torch.randint(4, 40, (), generator=generator))
        mask = torch.arange(length) >= max(1, length // 3)
        # without the padding token: Transformers keeps its embedding at zero and gives it no gradient
        token_ids = torch.randint(len(SPECIAL_TOKENS), VOCAB_SIZE, (length,), generator=generator)
        sequences.append(TokenSequence(token_ids, mask, {}))
    return sequences


class SequenceDataModule(pl.LightningDataModule):
    """Batches of frozen sequences; data-parallel rank r gets every dp-th sequence of each global batch."""

    def __init__(self, sequences: list[TokenSequence], batch_size: int) -> None:
        super().__init__()
        self.sequences, self.batch_size = sequences, batch_size

    def train_dataloader(self) -> Any:
        shard = self.trainer.distributed_sampler_kwargs
        mine = self.sequences[shard["rank"] :: shard["num_replicas"]]
        return torch.utils.data.DataLoader(
            mine, batch_size=self.batch_size // shard["num_replicas"], collate_fn=list, shuffle=False
        )

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


class Recorder(pl.Callback):
    """Keeps what was logged after each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.steps.append({})

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._take(trainer)

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._take(trainer)

    def _take(self, trainer: pl.Trainer) -> None:
        if self.steps and not self.steps[-1]:
            self.steps[-1] = {name: float(value) for name, value in trainer.logged_metrics.items()}


@dataclass
class Run:
    """What one rank saw of a run."""

    steps: list[dict[str, float]]
    weights: dict[str, Tensor]
    extra: dict[str, Any] = field(default_factory=dict)


def make_trainer(strategy: dict[str, Any], world_size: int, **trainer: Any) -> pl.Trainer:
    """A Trainer for `world_size` CPU processes that are there already."""
    from lightning_megatron_rl.parallel.nodes import NodeSettings
    from lightning_megatron_rl.strategy.megatron import MegatronStrategy

    devices, num_nodes = trainer_size(world_size)
    nodes = NodeSettings(tensor_parallel_across_nodes=True)  # those of a test are one machine
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": devices,
        "num_nodes": num_nodes,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,  # `SequenceDataModule` shards by itself, in order
    }
    return pl.Trainer(
        strategy=MegatronStrategy(
            **{"timeout_s": 60.0, "cluster_environment": WorkerEnvironment(), "nodes": nodes, **strategy}
        ),
        **{**options, **trainer},
    )


def fit_sft(
    model: Path,
    strategy: dict[str, Any],
    world_size: int,
    *,
    steps: int = 2,
    batch_size: int = 4,
    module: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    callbacks: list[pl.Callback] | None = None,
    sequences: list[TokenSequence] | None = None,
    data: pl.LightningDataModule | None = None,
    ckpt_path: str | None = None,
) -> Run:
    """Fit an `SFTModule` on frozen sequences (or `data`); returns logged values per step and the final weights."""
    from megatron.core.optimizer import OptimizerConfig

    from lightning_megatron_rl.modules.sft import SFTModule

    # a large epsilon keeps Adam from turning rounding noise of tiny gradients into full steps
    config = OptimizerConfig(**{"lr": 1e-3, "weight_decay": 0.01, "adam_eps": 1e-3, **(optimizer or {})})
    policy = SFTModule(str(model), **nested({"optimizer": config, "max_tokens_per_microbatch": 64, **(module or {})}))
    recorder = Recorder()
    runner = make_trainer(
        strategy, world_size, **{"max_steps": steps, "callbacks": [recorder, *(callbacks or [])], **(trainer or {})}
    )
    runner.fit(
        policy,
        data or SequenceDataModule(sequences or frozen_sequences(steps * batch_size), batch_size),
        ckpt_path=ckpt_path,
    )
    return Run(recorder.steps, {name: tensor.clone() for name, tensor in policy.export_weights()})


def fit_arithmetic(
    model: Path,
    strategy: dict[str, Any],
    world_size: int,
    *,
    max_steps: int,
    checkpoints: Path | None = None,
    every_n_steps: int = 1,
    ckpt_path: str | None = None,
    trainer: dict[str, Any] | None = None,
    save_weights_only: bool = False,
    module: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    callbacks: list[pl.Callback] | None = None,
) -> Run:
    """Fit an `SFTModule` with a schedule on shuffled sums from `SFTDataModule`, saving checkpoints."""
    from functools import partial

    from lightning.pytorch.callbacks import ModelCheckpoint
    from megatron.core.optimizer import OptimizerConfig

    from lightning_megatron_rl.data.arithmetic import ArithmeticRows
    from lightning_megatron_rl.data.sft import SFTDataModule
    from lightning_megatron_rl.modules.sft import SFTModule

    pl.seed_everything(7)
    options = {
        "optimizer": OptimizerConfig(**{"lr": 1e-3, "weight_decay": 0.01, "adam_eps": 1e-3, **(optimizer or {})}),
        "lr_scheduler": partial(torch.optim.lr_scheduler.LinearLR, start_factor=0.2, total_iters=8),
        **(module or {}),
    }
    policy = SFTModule(str(model), **nested(options))
    data = SFTDataModule(
        train=ArithmeticRows("train", size=20), tokenizer=str(model), completion_column="answer", batch_size=4
    )
    recorder = Recorder()
    used: list[pl.Callback] = [recorder, *(callbacks or [])]
    if checkpoints is not None:
        used.append(
            ModelCheckpoint(
                dirpath=checkpoints,
                filename="{step}",
                every_n_train_steps=every_n_steps,
                save_top_k=-1,
                save_weights_only=save_weights_only,
            )
        )
    options = {"max_steps": max_steps, "callbacks": used, "enable_checkpointing": checkpoints is not None}
    runner = make_trainer(strategy, world_size, **{**options, **(trainer or {})})
    runner.fit(policy, data, ckpt_path=ckpt_path)
    return Run(recorder.steps, {name: tensor.clone() for name, tensor in policy.export_weights()})
