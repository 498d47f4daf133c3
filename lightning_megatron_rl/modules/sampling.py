"""`SamplesResponses`: a policy whose responses an engine samples and rewards judge; what all online methods share."""

import atexit
import os
from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Callback
from torch import Tensor

from lightning_megatron_rl.callbacks.weight_sync import WeightSync
from lightning_megatron_rl.modules.evaluation import Evaluation
from lightning_megatron_rl.modules.reference import HoldsReference
from lightning_megatron_rl.rewards.base import Reward
from lightning_megatron_rl.rewards.guard import guard_all
from lightning_megatron_rl.rewards.scoring import compute_rewards
from lightning_megatron_rl.rollout.engine import RolloutEngine, SamplingParams
from lightning_megatron_rl.rollout.generate import generate_samples
from lightning_megatron_rl.sample import Prompt, Sample

_DEFAULT_SEED = 1234


class SamplesResponses(HoldsReference):
    """A policy module with a sampler and rewards: starts the engine, pushes weights, samples, rewards and validates."""

    engine: RolloutEngine
    rewards: list[Reward]
    reward_weights: list[float] | None
    num_generations: int  # responses per prompt in training
    sampling: SamplingParams
    validation_sampling: SamplingParams
    evaluation: Evaluation
    synced_version: int | None = None  # weights that the engine samples with
    _engine_started = False

    # ---- life ------------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Check the model, then let the engine start while this process builds its own."""
        super().setup(stage)
        # kept for the whole run: a guard knows of its calls that still hang
        self.rewards = list(guard_all(self.rewards, self.strategy.timeout_s))
        self._check_lengths()
        self.check_prompts(stage)
        self.synced_version = None  # another Trainer counts its steps from 0 again
        assert self.strategy.replica is not None
        if not self._engine_started:
            atexit.register(self.engine.close)
            self.strategy.replica.run_on_leader(lambda: self.engine.start(self.hf_model.path))
            self._engine_started = True

    @property
    def sampler(self) -> RolloutEngine:
        """The engine that shares the GPU."""
        return self.engine

    def _check_lengths(self) -> None:
        limit = self.engine.max_model_len
        if limit > self.max_tokens_per_microbatch:
            raise ValueError(
                f"max_tokens_per_microbatch={self.max_tokens_per_microbatch} < engine.max_model_len={limit}: a sampled"
                " sequence may not fit into a micro-batch. Raise max_tokens_per_microbatch or lower max_model_len."
            )
        self.evaluation.settings.check_length(limit)
        if self.sampling.max_tokens >= limit:
            raise ValueError(
                f"sampling.max_tokens={self.sampling.max_tokens} leaves no room for a prompt in"
                f" engine.max_model_len={limit}: raise max_model_len or lower max_tokens."
            )

    def check_prompts(self, stage: str) -> None:
        """Check what the Trainer's data are, before weights are loaded; subclasses say what they need."""

    def configure_callbacks(self) -> list[Callback]:
        """Add `WeightSync`, unless the Trainer has one: returning it would replace the user's."""
        present = any(isinstance(callback, WeightSync) for callback in self.trainer.callbacks)  # type: ignore[attr-defined]
        return [] if present else [WeightSync()]

    def close_engine(self) -> None:
        """End the engine; the next phase that samples starts it anew."""
        self.engine.close()
        self._engine_started, self.synced_version = False, None

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Forget what the engine has: the weights are about to be others."""
        super().on_load_checkpoint(checkpoint)
        self.synced_version = None

    # ---- samples and rewards ---------------------------------------------------------------------------------------

    def sample(self, prompts: list[Prompt]) -> list[Sample]:
        """Return rewarded samples of `prompts`."""
        with self.phase("rollout"):
            samples = self.generate(prompts, self.sampling, self.num_generations)
        with self.phase("reward"):
            self.reward(samples)
        return samples

    def generate(self, prompts: list[Prompt], params: SamplingParams, num_generations: int) -> list[Sample]:
        """Return the replica's samples of its prompts; the leader samples, every rank gets them."""
        assert self.strategy.replica is not None
        if not prompts:  # the last validation batch of this replica
            return []
        return self.strategy.replica.run_on_leader(
            lambda: generate_samples(
                self.engine,
                prompts,
                params,
                num_generations=num_generations,
                tokenizer=self.hf_model.tokenizer,
                seed=run_seed(),
                step=self.trainer.global_step,
            )
        )

    def reward(self, samples: list[Sample]) -> None:
        """Fill in the rewards; the leader computes them, every rank gets them."""
        assert self.strategy.replica is not None
        if not samples:
            return

        def compute() -> list[tuple[dict[str, float], float, dict[str, str]]]:
            compute_rewards(samples, self.rewards, self.reward_weights)
            return [(sample.rewards, sample.reward, sample.reward_errors) for sample in samples]

        for sample, results in zip(samples, self.strategy.replica.run_on_leader(compute), strict=True):
            sample.rewards, sample.reward, sample.reward_errors = results

    # ---- validation, test, prediction ------------------------------------------------------------------------------

    def validation_step(self, prompts: list[Prompt], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Sample one response per prompt with `validation_sampling`, and `evaluation.num_samples`; reward them."""
        for params, count in self.evaluation.settings.passes(self.validation_sampling, self.sampling):
            samples = self.generate(prompts, params, count)
            self.reward(samples)
            self.evaluation.add(samples, count)

    def test_step(self, prompts: list[Prompt], batch_idx: int, dataloader_idx: int = 0) -> None:
        """As validation."""
        self.validation_step(prompts, batch_idx, dataloader_idx)

    def predict_step(self, prompts: list[Prompt], batch_idx: int, dataloader_idx: int = 0) -> list[Sample]:
        """Return one sample per prompt, drawn with `validation_sampling`."""
        return self.generate(prompts, self.validation_sampling, 1)

    def on_validation_epoch_end(self) -> None:
        """Log ``val/<set>/mean_at_1`` and what else was asked for, for every data set, over all replicas."""
        self.log_metrics(self.evaluation.finish("val", self.reduce_on_device, self.strategy.union))

    def on_test_epoch_end(self) -> None:
        """Log ``test/<set>/mean_at_1`` for every data set."""
        self.log_metrics(self.evaluation.finish("test", self.reduce_on_device, self.strategy.union))

    # ---- what WeightSync needs -------------------------------------------------------------------------------------

    def sync_weights(self, version: int) -> None:
        """Push the policy's weights to this replica's engine; a collective."""
        assert self.strategy.replica is not None
        weights = self.export_weights()
        with self.phase("weight_sync"):
            self.strategy.replica.run_on_leader(lambda: _push(self.engine, weights, version), others=weights)
        self.synced_version = version


def run_seed() -> int:
    """Return the seed of the run, which `seed_everything` left in the environment."""
    return int(os.environ.get("PL_GLOBAL_SEED", _DEFAULT_SEED))


def _push(engine: RolloutEngine, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
    try:
        engine.update_weights(weights, version)
    finally:
        for _ in weights:  # the other ranks are in the middle of the export's collectives
            pass
