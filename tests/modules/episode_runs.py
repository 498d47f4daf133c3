"""GRPO and PPO runs with an environment, as functions that a gloo worker runs as one rank of a job."""

import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from lightning_megatron_rl.environments import EpisodeSettings
from lightning_megatron_rl.rollout.protocol import SamplingParams
from lightning_megatron_rl.sample import Sample
from lightning_megatron_rl.utilities.spans import SAMPLING
from tests.environments.games import Sums
from tests.modules.runs import fit_grpo
from tests.rollout.seeded_engine import SeededEngine
from tests.training import Run

MAX_TOKENS = 12  # of all turns of an episode


def episode_options(**changes: Any) -> dict[str, Any]:
    """Settings of a module whose samples are episodes of at most four turns."""
    return {
        "engine": SeededEngine(),
        "environment": Sums(),
        "episodes": EpisodeSettings(max_turns=4),
        "rewards": [],
        "reward_weights": None,
        "sampling": SamplingParams(temperature=0.8, max_tokens=MAX_TOKENS),
        **changes,
    }


class KeepSamples(Callback):
    """The samples of all steps, and the tokens that this rank's sampler says that it drew."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.drawn = 0.0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.samples += pl_module.last_rollout.samples
        if (activity := pl_module.sampler.activity) is not None:
            _, self.drawn = activity.within(SAMPLING, 0.0, time.monotonic())


def fit_episodes(
    model: Path, strategy: dict[str, Any], world_size: int, *, module: dict[str, Any] | None = None, **options: Any
) -> Run:
    """`fit_grpo` with episodes, or with `module` settings; `extra` has the samples of this replica."""
    keeper = KeepSamples()
    callbacks = [keeper, *options.pop("callbacks", [])]
    settings = {**episode_options(), **(module or {})}
    run = fit_grpo(model, strategy, world_size, module=settings, callbacks=callbacks, **options)
    run.extra["samples"], run.extra["drawn"] = keeper.samples, keeper.drawn
    return run


def fit_ppo_episodes(model: Path, strategy: dict[str, Any], world_size: int, **options: Any) -> Run:
    """`fit_ppo` with episodes."""
    from tests.modules.ppo_runs import fit_ppo

    keeper = KeepSamples()
    run = fit_ppo(model, strategy, world_size, module=episode_options(), callbacks=[keeper], **options)
    run.extra["samples"] = keeper.samples
    return run
