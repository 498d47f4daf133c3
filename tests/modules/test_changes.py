"""What a callback changes in a run has its effect from then on, or is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.trainer.states import TrainerStatus

from lightning_megatron_rl.modules.grpo import GRPOModule
from lightning_megatron_rl.modules.grpo_config import GRPOLossConfig
from lightning_megatron_rl.modules.reference import ReferenceSettings
from lightning_megatron_rl.modules.streaming import StreamingSettings
from lightning_megatron_rl.rollout.protocol import SamplingParams
from lightning_megatron_rl.rollout.vllm.engine import VLLMEngine
from tests.modules.runs import fit_grpo, length, parity


class Changes(pl.Callback):
    """Changes a module behind its first batch, and looks at the samples of each."""

    def __init__(self, change: Callable[[Any], None]) -> None:
        self.change = change
        self.rewards: list[list[tuple[dict[str, float], float]]] = []
        self.temperatures: list[float] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        self.temperatures.append(pl_module.temperature)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        self.rewards.append([(sample.rewards, sample.reward) for sample in pl_module.last_rollout.samples])
        if len(self.rewards) == 1:
            self.change(pl_module)


def change_both(module: Any) -> None:
    module.reward_weights = [0.0, 2.0]
    module.sampling = replace(module.sampling, temperature=0.5)


def refused(module: Any) -> list[str]:
    """Try what is refused; return the errors."""
    errors = []
    changes = {"rewards": [length], "reward_weights": [1.0], "environment": None, "loss_config": module.loss_config}
    for name, value in changes.items():
        try:
            setattr(module, name, value)
        except ValueError as error:
            errors.append(str(error))
    assert module.reward_weights == [1.0, 0.5]
    return errors


def changed_runs(model: Path) -> tuple[list[Any], list[float], list[str]]:
    changes, errors, modules = Changes(change_both), list[str](), list[GRPOModule]()

    def make(**options: Any) -> GRPOModule:
        modules.append(GRPOModule(**options))
        return modules[-1]

    fit_grpo(model, {}, 1, callbacks=[changes])
    tries = Changes(lambda module: errors.extend(refused(module)))
    fit_grpo(model, {}, 1, callbacks=[tries], make_module=make)
    modules[0].rewards, modules[0].reward_weights = [length], None  # the run has ended
    return changes.rewards, changes.temperatures, errors


def test_weights_and_sampling_change_at_once_and_the_rest_is_refused(worker_pool, qwen3_dir):
    ((first, second), temperatures, errors) = worker_pool.run(
        changed_runs, qwen3_dir, world_size=1, init_process_group=False
    )[0]
    for rewards, total in first:
        assert total == rewards["parity"] + 0.5 * rewards["length"]
    for rewards, total in second:
        assert total == 2 * rewards["length"]
    assert temperatures == [0.8, 0.8, 0.5, 0.5]  # the trainer scores what is sampled now
    assert [error.split(" was set")[0] for error in errors] == [
        "GRPOModule.rewards",
        "1 reward weights for 2 rewards ['parity', 'length']: give one weight per reward",
        "GRPOModule.environment",
        "GRPOModule.loss_config",
    ]
    assert "set it before" in errors[0]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "sampling",
            SamplingParams(top_p=0.9),
            "sampling.top_p=0.9, top_k=-1: .*importance ratio would be wrong",
        ),
        ("sampling", SamplingParams(temperature=0.0), "greedy responses to one prompt are all equal"),
        ("loss_config", GRPOLossConfig(kl_coef=0.1), "give it to a new GRPOModule"),
        ("reference_settings", ReferenceSettings("none"), "give it to a new GRPOModule"),
    ],
)
def test_what_would_train_on_other_numbers_is_refused_also_behind_the_start(name: str, value: Any, message: str):
    module = GRPOModule("model", [parity], engine=VLLMEngine())
    with pytest.raises(ValueError, match=message):
        setattr(module, name, value)


@pytest.mark.parametrize("name", ["sampling", "num_generations", "dynamic_sampling"])
def test_stream_keeps_what_it_was_made_of(name: str):
    module = GRPOModule("model", [parity], engine=VLLMEngine(), streaming=StreamingSettings(max_staleness=1))
    setattr(module, name, getattr(module, name))
    module._trainer = SimpleNamespace(state=SimpleNamespace(status=TrainerStatus.RUNNING))
    module._is_set_up = True
    with pytest.raises(ValueError, match=rf"GRPOModule\.{name} was set .*its stream goes on"):
        setattr(module, name, getattr(module, name))
    module._trainer.state.status = TrainerStatus.INTERRUPTED  # a run that failed has no teardown of the module
    setattr(module, name, getattr(module, name))


def test_parts_of_a_batch_are_scored_at_the_temperature_that_was_set_before_the_run(monkeypatch):
    class FirstPartError(Exception):
        pass

    def sample_parts(*_: Any) -> Any:
        raise FirstPartError

    streaming = StreamingSettings(max_staleness=1, batch_parts=2)
    module: Any = GRPOModule("model", [parity], engine=VLLMEngine(), streaming=streaming)
    module.sampling = replace(module.sampling, temperature=0.5)
    monkeypatch.setattr(GRPOModule, "strategy", SimpleNamespace(root_device="cpu"))
    module.sampler = SimpleNamespace(sample_parts=sample_parts)
    with pytest.raises(FirstPartError):
        module.train_in_parts([])
    assert module.temperature == 0.5
