"""What the tests verify: functions that worker processes import, right modules and wrong ones."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_megatron_rl.algorithms.tally import Tally
from lightning_megatron_rl.data.packing import MicroBatch, TokenSequence
from lightning_megatron_rl.modules.sft import SFTModule
from lightning_megatron_rl.strategy.megatron import MegatronStrategy
from lightning_megatron_rl.verify.job import Subject
from tests.module_options import nested


def sft(model: Path, layout: dict[str, Any], module: type[SFTModule] = SFTModule, **options: Any) -> Subject:
    return Subject(module(model=str(model), **nested(options)), MegatronStrategy(**layout))


def grpo(model: Path, layout: dict[str, Any], module: Any = None, **options: Any) -> Subject:
    from lightning_megatron_rl.modules.grpo import GRPOModule
    from lightning_megatron_rl.modules.grpo_config import GRPOLossConfig
    from lightning_megatron_rl.rollout.protocol import SamplingParams

    settings: dict[str, Any] = {
        "rewards": [never_called],
        "num_generations": 4,
        "updates_per_rollout": 2,
        "sampling": SamplingParams(temperature=0.8, max_tokens=10),
        "loss": GRPOLossConfig(kl_coef=0.1, entropy_coef=0.01, aggregation="seq_mean_token_mean"),
    }
    make = module or GRPOModule
    return Subject(make(model=str(model), **nested({**settings, **options})), MegatronStrategy(**layout))


def ppo(model: Path, layout: dict[str, Any], **critic: Any) -> Subject:
    from lightning_megatron_rl.modules.critic import CriticSettings
    from lightning_megatron_rl.modules.ppo import PPOModule

    return grpo(model, layout, PPOModule, critic=CriticSettings(**critic))


def never_called(samples: list[Any]) -> list[float]:
    raise AssertionError("the recorded rewards stand in for this one")


class LocalMeanSFT(SFTModule):
    """Divides by the tokens of its own micro-batch: right in one micro-batch only."""

    def training_step(self, sequences: list[TokenSequence], batch_idx: int) -> Tensor:
        metrics = self.update(sequences, local_mean)
        return torch.tensor(metrics["policy/loss"])


def local_mean(batch: MicroBatch, logprobs: Tensor, entropy: Tensor, tally: Tally) -> Tensor:
    return -logprobs / batch.mask.sum().clamp(min=1) * 20


class WrongNormGradientSFT(SFTModule):
    """Doubles the gradient of the last norm when there are several processes."""

    def training_step(self, sequences: list[TokenSequence], batch_idx: int) -> Tensor:
        loss = super().training_step(sequences, batch_idx)
        for name, parameter in self.model.named_parameters():
            if self.trainer.world_size > 1 and "decoder.final_layernorm" in name:
                parameter.main_grad.mul_(2)
        return loss


@dataclass(frozen=True)
class Fault:
    """The gradient of the parameters that are called so is multiplied on one rank, before it is reduced."""

    name: str
    factor: float = 1.001
    rank: int = 1
    rows: slice = field(default_factory=lambda: slice(None))

    def __call__(self, gradient: Tensor) -> Tensor:
        wrong = gradient.clone()
        wrong[self.rows] *= self.factor
        return wrong


class FaultySFT(SFTModule):
    """Has the fault that belongs to its micro-batches' budget: each layout of a verification may have another."""

    def __init__(self, model: str, faults: dict[int, Fault], **options: Any) -> None:
        super().__init__(model, **options)
        self.faults = faults

    def on_train_start(self) -> None:
        super().on_train_start()
        fault = self.faults.get(self.train_settings.max_tokens_per_microbatch)
        if fault is None or self.trainer.global_rank != fault.rank:
            return
        found = [parameter for name, parameter in self.model.named_parameters() if fault.name in name]
        assert len(found) == 1, f"{len(found)} parameters are called {fault.name}"
        found[0].register_hook(fault)


class SplitPersonalitySFT(SFTModule):
    """Reports another loss on another rank."""

    def training_step(self, sequences: list[TokenSequence], batch_idx: int) -> Tensor:
        return self.loss_of_update(super().training_step(sequences, batch_idx).item() + 0.5 * self.trainer.global_rank)


class FailingSFT(SFTModule):
    """Raises in its first step on the second rank."""

    def training_step(self, sequences: list[TokenSequence], batch_idx: int) -> Tensor:
        if self.trainer.global_rank == 1:
            raise ValueError("no good on rank 1")
        return super().training_step(sequences, batch_idx)


class BlindSFT(SFTModule):
    """Learns nothing."""

    def training_step(self, sequences: list[TokenSequence], batch_idx: int) -> Tensor:
        metrics = self.update(sequences, lambda batch, logprobs, entropy, tally: logprobs * 0)
        return torch.tensor(metrics["policy/loss"])


class ImpatientSFT(SFTModule):
    """Refuses data parallelism."""

    def configure_model(self) -> None:
        if self.strategy.layout.data_parallel_size(self.trainer.world_size) > 1:
            raise ValueError("this module wants one replica")
        super().configure_model()
