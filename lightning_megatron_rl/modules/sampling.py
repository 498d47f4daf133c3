"""`Sampler`: responses that an engine samples with a policy's weights, and the rewards that judge them."""

import atexit
import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from lightning_megatron_rl.data.planning import round_up
from lightning_megatron_rl.environments.base import Environment, EpisodeSettings
from lightning_megatron_rl.environments.guard import GuardedEnvironment
from lightning_megatron_rl.modules.reporting import START_PHASE
from lightning_megatron_rl.modules.sampling_phase import SamplingPhase
from lightning_megatron_rl.modules.sharing import microbatch_rules
from lightning_megatron_rl.modules.streaming import StreamedRollouts
from lightning_megatron_rl.parallel.distributed import data_parallel_gather, run_on_all_ranks
from lightning_megatron_rl.rewards.base import Reward, reward_name
from lightning_megatron_rl.rewards.scoring import compute_rewards
from lightning_megatron_rl.rollout.episodes import add_episode_rewards, play_episodes
from lightning_megatron_rl.rollout.generate import generate_samples
from lightning_megatron_rl.rollout.protocol import RolloutEngine, SamplingParams, SyncReport, WeightsLostError
from lightning_megatron_rl.rollout.replay import ReplayEngine
from lightning_megatron_rl.sample import Prompt, Sample
from lightning_megatron_rl.utilities.seeds import run_seed
from lightning_megatron_rl.utilities.spans import SAMPLING, SpanLog
from lightning_megatron_rl.weights.source import WeightSource

if TYPE_CHECKING:
    from lightning_megatron_rl.modules.policy import PolicyModule


class Sampler:
    """Samples and rewards responses for a module, with the weights of its policy.

    All ranks of a replica call each method: the leader samples and judges, every rank gets the samples. A run is
    ``start``, then ``sync`` whenever the policy has changed, ``sample`` or ``generate`` as often as needed, ``finish``
    before the trainer works again; ``close`` ends the engine, which otherwise serves the next run.

    Args:
        policy: The module; it is used from `start` on, in a Trainer.
        engine: Of this replica.
        stream: Samples ahead of training; None: each batch is sampled when it is trained on.
    """

    def __init__(self, policy: "PolicyModule", engine: RolloutEngine, stream: StreamedRollouts | None = None) -> None:
        self.engine = engine
        self.stream = stream
        self.version: int | None = None  # of the policy's weights that the engine samples with
        self.last_sync: SyncReport | None = None  # of the leader's engine
        self._policy = policy
        self._memory: SamplingPhase | None = None
        self._calls = SpanLog()  # to an engine that does not tell what it does
        self._started = self._ready = False  # whether the engine was started, and whether it was waited for
        self._rewards: Sequence[Reward] = ()
        self._reward_weights: Sequence[float] | None = None
        self._environment: GuardedEnvironment | None = None  # None: a response is one turn

    @property
    def memory(self) -> SamplingPhase:
        """Who has the GPU's memory."""
        assert self._memory is not None, "start() makes it"
        return self._memory

    # ---- life ------------------------------------------------------------------------------------------------------

    def start(
        self,
        rewards: Sequence[Reward],
        reward_weights: Sequence[float] | None,
        environment: GuardedEnvironment | None,
        most_tokens: int | None,
    ) -> None:
        """Begin a run, in which this replica samples at most so many tokens: start the engine, unless it runs."""
        self._rewards, self._reward_weights, self._environment = rewards, reward_weights, environment
        self.version = None  # another Trainer counts its steps from 0 again
        self._memory = SamplingPhase(
            self.engine, self._policy.strategy, self._policy.phase, stays_awake=self._stays_awake()
        )
        if not self._started:
            atexit.register(self.engine.close)
            self._memory.run(lambda: self._start_engine(most_tokens))
            self._started = True

    def weigh(self, reward_weights: Sequence[float] | None) -> None:
        """Weigh rewards that are computed from now on by these."""
        self._reward_weights = reward_weights

    def _stays_awake(self) -> bool:
        """Whether the sampler of a stream, which could sleep, has room beside the trainer and so keeps its cache."""
        strategy, plan = self._policy.strategy, self._policy.memory_plan
        if self.stream is None or not self.engine.sleep_level or strategy.offloads:
            return False
        return all(run_on_all_ranks(lambda: plan is not None and plan.has_room_for_both))

    def describe(self) -> list[tuple[str, str]]:
        """Return a row for the table at start, if what the sampler does between rollouts is not what was set."""
        if self._memory is None or self._memory.sleep_level == self.engine.sleep_level:
            return []
        level = f"sleep_level={self.engine.sleep_level} is not needed"
        return [("between rollouts", f"the sampler stays awake with its cache: it fits beside the trainer ({level})")]

    def _start_engine(self, most_tokens: int | None) -> None:
        self.engine.expect(most_tokens)
        self.engine.start(self._policy.hf_model.path)
        if self.engine.sleep_level:  # the model is built in the memory that it leaves
            self.engine.wait_ready()
            self.engine.sleep(self.engine.sleep_level)

    def finish(self) -> None:
        """Let the engine sleep, if it does, and take back what the trainer needs."""
        if self.stream is not None and self.memory.sleep_level:
            self.memory.run(self.stream.put_away)
        if not self.memory.finish():
            self.version = None

    def close(self) -> None:
        """End the engine; the next `start` begins anew."""
        self._end_run(engine_ends=True)
        self.engine.close()
        self._started, self._ready, self.version = False, False, None
        if self._memory is not None:
            self._memory.reload()  # a checkpoint may be saved of what is there

    def let_go(self) -> None:
        """End a run: the engine reads no memory of it any more, and keeps its own weights."""
        self._end_run(engine_ends=False)

    def _end_run(self, *, engine_ends: bool) -> None:
        if self.stream is not None:
            self.stream.close(engine_ends=engine_ends)
        self.engine.let_go()

    def metrics(self) -> dict[str, float]:
        """Return the restarts of this rank's engine, and what memory changed hands around the last rollout."""
        metrics = {"perf/engine_restarts": float(self.engine.num_restarts)}
        if self._policy.strategy.offloads:
            metrics["perf/offloaded_gb"] = self.memory.offloaded_bytes / 1e9
        if self.memory.changes_hands:
            metrics["perf/trainer_kept_gb"] = self.memory.kept_bytes / 1e9
        if self.engine.sleep_level:
            metrics["perf/sleep_freed_gb"] = self.memory.freed_bytes / 1e9
        if self.engine.takes_direct:  # on every rank, since all of them log the same metrics
            sent = None if self.last_sync is None else self.last_sync.direct
            metrics["perf/sync_gb_per_s"] = 0.0 if sent is None else sent.rate / 1e9
            metrics["perf/sync_link_frac"] = 0.0 if sent is None else sent.link_share
        if self.stream is not None:
            metrics |= self.stream.metrics()
        return metrics

    @property
    def activity(self) -> SpanLog | None:
        """What this rank's sampler did when; None if another rank leads it."""
        replica = self._policy.strategy.replica
        if replica is None or not replica.is_leader:
            return None
        return self.engine.activity if self.engine.activity is not None else self._calls

    # ---- samples and rewards ---------------------------------------------------------------------------------------

    def sample(self, prompts: list[Prompt], params: SamplingParams, num_generations: int) -> list[Sample]:
        """Return rewarded samples of a training step, which takes the time for both."""
        if self.engine.replays_run:
            return self._recorded(num_generations)
        if self.stream is not None:
            return self._next_batch(prompts, self.stream)
        self.memory.prepare_sampling()
        with self._policy.phase("rollout"):
            samples = self.generate(prompts, params, num_generations)
        with self._policy.phase("reward"):
            self.reward(samples)
        return samples

    def sample_parts(self, prompts: list[Prompt], num_generations: int, count: int) -> Iterator[list[Sample]]:
        """Yield the rewarded samples of a training step in so many parts, each as soon as the stream has it."""
        if self.stream is not None:
            for number in range(count):
                yield self._next_batch([] if number else prompts, self.stream)
            return
        samples = self._recorded(num_generations)
        size = len(samples) // count
        for start in range(0, len(samples), size):
            yield samples[start : start + size]

    def _recorded(self, num_generations: int) -> list[Sample]:
        """Return the samples that the recorded run trained on in this step."""
        engine, policy = cast("ReplayEngine", self.engine), self._policy
        replicas = policy.strategy.layout.data_parallel_size(policy.trainer.world_size)
        count = policy.trainer.datamodule.batch_size // replicas * num_generations  # type: ignore[attr-defined]
        with policy.phase("rollout"):
            return self.memory.run(partial(engine.rollout, policy.trainer.global_step, count))

    def _next_batch(self, prompts: list[Prompt], stream: StreamedRollouts) -> list[Sample]:
        """Return the samples that the stream has for this step, or its next part, and give it the prompts."""
        samples: list[Sample] | None = None
        while True:
            if samples is None:
                self.memory.prepare_sampling()
                step = self._policy.trainer.global_step
                with self._policy.phase("rollout"):
                    samples = self.memory.run(
                        partial(stream.next_batch, prompts, step, self._judge, self._environment, self._judged_by)
                    )
            if not self._lost_anywhere(samples is None):
                return samples or []
            self.version, prompts = None, []  # they were admitted
            self.sync(self._policy.trainer.global_step)

    def generate(self, prompts: list[Prompt], params: SamplingParams, num_generations: int) -> list[Sample]:
        """Return the replica's samples of its prompts, or its episodes."""
        samples: list[Sample] | None = None if prompts else []  # none in the last validation batch of this replica
        while True:
            if samples is None:
                self.memory.prepare_sampling()
                with self._calls.during(SAMPLING) as span:
                    samples = self.memory.run(lambda: self._try_generate(prompts, params, num_generations))
                    span.tokens = sum(len(sample.policy_ids) for sample in samples or [])
            if not self._lost_anywhere(samples is None):
                return samples or []
            self.version = None
            self.sync(self._policy.trainer.global_step)

    def _try_generate(self, prompts: list[Prompt], params: SamplingParams, count: int) -> list[Sample] | None:
        """Sample; None if the engine's process was replaced and has no weights to sample with."""
        options: dict[str, Any] = {
            "num_generations": count,
            "tokenizer": self._policy.hf_model.tokenizer,
            "seed": run_seed(),
            "step": self._policy.trainer.global_step,
        }
        try:
            if self.stream is not None:
                self.stream.put_away()
            if self._environment is None:
                return generate_samples(self.engine, prompts, params, **options)
            return play_episodes(self.engine, self._environment, prompts, params, **options)
        except WeightsLostError:
            return None

    def reward(self, samples: list[Sample]) -> None:
        """Fill in the rewards."""
        replica = self._policy.strategy.replica
        assert replica is not None
        if not samples:
            return

        def compute() -> list[tuple[dict[str, float], float, dict[str, str]]]:
            self._judge(samples)
            return [(sample.rewards, sample.reward, sample.reward_errors) for sample in samples]

        for sample, results in zip(samples, replica.run_on_leader(compute), strict=True):
            sample.rewards, sample.reward, sample.reward_errors = results

    @property
    def _judged_by(self) -> str:
        """The names of the rewards and their weights."""
        return json.dumps([[reward_name(reward) for reward in self._rewards], list(self._reward_weights or ())])

    def _judge(self, samples: list[Sample]) -> None:
        """Fill in the rewards, in this process."""
        if self._rewards:
            compute_rewards(samples, self._rewards, self._reward_weights)
        if self._environment is not None:
            add_episode_rewards(samples)

    # ---- weights ---------------------------------------------------------------------------------------------------

    def sync(self, version: int, *, for_stream: bool = True) -> None:
        """Push the policy's weights to this replica's engine; a collective of all replicas.

        Args:
            version: Becomes that of the engine.
            for_stream: Responses under way may go on with these weights. If not, they are put away, since weights may
                be others than those of that version, such as their average.
        """
        policy = self._policy
        if not self._ready:
            if not self.engine.sleep_level:  # else `start` has waited for it, and it sleeps
                with policy.phase(START_PHASE):
                    self.memory.run(self.engine.wait_ready)
            self._ready = True
        if self.stream is not None:
            with policy.phase("rollout"):
                self.memory.run(partial(self.stream.before_update, puts_away=not for_stream))
        self.memory.prepare_sync()
        with policy.phase("weight_sync"):
            while True:  # at most as often as the engines may be restarted
                report = self._push(policy.weights_to_push(direct=self.engine.takes_direct), version)
                if not self._lost_anywhere(report is None):
                    break
        self.last_sync, self.version = report, version

    def _lost_anywhere(self, lost: bool) -> bool:
        """Whether an engine lost its weights: this replica's, or any where replicas share experts and push together."""
        if self._policy.strategy.layout.expert_model_parallel_size == 1:
            return lost
        return any(data_parallel_gather(lost))

    def _push(self, source: WeightSource, version: int) -> SyncReport | None:
        """Hand the weights to the engine; None if its process was replaced meanwhile, on every rank; a collective."""
        if self.engine.is_collective:
            return self.engine.update_weights(source, version)
        replica = self._policy.strategy.replica
        assert replica is not None
        return replica.run_on_leader(
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
    if isinstance(engine, ReplayEngine) and not engine.replays_run:
        raise ValueError(
            f"environment={type(environment).__name__} with engine=ReplayEngine: recorded episodes hold the"
            " environment's replies already, and it would be asked about turns that nobody took. Leave environment"
            " out, or use another engine."
        )


def check_engine(
    policy: "PolicyModule", engine: RolloutEngine, sampling: SamplingParams, environment: Environment | None
) -> None:
    """Refuse an engine that does not go with the policy, its micro-batches, its responses or its ranks.

    Raises:
        ValueError: With the numbers and the remedy.
    """
    model, quantisation = policy.model_path, policy.hf_model.quantisation
    if quantisation is not None:  # the engine would take it as it is, and then weights in 16 bits
        raise ValueError(
            f"model {model!r} is quantised ({quantisation}): the sampler would quantise the weights that it gets, and"
            " sample from another model than the one that is trained. Make it one of 16 bits:"
            f" `lightning-megatron-rl convert {model} model.ckpt`, then `lightning-megatron-rl convert model.ckpt"
            " model-16bit`, and set model: model-16bit."
        )
    if engine.replays_run:
        return
    limit, budget = engine.max_model_len, policy.train_settings.token_budget
    multiple = microbatch_rules(policy.strategy.layout, fp8=policy.train_settings.is_fp8).row_multiple
    least = round_up(limit, multiple)
    if least > budget:
        padded = f", with padding {least}" if least > limit else ""
        raise ValueError(
            f"train.max_tokens_per_microbatch={budget} < engine.max_model_len={limit}{padded}: a sampled sequence may"
            f" not fit into a micro-batch. Raise train.max_tokens_per_microbatch to {least} or lower max_model_len."
        )
    if sampling.max_tokens >= limit:
        raise ValueError(
            f"sampling.max_tokens={sampling.max_tokens} leaves no room for a prompt in engine.max_model_len={limit}:"
            " raise max_model_len or lower max_tokens."
        )
    assert policy.strategy.replica is not None
    ranks, name = policy.strategy.replica.ranks, type(engine).__name__
    if not engine.is_collective:
        return
    if len(ranks) != engine.tensor_parallel_size:
        raise ValueError(
            f"{name}(tensor_parallel_size={engine.tensor_parallel_size}) in replicas of {len(ranks)} rank(s) (tensor x"
            " pipeline x context): an engine in the trainer's processes has one worker on each rank of a replica. Set"
            " its tensor_parallel_size to that, or use VLLMEngine."
        )
    if len(ranks) > 1 and environment is not None:
        raise ValueError(
            f"environment={type(environment).__name__} with {name} on {len(ranks)} ranks: each would play the episodes"
            " by itself, and one late reply would leave the others waiting. Use VLLMEngine."
        )
    if ranks[-1] - ranks[0] != len(ranks) - 1:
        raise ValueError(
            f"the ranks {ranks} of a replica are not neighbours, which an engine in the trainer's processes needs: use"
            " VLLMEngine, or a layout without pipeline parallelism."
        )


def update_if_possible(engine: RolloutEngine, source: WeightSource, version: int) -> SyncReport | None:
    """Hand weights to an engine while the other ranks run the collectives of `source`; None if it lost them."""
    try:
        return engine.update_weights(source, version)
    except WeightsLostError:
        return None
    finally:
        source.finish_collectives()
