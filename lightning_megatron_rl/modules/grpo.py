"""`GRPOModule`: group-relative policy optimisation. One batch of prompts is one rollout is one `global_step`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from lightning.pytorch import Callback
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import Tensor

from lightning_megatron_rl.algorithms.advantages import group_advantages
from lightning_megatron_rl.algorithms.tally import Tally
from lightning_megatron_rl.callbacks.weight_sync import WeightSync
from lightning_megatron_rl.data.prompts import PromptDataModule
from lightning_megatron_rl.environments.base import NAME as ENVIRONMENT
from lightning_megatron_rl.environments.base import Environment, EpisodeSettings
from lightning_megatron_rl.environments.guard import GuardedEnvironment
from lightning_megatron_rl.modules.arguments import check_arguments
from lightning_megatron_rl.modules.batches import check_prompts, check_samples
from lightning_megatron_rl.modules.dynamic_sampling import DynamicSampling, Replicas, refill_groups, shuffled_prompts
from lightning_megatron_rl.modules.evaluation import Evaluation, EvaluationSettings
from lightning_megatron_rl.modules.failures import FailureWatch
from lightning_megatron_rl.modules.grpo_config import GRPOLossConfig
from lightning_megatron_rl.modules.grpo_loss import GRPOLoss
from lightning_megatron_rl.modules.pace import idle_shares, sampling_rate, stream_counts
from lightning_megatron_rl.modules.parts import BY_TOKENS, UpdateParts, check_parts
from lightning_megatron_rl.modules.policy import PolicyModule
from lightning_megatron_rl.modules.reference import Reference, ReferenceSettings
from lightning_megatron_rl.modules.rollout_batch import (
    Rollout,
    add_sample_metrics,
    add_sequence_metrics,
    add_staleness_metrics,
    check_batch_arithmetic,
    check_split,
    check_training_sampling,
    join_rollouts,
    to_sequence,
)
from lightning_megatron_rl.modules.sampling import Sampler, check_engine, check_episodes
from lightning_megatron_rl.modules.shaping import OverlongSettings, shaped_rewards
from lightning_megatron_rl.modules.start import describe_unplanned
from lightning_megatron_rl.modules.streaming import (
    Backlog,
    StreamedRollouts,
    StreamingSettings,
    load_streams,
    save_streams,
)
from lightning_megatron_rl.modules.training import TrainingSettings
from lightning_megatron_rl.parallel.distributed import context_parallel_sum, data_parallel_gather, data_parallel_rank
from lightning_megatron_rl.rewards.base import Reward, reward_name, reward_names
from lightning_megatron_rl.rewards.guard import guard_all
from lightning_megatron_rl.rollout.protocol import RolloutEngine, SamplingParams
from lightning_megatron_rl.rollout.record import Origin
from lightning_megatron_rl.rollout.replay import RecordedReward, ReplayEngine
from lightning_megatron_rl.rollout.vllm.engine import VLLMEngine
from lightning_megatron_rl.rollout.watch import Watched
from lightning_megatron_rl.sample import Prompt, Sample
from lightning_megatron_rl.utilities.ranges import COUNT, check_ranges
from lightning_megatron_rl.utilities.seeds import run_seed

# of Megatron's config: what is drawn is another in each pass
_RANDOM = ("hidden_dropout", "attention_dropout", "moe_input_jitter_eps")

# attributes that a run takes over once, when it begins, and those of which a stream is made besides
_OF_THE_START = ("engine", "environment", "episodes", "max_failed_rollouts", "rewards")
_OF_A_STREAM = ("dynamic_sampling", "num_generations", "sampling")
_OF_THE_MODULE = ("loss_config", "reference_settings")  # what a module makes its objective of when it is made


class GRPOModule(PolicyModule):
    """Train a language model with GRPO: sample groups of responses, reward them, push the better ones.

    Args:
        model: Hugging Face hub name, or a directory that `save_pretrained` wrote.
        rewards: Functions or objects from samples to rewards; see `Reward`, and `GuardedReward` for deadlines.
        reward_weights: Weight of each reward in the sum; 1 each if not given.
        engine: Samples the responses; vLLM in a child process of its own by default.
        environment: Replies to what the policy writes, over several turns; none if not given. Its reward comes on top
            of those of `rewards`, which may be empty then.
        episodes: Limits of an episode, and what becomes of one whose environment fails.
        num_generations: Responses per prompt (the group).
        updates_per_rollout: Optimizer steps per rollout; each takes an equal share of its prompts.
        sampling: Temperature and limits of training rollouts.
        validation_sampling: Those of validations, at temperature 1 by default; not given: as `sampling`, but greedy.
        loss: The objective.
        reference: The policy that KL is measured to; by default the one that training starts from.
        overlong: Penalty and filter of responses near the length limit; none if not given.
        dynamic_sampling: Draw other prompts for groups without spread; off if not given.
        streaming: Sample ahead of training, at most so many versions; off if not given. docs/asynchronous.md.
        train: How the model is built and trained.
        evaluation: What validation samples and reports besides one response per prompt.
        init_from: Distributed checkpoint of a run of this model, in any layout, whose weights replace those of `model`.
        max_failed_rollouts: So many rollouts in a row on all of whose samples a reward or the environment fails end the
            run with an error; so does a whole run of such, and a `validate` or `test`. Null never ends it.

    Raises:
        ValueError: One generation per prompt, weights that do not match the rewards, sampling that the trainer cannot
            score.
    """

    has_old_logprobs = True
    engine: RolloutEngine
    reference: Reference
    _is_set_up = False
    compares_groups = True  # whether the configured advantage is used, which may need more than one response

    def __init__(
        self,
        model: str,
        rewards: list[Reward],
        reward_weights: list[float] | None = None,
        engine: RolloutEngine | None = None,
        environment: Environment | None = None,
        episodes: EpisodeSettings | None = None,
        num_generations: int = 8,
        updates_per_rollout: int = 1,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008  (frozen)
        validation_sampling: SamplingParams | None = None,
        loss: GRPOLossConfig | None = None,
        reference: ReferenceSettings | None = None,
        overlong: OverlongSettings | None = None,
        dynamic_sampling: DynamicSampling | None = None,
        streaming: StreamingSettings | None = None,
        train: TrainingSettings | None = None,
        evaluation: EvaluationSettings | None = None,
        init_from: str | None = None,
        max_failed_rollouts: int | None = 3,
    ) -> None:
        super().__init__(model=model, train=train, init_from=init_from)
        check_arguments(type(self).__name__, locals())
        config = loss or GRPOLossConfig()
        check_episodes(environment, episodes, engine)
        check_batch_arithmetic(
            num_generations,
            updates_per_rollout,
            rewards,
            reward_weights,
            sampling,
            advantage=config.advantage if self.compares_groups else None,
            compares_responses=dynamic_sampling is not None,
            has_environment=environment is not None,
        )
        self.rewards = rewards
        self.reward_weights = reward_weights
        self.engine = engine if engine is not None else VLLMEngine()
        streams = streaming is not None and streaming.is_on and not self.engine.replays_run
        self.streamed = StreamedRollouts(streaming) if streaming is not None and streams else None
        self.batch_parts = 1 if streaming is None else streaming.batch_parts
        self.backlog = Backlog()
        self._read_by: tuple[Any, Any] = None, None  # the Trainer and the data module of the last fit
        self.sampler = Sampler(self, self.engine, self.streamed)
        self.environment = environment
        self.episodes = episodes or EpisodeSettings()
        self.num_generations = num_generations
        self.updates_per_rollout = updates_per_rollout
        self.sampling = sampling
        self.validation_sampling = validation_sampling or replace(sampling, temperature=0.0)
        self.temperature = sampling.temperature
        self.loss_config = config
        self.loss = GRPOLoss(config, context_parallel_sum)
        self.has_old_logprobs = not config.bypass
        self.overlong = overlong
        self.dynamic_sampling = dynamic_sampling
        self.reference_settings = reference or ReferenceSettings()
        kind = self.reference_settings.resolve(
            kl_coef=config.kl_coef, has_adapters=self.train_settings.lora is not None
        )
        self.reference = Reference(self, self.reference_settings, kind)
        check_ranges({"max_failed_rollouts": COUNT.called("null never ends the run")}, locals())
        self.max_failed_rollouts = max_failed_rollouts
        self.last_rollout: Rollout | None = None  # of the step that ends, for callbacks
        self.evaluation = Evaluation(evaluation or EvaluationSettings(), has_episodes=environment is not None)

    def __setattr__(self, name: str, value: Any) -> None:
        """Weigh later rewards by new `reward_weights`; refuse what cannot be trained on, or comes too late in a run."""
        if name == "sampling":
            check_training_sampling(value)
        if name in _OF_THE_MODULE and name in vars(self):
            raise ValueError(
                f"{type(self).__name__}.{name} was set to {value!r}, but the module has made its loss and its reference"
                f" already: give it to a new {type(self).__name__}."
            )
        if self._is_running and (name in _OF_THE_START or (self.streamed is not None and name in _OF_A_STREAM)):
            of = "its stream" if name in _OF_A_STREAM else "the run"
            raise ValueError(
                f"{type(self).__name__}.{name} was set to {value!r} during a run, but {of} goes on with what it was at"
                " the start: set it before. What may change in a run is reward_weights (0 leaves a reward out), and,"
                " without streaming, sampling and num_generations."
            )
        if name == "reward_weights" and self._is_running:
            reward_names(self.rewards, value)
            self.sampler.weigh(value)
        super().__setattr__(name, value)

    @property
    def _is_running(self) -> bool:
        """Whether a run has begun and not ended, not even by an error."""
        return self._is_set_up and self.trainer.state.status == TrainerStatus.RUNNING

    # ---- life ------------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Check model, lengths and prompts, then let the engine start while this process builds the model."""
        self._is_set_up = False
        super().setup(stage)
        timeout_s, config = self.strategy.timeout_s, self.hf_model.config
        check_engine(self, self.engine, self.sampling, self.environment)
        if isinstance(self.engine, ReplayEngine) and self.engine.replays_run:
            self.open_record(self.engine, stage)
        else:
            self.evaluation.settings.check_length(self.engine.max_model_len)
        # guards are kept for the whole run: they know of calls that still hang
        self.rewards = list(guard_all(self.rewards, timeout_s))
        environment = None
        if self.environment is not None:
            environment = GuardedEnvironment(
                self.environment, self.episodes, vocab_size=config.vocab_size, timeout_s=timeout_s
            )
        assert self.hf_model.tokenizer is not None  # its files are checked before the engine loads them
        self.check_prompts(stage)
        self.failures = FailureWatch(self.max_failed_rollouts)
        if self.sampler.engine is not self.engine:  # it was replaced
            self.sampler = Sampler(self, self.engine, self.streamed)
        if stage == "fit":
            data = self.trainer.datamodule  # type: ignore[attr-defined]
            read_by = self.trainer, data
            if any(old is not new for old, new in zip(self._read_by, read_by, strict=True)):
                (self.streamed or self.backlog).load([])  # another loader begins with its first prompt
                if isinstance(data, PromptDataModule):
                    data.forget_stream()
            self._read_by = read_by
            if self.streamed is not None:
                self.streamed.prepare(self)
            if self.batch_parts > 1:
                check_parts(self, self.batch_parts)
        self.sampler.start(self.rewards, self.reward_weights, environment, self._most_tokens())
        self._is_set_up = True

    def open_record(self, engine: ReplayEngine, stage: str) -> None:
        """Find the record of a run, check that it is of this start, and that nothing else would be sampled."""
        data, replica = self.trainer.datamodule, self.strategy.replica  # type: ignore[attr-defined]
        assert replica is not None
        if stage != "fit" or not isinstance(data, PromptDataModule):
            raise ValueError(
                f"ReplayEngine(path={engine.path!r}) replays the training steps of a run: use it with fit and the run's"
                f" PromptDataModule, not with {stage} and {type(data).__name__}."
            )
        if data.val_names and self.trainer.limit_val_batches != 0:
            raise ValueError(
                f"ReplayEngine(path={engine.path!r}) with validation, which a record has no responses for: set"
                " trainer.limit_val_batches: 0."
            )
        origin = Origin(self.hf_model.fingerprint, run_seed())
        replica.run_on_leader(lambda: engine.open_run(data_parallel_rank(), origin))

    def _most_tokens(self) -> int | None:
        """Tokens that this run samples at most for training, of one replica; None: it has no end, or none is known."""
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        batch_size, max_steps = getattr(data, "batch_size", None), self.trainer.max_steps
        if batch_size is None or max_steps < 0:
            return None
        replicas = self.strategy.layout.data_parallel_size(self.trainer.world_size)
        return max_steps * batch_size // replicas * self.num_generations * self.sampling.max_tokens

    def check_prompts(self, stage: str) -> None:
        """Refuse prompts that the engine has no room for, batches that do not divide into updates, and no data to draw.

        Those of another data module are checked when they are sampled and split.
        """
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, PromptDataModule):
            if self.dynamic_sampling is not None and stage == "fit":
                raise ValueError(
                    f"dynamic_sampling draws prompts from a PromptDataModule, the Trainer has {type(data).__name__}:"
                    " use one, or leave dynamic_sampling out."
                )
            return
        if not isinstance(self.engine, ReplayEngine):
            passes = self.evaluation.settings.passes(self.validation_sampling, self.sampling)
            training, evaluation = self.sampling.max_tokens, max(params.max_tokens for params, _ in passes)
            if self.environment is not None:  # a turn takes what is left, down to one token
                training = evaluation = 1
            response = {"train": training, **dict.fromkeys(data.val_names, evaluation)}
            data.fit_into_engine(self.engine.max_model_len, response, self.hf_model.config.vocab_size)
        replicas = self.strategy.layout.data_parallel_size(self.trainer.world_size)
        check_split(data.batch_size // replicas, self.updates_per_rollout)

    def configure_callbacks(self) -> list[Callback]:
        """Add `WeightSync`, unless the Trainer has one: returning it would replace the user's."""
        present = any(isinstance(callback, WeightSync) for callback in self.trainer.callbacks)  # type: ignore[attr-defined]
        return [*super().configure_callbacks(), *([] if present else [WeightSync()])]

    @property
    def scores_first(self) -> bool:
        """Whether a pass over the rollout gives the old policy's log-probs before it is trained on.

        A single update computes them itself: its policy is the old one. The pass remains where something is made of
        them before the update (KL in rewards, weights of a user's own correction, entropies, routing to replay), where
        the update's are other ones (dropout), or of fewer tokens (`overlong.filter`).
        """
        return not self.loss_config.bypass and bool(self.scored_first_for())

    def scored_first_for(self) -> list[str]:
        """Return the settings for which something has to be known of a whole rollout before the first update on it."""
        config, train = self.loss_config, self.train_settings
        dropout = train.lora is not None and train.lora.dropout
        reasons = {
            f"updates_per_rollout={self.updates_per_rollout}": self.updates_per_rollout > 1,
            "loss.kl_in=reward": config.kl_coef and config.kl_in == "reward",
            f"loss.top_entropy_quantile={config.top_entropy_quantile:g}": config.top_entropy_quantile < 1,
            "a loss.correction of your own": config.corrects_rows,
            "train.moe.router_replay": train.moe is not None and train.moe.router_replay != "none",
            "dropout": dropout or any(train.model_config.get(name) for name in _RANDOM),
            "overlong.filter": self.overlong is not None and self.overlong.filter,
        }
        return [name for name, holds in reasons.items() if holds]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Forget what the engine has: the weights are about to be others."""
        super().on_load_checkpoint(checkpoint)
        self.sampler.version = None
        if self.trainer.state.fn == TrainerFn.FITTING:
            load_streams(checkpoint, self.streamed or self.backlog, self.trainer.datamodule)  # type: ignore[attr-defined]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep what the streams of all replicas have under way; a collective."""
        super().on_save_checkpoint(checkpoint)
        ahead = self.streamed or (None if self.backlog.is_empty else self.backlog)
        if ahead is not None and self.trainer.state.fn == TrainerFn.FITTING:
            save_streams(checkpoint, ahead)

    def on_train_end(self) -> None:
        """Refuse to call a run a success in which a reward never worked."""
        super().on_train_end()
        self.failures.finish("rollouts")

    def teardown(self, stage: str) -> None:
        """The engine reads no memory of this run any more; it keeps its own weights."""
        self._is_set_up = False
        self.sampler.let_go()
        super().teardown(stage)

    def close_engine(self) -> None:
        """End the engine; the next run starts it anew."""
        self.sampler.close()

    def replay(self, samples: list[Sample]) -> None:
        """Take rollouts and their rewards from a record, from now on, in the place of the sampler's."""
        longest = max(len(sample.policy_ids) for sample in samples)
        self.engine = ReplayEngine(samples)
        self.rewards, self.reward_weights = [RecordedReward(samples)], None
        self.environment = None  # the record holds its replies
        self.streamed, self.batch_parts = None, 1  # a record holds one batch
        self.dynamic_sampling = None  # it would draw other prompts than the recorded ones
        self.sampling = replace(self.sampling, max_tokens=max(longest, 1))

    # ---- training --------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Count the prompts that the step trains on; those that are read may be of later steps."""
        super().on_train_batch_start(batch, batch_idx)
        if self._num_rows is not None:
            self._num_rows = max(1, self._num_prompts(batch))

    def _num_prompts(self, batch: list[Prompt]) -> int:
        """Return how many prompts of this replica a step trains on, whatever is read with it."""
        if self.streamed is None and self.backlog.is_empty:
            return len(batch)
        replicas = self.strategy.layout.data_parallel_size(self.trainer.world_size)
        return int(self.trainer.datamodule.batch_size // replicas)  # type: ignore[attr-defined]

    def training_step(self, prompts: list[Prompt], batch_idx: int) -> Tensor:
        """Sample, score and reward a rollout, then update on it `updates_per_rollout` times."""
        check_prompts(self, prompts)
        self.loss.set_step(self.trainer.global_step)
        self.reference.refresh()
        if self.batch_parts > 1:
            return self.train_in_parts(prompts)
        rollout = self.rollout(prompts)
        *inner, last = rollout.split(self.updates_per_rollout)
        with self.phase("update"):
            for part in inner:
                self.forward_backward(part)
                self.optimizers().step()  # type: ignore[union-attr]
            loss = self.forward_backward(last)
        return loss  # Lightning takes this step

    def rollout(self, prompts: list[Prompt]) -> Rollout:
        """Return samples of `prompts` with rewards, old and reference log-probs, and advantages."""
        tally = Tally()
        samples = self.sample(self.backlog.take(prompts, self))
        check_samples(self, samples)
        refills = self.streamed is None and not self.engine.replays_run  # a stream passes groups over by itself
        if self.dynamic_sampling is not None and refills:
            samples = self.refill(samples, self.dynamic_sampling, tally)
        self.sampler.finish()
        rollout = self.prepare(samples, tally)
        self.log_rollout(rollout, tally)
        if self.overlong is not None and self.overlong.filter:
            rollout.filter_overlong()
        self.last_rollout = rollout
        return rollout

    def train_in_parts(self, prompts: list[Prompt]) -> Tensor:
        """Compute the gradients of a batch part by part, each as soon as its samples are there; return its loss."""
        tally, rollouts = Tally(), list[Rollout]()
        self.temperature = self.sampling.temperature  # as in `sample`
        config, count = self.loss.config, self.batch_parts
        parts = UpdateParts(self.strategy.root_device, count, by_tokens=config.aggregation == BY_TOKENS)
        for samples in self.sampler.sample_parts(self.backlog.take(prompts, self), self.num_generations, count):
            rollouts.append(self.prepare(samples, tally))
            with self.phase("update"):
                loss = self.forward_backward(rollouts[-1], parts)
        self.sampler.finish()
        self.last_rollout = join_rollouts(rollouts)
        self.log_rollout(self.last_rollout, tally)
        return loss

    def prepare(self, samples: list[Sample], tally: Tally) -> Rollout:
        """Return rewarded samples as training data: with log-probs, if they are needed now, advantages and weights."""
        rollout = Rollout(samples, [to_sequence(sample) for sample in samples], self.num_generations)
        self.score_rollout(rollout)
        self.assign_advantages(rollout, tally)
        rollout.set_correction_weights(self.loss)
        return rollout

    def sample(self, prompts: list[Prompt]) -> list[Sample]:
        """Return rewarded samples of `prompts`."""
        self.temperature = self.sampling.temperature  # a callback may have set another
        return self.sampler.sample(prompts, self.sampling, self.num_generations)

    def refill(self, samples: list[Sample], settings: DynamicSampling, tally: Tally) -> list[Sample]:
        """Put groups of other prompts of the training set in the place of those without spread; a collective."""
        prompts: list[Prompt] = self.trainer.datamodule.train_items  # type: ignore[attr-defined]
        step = self.trainer.global_step
        return refill_groups(
            samples,
            self.num_generations,
            max_rounds=settings.max_rounds,
            candidates=lambda round_number: shuffled_prompts(prompts, run_seed(), step, round_number),
            sample=self.sample,
            replicas=Replicas(data_parallel_rank(), data_parallel_gather),
            tally=tally,
        )

    def score_rollout(self, rollout: Rollout) -> None:
        """Give a rollout's sequences their log-probs under the old policy, if needed now, and under the reference."""
        if self.loss.config.bypass:
            rollout.set_field("old_logprobs", [sequence.fields["rollout_logprobs"] for sequence in rollout.sequences])
        elif self.scores_first:
            with self.phase("old_logp"):
                scores = self.score(rollout.sequences, routing="record" if self.replays_routing else "free")
                rollout.set_field("old_logprobs", scores.logprobs)
                if self.loss.config.top_entropy_quantile < 1:
                    rollout.set_entropies(scores.entropies)
                if self.replays_routing:
                    rollout.set_routing(scores.routing)
        if self.reference.kind != "none":
            with self.phase("ref_logp"):
                rollout.set_field("ref_logprobs", self.reference.score(rollout.sequences).logprobs)

    def assign_advantages(self, rollout: Rollout, tally: Tally) -> None:
        """Fill in the advantages from the rewards and what shapes them; a collective."""
        rewards = shaped_rewards(
            rollout, self.loss.config, self.overlong, max_response_length=self.sampling.max_tokens, tally=tally
        )
        groups = rewards.view(-1, self.num_generations)
        advantages = group_advantages(groups, self.loss.config.advantage, self.reduce_on_device)
        rollout.set_advantages(advantages.flatten())

    def forward_backward(self, rollout: Rollout, parts: UpdateParts | None = None) -> Tensor:
        """Compute the gradients of one update; return its loss, equal on every rank.

        Args:
            rollout: What it trains on, or a part of that.
            parts: What the parts of the update add up to, of which the loss is known with the last one, nan before.
        """
        rollout.set_token_weights(self.loss, self.sampling.max_tokens, self.reduce_on_device)
        rollout.set_top_entropy(self.loss, self.reduce_on_device)
        if parts is not None:
            tokens = torch.tensor(float(rollout.num_targets), dtype=torch.float64)
            rollout.scale_token_weights(parts.weigh(self.reduce_on_device(tokens).item()))
        metrics = self.update(rollout.sequences, self.loss, parts=parts)
        self.log_metrics(metrics, prog_bar=("policy/loss",))
        return self.loss_of_update(metrics.get("policy/loss", torch.nan))

    def describe_batch(self, batch: list[Prompt]) -> list[tuple[str, str]]:
        """Return the arithmetic of a rollout, for the table at start."""
        replicas = self.strategy.layout.data_parallel_size(self.trainer.world_size)
        group, updates = self.num_generations, self.updates_per_rollout
        mine = self._num_prompts(batch)
        prompts = mine * replicas
        turns = f"at most {self.episodes.max_turns} turns, {self.sampling.max_tokens} tokens in all of them"
        return [
            ("prompts per rollout", f"{mine} per replica x {replicas} replicas = {prompts}"),
            ("samples per rollout", f"{prompts} prompts x {group} generations = {prompts * group}"),
            (
                "samples per update",
                f"{prompts * group} samples / {updates} updates per rollout = {prompts * group // updates}",
            ),
            self.train_settings.describe_microbatch(),
            ("response", f"at most {self.sampling.max_tokens} tokens, temperature {self.sampling.temperature:g}"),
            ("sampler", self.engine.describe()),
            *([] if self.streamed is None else [("streaming", self.streamed.describe(prompts))]),
            *self.sampler.describe(),
            *describe_unplanned(self.engine, self.strategy),
            *([] if self.environment is None else [("environment", f"{type(self.environment).__name__}, {turns}")]),
            *self.describe_objective(),
            ("reference", self.reference_settings.model or self.reference.kind.replace("_", " ")),
        ]

    def describe_objective(self) -> list[tuple[str, str]]:
        """Return what advantage and loss are, for the table at start."""
        return self.loss.config.describe()

    def rank_metrics(self) -> dict[str, float]:
        """Return what the sampler has to say of a step, and how much of it was lost by waiting."""
        waited = self.report.phase_seconds.get("rollout", 0.0)
        metrics = self.sampler.metrics() | idle_shares(*self.report.step_window(), waited, self.sampler.activity)
        if self.streamed is not None:
            at_batch = self.streamed.watch.at_batch
            metrics["rollout/oldest_age"] = float(at_batch.oldest_age)
            metrics["rollout/length_selection"] = abs(at_batch.selection)
        return metrics

    def rank_totals(self) -> dict[str, float]:
        """Return the rate of the sampler and the groups of the stream; ranks that do not lead a replica have none."""
        totals = sampling_rate(*self.report.step_window(), self.sampler.activity)
        return totals if self.streamed is None else totals | stream_counts(self.streamed.watch.at_batch)

    def watched(self) -> Watched:
        """Return the work of the sampler and of the stream that this rank leads."""
        return Watched(self.sampler.activity, None if self.streamed is None else self.streamed.watch)

    def log_rollout(self, rollout: Rollout, tally: Tally) -> None:
        """Log rewards, lengths and the mismatch between trainer and sampler, over all replicas."""
        add_sample_metrics(tally, rollout.samples, self.num_generations)
        add_staleness_metrics(tally, rollout.samples, self.trainer.global_step)
        if not self.loss.config.bypass:  # the trainer's log-probs are not known then
            add_sequence_metrics(tally, rollout.sequences)
        metrics = tally.reduce(self.reduce_on_device).compute()
        if self.loss.config.entropy_schedule is not None:
            metrics["policy/entropy_coef"] = self.loss.entropy_coef
        if isinstance(data := self.trainer.datamodule, PromptDataModule) and (long := data.long_prompts.get("train")):  # type: ignore[attr-defined]
            metrics["rollout/long_prompts"] = long
        metrics["rollout/staleness"] = self.trainer.global_step - metrics["rollout/weight_version"]
        self.log_metrics(metrics, prog_bar=("reward/mean",))
        for name in rollout.samples[0].rewards:
            who = "the environment" if name == ENVIRONMENT else f"the reward {name!r}"
            errors = [sample.reward_errors[name] for sample in rollout.samples if name in sample.reward_errors]
            self.failures.add("rollouts", who, failed=metrics[f"reward/{name}_failed_frac"] == 1, errors=errors)

    # ---- validation, test, prediction ------------------------------------------------------------------------------

    def validation_step(self, prompts: list[Prompt], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Sample one response per prompt with `validation_sampling`, and `evaluation.num_generations`; reward them."""
        check_prompts(self, prompts)
        for params, count in self.evaluation.settings.passes(self.validation_sampling, self.sampling):
            samples = self.sampler.generate(prompts, params, count)
            self.sampler.reward(samples)
            self.evaluation.add(samples, count)

    def test_step(self, prompts: list[Prompt], batch_idx: int, dataloader_idx: int = 0) -> None:
        """As validation."""
        self.validation_step(prompts, batch_idx, dataloader_idx)

    def predict_step(self, prompts: list[Prompt], batch_idx: int, dataloader_idx: int = 0) -> list[Sample]:
        """Return one sample per prompt, drawn with `validation_sampling`."""
        check_prompts(self, prompts)
        return self.sampler.generate(prompts, self.validation_sampling, 1)

    def on_validation_epoch_end(self) -> None:
        """Log ``val/<set>/mean_at_1`` and what else was asked for, for every data set, over all replicas."""
        self._finish_evaluation("val")

    def on_test_epoch_end(self) -> None:
        """Log ``test/<set>/mean_at_1`` for every data set."""
        self._finish_evaluation("test")

    def on_predict_epoch_end(self) -> None:
        """Let the engine sleep."""
        self.sampler.finish()

    def _finish_evaluation(self, stage: Literal["val", "test"]) -> None:
        self.sampler.finish()
        metrics = self.evaluation.finish(stage, self.reduce_on_device, self.strategy.union)
        self.log_metrics(metrics)
        at_once = self.trainer.state.fn != TrainerFn.FITTING
        self.failures.add_evaluation(stage, metrics, self.evaluation.samples, at_once=at_once)

    def evaluation_metrics(self, stage: str, sets: Sequence[str]) -> list[str]:
        """Return the names that a validation of these sets logs."""
        return self.evaluation.names(stage, sets, self.reward_components())

    def reward_components(self) -> list[str]:
        """Return the names of its rewards, and of the environment's."""
        return [reward_name(reward) for reward in self.rewards] + [ENVIRONMENT] * (self.environment is not None)
