"""Runs on preference pairs, as functions that a gloo worker runs as one rank of a job."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor

from lightning_megatron_rl.data.loader import GlobalBatches, ResumableLoader
from lightning_megatron_rl.data.packing import TokenSequence
from lightning_megatron_rl.data.preference import PreferencePair
from tests.module_options import nested
from tests.tiny_models import SPECIAL_TOKENS, VOCAB_SIZE
from tests.training import Recorder, Run, SequenceDataModule, make_trainer


def frozen_pairs(count: int, seed: int = 0) -> list[PreferencePair]:
    """Ragged pairs of two responses to one prompt."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(least: int, most: int) -> Tensor:
        length = int(torch.randint(least, most + 1, (), generator=generator))
        # without the padding token: Transformers keeps its embedding at zero and gives it no gradient
        return torch.randint(len(SPECIAL_TOKENS), VOCAB_SIZE, (length,), generator=generator)

    pairs = []
    for _ in range(count):
        prompt = tokens(2, 8)
        sides = []
        for _ in range(2):
            ids = torch.cat([prompt, tokens(1, 20)])
            sides.append(TokenSequence(ids, torch.arange(len(ids)) >= len(prompt)))
        pairs.append(PreferencePair(*sides))
    return pairs


class PairData(SequenceDataModule):
    """Batches of frozen pairs, the same for every data-parallel size, with a position that is saved."""

    def train_dataloader(self) -> Any:
        shard = self.trainer.distributed_sampler_kwargs
        return ResumableLoader(self.sequences, GlobalBatches(len(self.sequences), self.batch_size, **shard))


def fit_pairs(
    kind: str,
    model: Path,
    strategy: dict[str, Any],
    world_size: int,
    *,
    steps: int = 2,
    batch_size: int = 4,
    pairs: list[PreferencePair] | None = None,
    module: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    callbacks: list[Callback] | None = None,
    trainer: dict[str, Any] | None = None,
    ckpt_path: str | None = None,
    save_to: Path | None = None,
    validate: bool = False,
) -> Run:
    """Fit a `RewardModule` or a `DPOModule`; returns logged values per step and the weights at the end."""
    from megatron.core.optimizer import OptimizerConfig

    from lightning_megatron_rl.modules.dpo import DPOModule
    from lightning_megatron_rl.modules.reward_model import RewardModule

    config = OptimizerConfig(**{"lr": 1e-3, "weight_decay": 0.01, "adam_eps": 1e-3, **(optimizer or {})})
    classes = {"reward": RewardModule, "dpo": DPOModule}
    options: dict[str, Any] = {"max_tokens_per_microbatch": 64, "optimizer": config, **(module or {})}
    trained = classes[kind](model=str(model), **nested(options))
    recorder = Recorder()
    runner = make_trainer(
        strategy, world_size, **{"max_steps": steps, "callbacks": [recorder, *(callbacks or [])], **(trainer or {})}
    )
    data = PairData(pairs or frozen_pairs(steps * batch_size), batch_size)  # type: ignore[arg-type]
    runner.fit(trained, data, ckpt_path=ckpt_path)
    extra: dict[str, Any] = {}
    if validate:
        (extra["val"],) = runner.validate(trained, data, verbose=False)
    if save_to is not None:
        trained.save_pretrained(save_to)
    weights = {name: tensor.clone() for name, tensor in trained.export_weights()}
    return Run(recorder.steps, weights, extra)
