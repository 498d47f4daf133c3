"""`SamplesResponses`: a policy whose responses an engine samples and rewards judge; what all online methods share."""

import atexit
import os
from collections.abc import Sequence
from typing import Any, Literal

from lightning.pytorch import Callback
from lightning.pytorch.trainer.states import TrainerFn

from lightning_megatron_rl.callbacks.weight_sync import WeightSync
from lightning_megatron_rl.data.prompts import PromptDataModule
from lightning_megatron_rl.environments.base import NAME, Environment, EpisodeSettings
from lightning_megatron_rl.environments.guard import GuardedEnvironment
from lightning_megatron_rl.modules.evaluation import Evaluation
from lightning_megatron_rl.modules.failures import FailureWatch
from lightning_megatron_rl.modules.policy import PolicyModule
from lightning_megatron_rl.modules.reporting import START_PHASE
from lightning_megatron_rl.modules.sampling_phase import SamplingPhase
from lightning_megatron_rl.parallel.distributed import data_parallel_gather
from lightning_megatron_rl.rewards.base import Reward, reward_name
from lightning_megatron_rl.rewards.guard import guard_all
from lightning_megatron_rl.rewards.scoring import compute_rewards
from lightning_megatron_rl.rollout.episodes import add_episode_rewards, play_episodes
from lightning_megatron_rl.rollout.generate import generate_samples
from lightning_megatron_rl.rollout.protocol import RolloutEngine, SamplingParams, SyncReport, WeightsLostError
from lightning_megatron_rl.rollout.replay import ReplayEngine
from lightning_megatron_rl.sample import Prompt, Sample
from lightning_megatron_rl.weights.source import WeightSource

_DEFAULT_SEED = 1234


class SamplesResponses(PolicyModule):
    """A policy module with a sampler and rewards: starts the engine, pushes weights, samples, rewards and validates."""

    engine: RolloutEngine
    rewards: list[Reward]
    reward_weights: list[float] | None
    environment: Environment | None  # None: a response is one turn
    episodes: EpisodeSettings
    num_generations: int  # responses per prompt in training
    sampling: SamplingParams
    validation_sampling: SamplingParams
    evaluation: Evaluation
    max_failed_rollouts: int | None = None  # in a row
    failures: FailureWatch
    synced_version: int | None = None  # weights that the engine samples with
    last_sync: SyncReport | None = None  # of the leader's engine
    _engine_started = False
    _engine_ready = False  # whether it was waited for
    _guarded: GuardedEnvironment | None = None
    _phase: SamplingPhase | None = None

    # ---- life ------------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Check the model, then let the engine start while this process builds its own."""
        super().setup(stage)
        self._check_precision()
        # kept for the whole run: a guard knows of its calls that still hang
        self.rewards = list(guard_all(self.rewards, self.strategy.timeout_s))
        self._check_lengths()
        self._guarded = None  # kept for the whole run, as the rewards' guards are
        if self.environment is not None:
            vocab_size, timeout_s = self.hf_model.config.vocab_size, self.strategy.timeout_s
            self._guarded = GuardedEnvironment(
                self.environment, self.episodes, vocab_size=vocab_size, timeout_s=timeout_s
            )
        assert self.hf_model.tokenizer is not None  # its files are checked before the engine loads them
        self._fit_prompts()
        self.check_prompts(stage)
        self.failures = FailureWatch(self.max_failed_rollouts)
        self.synced_version = None  # another Trainer counts its steps from 0 again
        self._phase = SamplingPhase(self.engine, self.strategy, self.phase)
        if not self._engine_started:
            atexit.register(self.engine.close)
            self._phase.run(self._start_engine)
            self._engine_started = True

    def _start_engine(self) -> None:
        replica = self.strategy.replica
        assert replica is not None
        if self.engine.is_collective and len(replica.ranks) != self.engine.tensor_parallel_size:
            raise ValueError(
                f"{type(self.engine).__name__}(tensor_parallel_size={self.engine.tensor_parallel_size}) in replicas of"
                f" {len(replica.ranks)} rank(s) (tensor x pipeline x context): an engine in the trainer's processes has"
                " one worker on each rank of a replica. Set its tensor_parallel_size to that, or use VLLMEngine."
            )
        if self.engine.is_collective and len(replica.ranks) > 1 and self.environment is not None:
            raise ValueError(
                f"environment={type(self.environment).__name__} with {type(self.engine).__name__} on"
                f" {len(replica.ranks)} ranks: each would play the episodes by itself, and one late reply would leave"
                " the others waiting. Use VLLMEngine."
            )
        if self.engine.is_collective and replica.ranks[-1] - replica.ranks[0] != len(replica.ranks) - 1:
            raise ValueError(
                f"the ranks {replica.ranks} of a replica are not neighbours, which an engine in the trainer's processes"
                " needs: use VLLMEngine, or a layout without pipeline parallelism."
            )
        self.engine.expect(self._most_tokens())
        self.engine.start(self.hf_model.path)
        if self.engine.sleep_level:  # the model is built in the memory that it leaves
            self.engine.wait_ready()
            self.engine.sleep(self.engine.sleep_level)

    def _most_tokens(self) -> int | None:
        """Tokens that this run samples at most for training, of one replica; None: it has no end, or none is known."""
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        batch_size, max_steps = getattr(data, "batch_size", None), self.trainer.max_steps
        if batch_size is None or max_steps < 0:
            return None
        replicas = self.strategy.layout.data_parallel_size(self.trainer.world_size)
        return max_steps * batch_size // replicas * self.num_generations * self.sampling.max_tokens

    @property
    def sampling_phase(self) -> SamplingPhase:
        """Who has the memory."""
        assert self._phase is not None, "setup() makes it"
        return self._phase

    def _check_lengths(self) -> None:
        limit, budget = self.engine.max_model_len, self.train_settings.max_tokens_per_microbatch
        if limit > budget:
            raise ValueError(
                f"train.max_tokens_per_microbatch={budget} < engine.max_model_len={limit}: a sampled sequence may not"
                " fit into a micro-batch. Raise train.max_tokens_per_microbatch or lower max_model_len."
            )
        self.evaluation.settings.check_length(limit)
        if self.sampling.max_tokens >= limit:
            raise ValueError(
                f"sampling.max_tokens={self.sampling.max_tokens} leaves no room for a prompt in"
                f" engine.max_model_len={limit}: raise max_model_len or lower max_tokens."
            )

    def _fit_prompts(self) -> None:
        """Hold the prompts of a `PromptDataModule` to the engine's limits; others are checked when they are sampled."""
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, PromptDataModule) or isinstance(self.engine, ReplayEngine):
            return
        passes = self.evaluation.settings.passes(self.validation_sampling, self.sampling)
        training, evaluation = self.sampling.max_tokens, max(params.max_tokens for params, _ in passes)
        if self.environment is not None:  # a turn takes what is left, down to one token
            training = evaluation = 1
        response = {"train": training, **dict.fromkeys(data.val_names, evaluation)}
        data.fit_into_engine(self.engine.max_model_len, response, self.hf_model.config.vocab_size)

    def check_prompts(self, stage: str) -> None:
        """Check what the Trainer's data are, before weights are loaded; subclasses say what they need."""

    def describe_episodes(self) -> list[tuple[str, str]]:
        """Return rows for the table at start: the environment, if there is one."""
        if self.environment is None:
            return []
        turns = f"at most {self.episodes.max_turns} turns, {self.sampling.max_tokens} tokens in all of them"
        return [("environment", f"{type(self.environment).__name__}, {turns}")]

    def configure_callbacks(self) -> list[Callback]:
        """Add `WeightSync`, unless the Trainer has one: returning it would replace the user's."""
        present = any(isinstance(callback, WeightSync) for callback in self.trainer.callbacks)  # type: ignore[attr-defined]
        return [] if present else [WeightSync()]

    def _check_precision(self) -> None:
        """Refuse a quantised model: the engine would take it as it is, and then weights in 16 bits."""
        if self.hf_model.quantisation is not None:
            raise ValueError(
                f"model {self.model_path!r} is quantised ({self.hf_model.quantisation}): the sampler would quantise the"
                " weights that it gets, and sample from another model than the one that is trained. Make it one of 16"
                f" bits: `lightning-megatron-rl convert {self.model_path} model.ckpt`, then"
                " `lightning-megatron-rl convert model.ckpt model-16bit`, and set model: model-16bit."
            )

    def close_engine(self) -> None:
        """End the engine; the next phase that samples starts it anew."""
        self.engine.close()
        self._engine_started, self._engine_ready, self.synced_version = False, False, None
        if self._phase is not None:
            self._phase.reload()  # a checkpoint may be saved of what is there

    def teardown(self, stage: str) -> None:
        """The engine reads no memory of this run any more; it keeps its own weights."""
        self.engine.let_go()
        super().teardown(stage)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Forget what the engine has: the weights are about to be others."""
        super().on_load_checkpoint(checkpoint)
        self.synced_version = None

    # ---- samples and rewards ---------------------------------------------------------------------------------------

    def sample(self, prompts: list[Prompt]) -> list[Sample]:
        """Return rewarded samples of `prompts`."""
        self.sampling_phase.prepare_sampling()
        with self.phase("rollout"):
            samples = self.generate(prompts, self.sampling, self.num_generations)
        with self.phase("reward"):
            self.reward(samples)
        return samples

    def generate(self, prompts: list[Prompt], params: SamplingParams, num_generations: int) -> list[Sample]:
        """Return the replica's samples of its prompts, or its episodes; the leader samples, every rank gets them."""
        samples: list[Sample] | None = None if prompts else []  # none in the last validation batch of this replica
        while True:
            if samples is None:
                self.sampling_phase.prepare_sampling()
                samples = self.sampling_phase.run(lambda: self._try_generate(prompts, params, num_generations))
            if not self._lost_anywhere(samples is None):
                return samples or []
            self.synced_version = None
            self.sync_weights(self.trainer.global_step)

    def _try_generate(self, prompts: list[Prompt], params: SamplingParams, count: int) -> list[Sample] | None:
        """Sample; None if the engine's process was replaced and has no weights to sample with."""
        options: dict[str, Any] = {
            "num_generations": count,
            "tokenizer": self.hf_model.tokenizer,
            "seed": run_seed(),
            "step": self.trainer.global_step,
        }
        try:
            if self._guarded is None:
                return generate_samples(self.engine, prompts, params, **options)
            return play_episodes(self.engine, self._guarded, prompts, params, **options)
        except WeightsLostError:
            return None

    def finish_sampling(self) -> None:
        """Let the engine sleep, if it does, and take back what the trainer needs."""
        if not self.sampling_phase.finish():
            self.synced_version = None

    def rank_metrics(self) -> dict[str, float]:
        """Return the restarts of this rank's engine, and what memory changed hands around the last rollout."""
        metrics = {"perf/engine_restarts": float(self.engine.num_restarts)}
        if self.strategy.offloads:
            metrics["perf/offloaded_gb"] = self.sampling_phase.offloaded_bytes / 1e9
        if self.engine.sleep_level:
            metrics["perf/sleep_freed_gb"] = self.sampling_phase.freed_bytes / 1e9
        return metrics

    def reward(self, samples: list[Sample]) -> None:
        """Fill in the rewards; the leader computes them, every rank gets them."""
        assert self.strategy.replica is not None
        if not samples:
            return

        def compute() -> list[tuple[dict[str, float], float, dict[str, str]]]:
            if self.rewards:
                compute_rewards(samples, self.rewards, self.reward_weights)
            if self._guarded is not None:
                add_episode_rewards(samples)
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
        self.finish_sampling()
        self._finish_evaluation("val")

    def on_test_epoch_end(self) -> None:
        """Log ``test/<set>/mean_at_1`` for every data set."""
        self.finish_sampling()
        self._finish_evaluation("test")

    def _finish_evaluation(self, stage: Literal["val", "test"]) -> None:
        metrics = self.evaluation.finish(stage, self.reduce_on_device, self.strategy.union)
        self.log_metrics(metrics)
        suffix, at_once = "/failed_frac", self.trainer.state.fn != TrainerFn.FITTING
        for name in metrics:
            if name.startswith(f"{stage}/") and name.endswith(suffix):
                dataset = name.removeprefix(f"{stage}/").removesuffix(suffix)
                own = [sample for sample in self.evaluation.samples if sample.prompt.dataset == dataset]
                errors = [error for sample in own for error in sample.reward_errors.values()]
                self.failures.add(
                    f"validations of {dataset!r}",
                    "a reward",
                    failed=metrics[name] == 1,
                    errors=errors,
                    at_once=at_once,
                )

    def evaluation_metrics(self, stage: str, sets: Sequence[str]) -> list[str]:
        """Return the names that a validation of these sets logs."""
        return self.evaluation.names(stage, sets, self.reward_components())

    def reward_components(self) -> list[str]:
        """Return the names of its rewards, and of the environment's."""
        return [reward_name(reward) for reward in self.rewards] + [NAME] * (self.environment is not None)

    def on_train_end(self) -> None:
        """Refuse to call a run a success in which a reward never worked."""
        super().on_train_end()
        self.failures.finish("rollouts")

    def on_predict_epoch_end(self) -> None:
        """Let the engine sleep."""
        self.finish_sampling()

    # ---- what WeightSync needs -------------------------------------------------------------------------------------

    def sync_weights(self, version: int) -> None:
        """Push the policy's weights to this replica's engine; a collective of all replicas."""
        if not self._engine_ready:
            if not self.engine.sleep_level:  # else `setup` has waited for it, and it sleeps
                with self.phase(START_PHASE):
                    self.sampling_phase.run(self.engine.wait_ready)
            self._engine_ready = True
        self.sampling_phase.prepare_sync()
        with self.phase("weight_sync"):
            while True:  # at most as often as the engines may be restarted
                report = self._push(self.weights_to_push(), version)
                if not self._lost_anywhere(report is None):
                    break
        self.last_sync, self.synced_version = report, version

    def _lost_anywhere(self, lost: bool) -> bool:
        """Whether an engine lost its weights: this replica's, or any where replicas share experts and push together."""
        if self.strategy.layout.expert_model_parallel_size == 1:
            return lost
        return any(data_parallel_gather(lost))

    def _push(self, source: WeightSource, version: int) -> SyncReport | None:
        """Hand the weights to the engine; None if its process was replaced meanwhile, on every rank; a collective."""
        if self.engine.is_collective:
            return self.engine.update_weights(source, version)
        assert self.strategy.replica is not None
        return self.strategy.replica.run_on_leader(
            lambda: update_if_possible(self.engine, source, version), others=source.run_collectives
        )


def check_episodes(
    environment: Environment | None, episodes: EpisodeSettings | None, engine: RolloutEngine | None
) -> None:
    """Refuse settings of episodes without an environment, and an environment for responses that are recorded already.

    Raises:
        ValueError: Either of them.
    """
    if environment is None:
        if episodes is not None:
            raise ValueError(
                f"episodes={episodes} without an environment: a response is one turn. Give environment, or leave"
                " episodes out."
            )
        return
    if getattr(type(environment), "start", None) in (None, Environment.start):
        raise ValueError(
            f"environment={environment!r} has no method start(prompt, seed), which returns an episode: define it, or"
            " give an object of a class that does."
        )
    if isinstance(engine, ReplayEngine):
        raise ValueError(
            f"environment={type(environment).__name__} with engine=ReplayEngine: recorded episodes hold the"
            " environment's replies already, and it would be asked about turns that nobody took. Leave environment"
            " out, or use another engine."
        )


def run_seed() -> int:
    """Return the seed of the run, which `seed_everything` left in the environment."""
    return int(os.environ.get("PL_GLOBAL_SEED", _DEFAULT_SEED))


def update_if_possible(engine: RolloutEngine, source: WeightSource, version: int) -> SyncReport | None:
    """Hand weights to an engine while the other ranks run the collectives of `source`; None if it lost them."""
    try:
        return engine.update_weights(source, version)
    except WeightsLostError:
        return None
    finally:
        source.finish_collectives()
