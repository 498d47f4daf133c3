"""`PPOModule`: proximal policy optimisation with a critic of its own. One batch of prompts is one rollout."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Optional

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_megatron_rl.algorithms.gae import gae
from lightning_megatron_rl.algorithms.tally import Tally
from lightning_megatron_rl.algorithms.whitening import whiten
from lightning_megatron_rl.checkpoints.manifest import read_manifest
from lightning_megatron_rl.environments.base import Environment, EpisodeSettings
from lightning_megatron_rl.models.families.registry import num_experts
from lightning_megatron_rl.models.layers.value_head import value_processor
from lightning_megatron_rl.modules.batches import check_prompts
from lightning_megatron_rl.modules.critic import Critic, CriticSettings, ValueLoss, add_value_metrics, token_rewards
from lightning_megatron_rl.modules.evaluation import EvaluationSettings
from lightning_megatron_rl.modules.grpo import GRPOModule
from lightning_megatron_rl.modules.grpo_config import GRPOLossConfig
from lightning_megatron_rl.modules.reference import ReferenceSettings
from lightning_megatron_rl.modules.rollout_batch import Rollout, turn_rewards
from lightning_megatron_rl.modules.shaping import OverlongSettings, kl_penalties, penalised_rewards
from lightning_megatron_rl.modules.streaming import StreamingSettings
from lightning_megatron_rl.modules.training import TrainingSettings
from lightning_megatron_rl.rewards.base import Reward
from lightning_megatron_rl.rollout.protocol import RolloutEngine, SamplingParams
from lightning_megatron_rl.sample import Prompt
from lightning_megatron_rl.strategy.megatron_configs import check_optimizer_numbers
from lightning_megatron_rl.utilities.kinds import check_kinds
from lightning_megatron_rl.utilities.text_files import user_path

if TYPE_CHECKING:
    from megatron.core.optimizer import OptimizerConfig

_CRITIC_LR = 1e-5


class PPOModule(GRPOModule):
    """Train a language model with PPO: sample responses, reward them, and judge each token by a critic's values.

    Args:
        model: Hugging Face hub name, or a directory that `save_pretrained` wrote.
        rewards: Functions or objects from samples to rewards; see `Reward`.
        reward_weights: Weight of each reward in the sum; 1 each if not given.
        critic: Where the critic starts, and how values become advantages.
        critic_optimizer: Megatron's own `OptimizerConfig` of the critic, whose learning rate is constant.
        engine: Samples the responses; vLLM in a child process of its own by default.
        environment: Replies to what the policy writes, over several turns; none if not given. Its reward comes on top
            of those of `rewards`, which may be empty then.
        episodes: Limits of an episode, and what becomes of one whose environment fails.
        num_generations: Responses per prompt.
        updates_per_rollout: Optimizer steps per rollout, of the actor and of the critic; each takes an equal share of
            its prompts.
        sampling: Temperature and limits of training rollouts.
        validation_sampling: Those of validations, at temperature 1 by default; not given: as `sampling`, but greedy.
        loss: The actor's objective; its `advantage` is not used, its `aggregation` is the critic's too.
        reference: The policy that KL is measured to; by default the one that training starts from.
        overlong: Penalty and filter of responses near the length limit; none if not given.
        streaming: Sample ahead of training, at most so many versions; off if not given. docs/asynchronous.md.
        train: How the model is built and trained.
        evaluation: What validation samples and reports besides one response per prompt.
        init_from: Distributed checkpoint of a run of this model, in any layout, whose weights replace those of `model`.
        max_failed_rollouts: So many rollouts in a row on all of whose samples a reward or the environment fails end the
            run with an error; so does a whole run of such, and a `validate` or `test`. Null never ends it.

    Raises:
        ValueError: As `GRPOModule`; a critic that is a mixture of experts, or of another vocabulary; "auto" in `train`.
    """

    compares_groups = False

    def __init__(
        self,
        model: str,
        rewards: list[Reward],
        reward_weights: list[float] | None = None,
        critic: CriticSettings | None = None,
        critic_optimizer: Optional["OptimizerConfig"] = None,
        engine: RolloutEngine | None = None,
        environment: Environment | None = None,
        episodes: EpisodeSettings | None = None,
        num_generations: int = 4,
        updates_per_rollout: int = 1,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008  (frozen)
        validation_sampling: SamplingParams | None = None,
        loss: GRPOLossConfig | None = None,
        reference: ReferenceSettings | None = None,
        overlong: OverlongSettings | None = None,
        streaming: StreamingSettings | None = None,
        train: TrainingSettings | None = None,
        evaluation: EvaluationSettings | None = None,
        init_from: str | None = None,
        max_failed_rollouts: int | None = 3,
    ) -> None:
        super().__init__(
            model=model,
            rewards=rewards,
            reward_weights=reward_weights,
            engine=engine,
            environment=environment,
            episodes=episodes,
            num_generations=num_generations,
            updates_per_rollout=updates_per_rollout,
            sampling=sampling,
            validation_sampling=validation_sampling,
            loss=loss,
            reference=reference,
            overlong=overlong,
            streaming=streaming,
            train=train,
            evaluation=evaluation,
            init_from=init_from,
            max_failed_rollouts=max_failed_rollouts,
        )
        if self.train_settings.is_open:
            raise ValueError(
                f"train.max_tokens_per_microbatch={self.train_settings.max_tokens_per_microbatch!r},"
                f" train.recompute={self.train_settings.recompute!r}: the planner does not know what a critic takes;"
                " give PPOModule a number of tokens, and recompute none or full"
            )
        if self.loss_config.advantage != GRPOLossConfig().advantage:
            rank_zero_warn(
                f"loss.advantage={self.loss_config.advantage!r} does nothing: PPOModule's advantages come from its"
                " critic (critic.gamma, critic.lam)."
            )
        check_kinds({"critic": CriticSettings}, locals(), type(self).__name__)
        self.critic_settings = critic or CriticSettings()
        if init_from is not None and self.critic_settings.model is None and self.critic_settings.init_from is None:
            raise ValueError(
                f"init_from={init_from!r} without critic.model or critic.init_from: the critic would start from the"
                f" weights of {model!r}, not from the actor's. Give one of them."
            )
        check_optimizer_numbers(critic_optimizer, "critic_optimizer.")
        self.critic_optimizer_config = critic_optimizer
        self.value_loss = ValueLoss(self.critic_settings.value_clip)
        self.critic: Critic | None = None  # no submodule: the strategy trains `model`, this module trains the critic

    # ---- the critic ------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Check actor and critic, before weights are loaded."""
        if stage == "fit":
            self._critic_model = self._find_critic()
            if self.critic_settings.init_from is not None:
                read_manifest(user_path(self.critic_settings.init_from))
            self.strategy.resolve_optimizer_config(self._critic_optimizer_config())
        super().setup(stage)

    def _find_critic(self) -> Any:
        from lightning_megatron_rl.models.hf.model import HFModel
        from lightning_megatron_rl.models.value_model import ValueModel

        found = ValueModel(self.critic_settings.model or self.model_path, verify=self.train_settings.verify_model)
        experts = num_experts(found.config)
        if experts > 1:
            raise ValueError(
                f"critic {found.name_or_path!r} is a mixture of {experts} experts: its routers would be trained without"
                " the settings of `moe`. Start from a dense model, with critic.model."
            )
        actor = HFModel(self.model_path).config
        if found.config.vocab_size != actor.vocab_size:
            raise ValueError(
                f"critic {found.name_or_path!r} has a vocabulary of {found.config.vocab_size} tokens, the actor"
                f" {self.model_path!r} of {actor.vocab_size}: the critic reads the actor's tokens, so both must be of"
                " one family."
            )
        try:
            self.check_model(found, self.train_settings.model_config)
        except ValueError as error:
            raise ValueError(f"critic {found.name_or_path!r}: {error}") from error
        return found

    def configure_model(self) -> None:
        """Build the actor, its reference and, to train, the critic."""
        super().configure_model()
        fits = self.trainer.state.fn == TrainerFn.FITTING  # type: ignore[attr-defined]
        if fits and self.critic is None:
            init_from = self.critic_settings.init_from
            chunks = self._critic_model.build_chunks(
                **self.build_options,
                load_weights=init_from is None,
                config_overrides=self.train_settings.model_config,
            )
            if init_from is not None:
                self.strategy.load_weights(user_path(init_from), chunks)
            self.critic = Critic(self._critic_model, list(chunks))

    def configure_optimizers(self) -> Any:
        """Return the actor's optimizer and scheduler; the critic's is this module's own business."""
        clip = self.trainer.gradient_clip_val  # type: ignore[attr-defined]
        self._critic.prepare_training(self.strategy, self._critic_optimizer_config(), clip)
        return super().configure_optimizers()

    def _critic_optimizer_config(self) -> "OptimizerConfig":
        from megatron.core.optimizer import OptimizerConfig

        return self.critic_optimizer_config or OptimizerConfig(lr=_CRITIC_LR, weight_decay=0.0)

    @property
    def _critic(self) -> Critic:
        assert self.critic is not None, "the critic is built to fit"
        return self.critic

    def save_critic(self, directory: Any) -> None:
        """Write the critic as a Hugging Face sequence classifier, which scores the last token; a collective."""
        from lightning_megatron_rl.parallel.collectives import gather_parameters

        gather_parameters(self._critic.chunks)
        self._critic.hf_model.save_pretrained(self._critic.chunks, directory)

    @property
    def scores_first(self) -> bool:
        """As of GRPO; while the critic warms up there is no update that would tell of the mismatch."""
        return super().scores_first or (self.critic_settings.warmup_rollouts > 0 and not self.loss_config.bypass)

    def describe_objective(self) -> list[tuple[str, str]]:
        """Return what advantage and loss are, and where the critic starts, for the table at start."""
        settings = self.critic_settings
        start = settings.init_from or settings.model or self.model_path
        warmup = f", alone for {settings.warmup_rollouts} rollouts" if settings.warmup_rollouts else ""
        gae_settings = f"gae (gamma {settings.gamma:g}, lam {settings.lam:g})"
        return [*self.loss.config.describe(gae_settings), ("critic", f"from {start}{warmup}")]

    # ---- training --------------------------------------------------------------------------------------------------

    @property
    def is_warming_up(self) -> bool:
        """Whether this rollout trains the critic alone."""
        return bool(self.trainer.global_step < self.critic_settings.warmup_rollouts)

    def training_step(self, prompts: list[Prompt], batch_idx: int) -> Tensor:
        """Sample, score, reward and judge a rollout, then update critic and actor `updates_per_rollout` times."""
        check_prompts(self, prompts)
        self.loss.set_step(self.trainer.global_step)
        self.reference.refresh()
        rollout = self.rollout(prompts)
        parts = rollout.split(self.updates_per_rollout)
        with self.phase("critic_update"):
            for part in parts:
                loss = self.update_critic(part)
        optimizer = self._critic.optimizer
        assert optimizer is not None
        self.log_metrics(optimizer.take_step_metrics("critic"))
        if self.is_warming_up:
            return loss
        *inner, last = parts
        with self.phase("update"):
            for part in inner:
                self.forward_backward(part)
                self.optimizers().step()  # type: ignore[union-attr]
            loss = self.forward_backward(last)
        return loss  # Lightning takes this step

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Take the actor's step; while the critic warms up, run the rollout and leave the actor as it is."""
        assert optimizer_closure is not None
        if self.is_warming_up:
            optimizer_closure()
            self.report.log_update()
        else:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def assign_advantages(self, rollout: Rollout, tally: Tally) -> None:
        """Give each token the critic's value, its return and its advantage; a collective."""
        settings, sequences = self.critic_settings, rollout.sequences
        with self.phase("values"):
            rows, _ = self.score_rows(sequences, self._critic.chunks, processor=value_processor())
        values = [row[0] for row in rows]
        rewards = token_rewards(
            penalised_rewards(rollout, self.overlong, max_response_length=self.sampling.max_tokens, tally=tally),
            [sequence.loss_mask for sequence in sequences],
            kl_penalties(rollout, self.loss.config, tally),
            [turn_rewards(sample) for sample in rollout.samples],
        )
        advantages, returns = [], []
        for reward, sequence, value in zip(rewards, sequences, values, strict=True):
            advantage, return_ = gae(reward, value, sequence.loss_mask, gamma=settings.gamma, lam=settings.lam)
            advantages.append(advantage)
            returns.append(return_)
            add_value_metrics(tally, value, return_, sequence.loss_mask)
        if settings.whiten_advantages:
            masks = torch.cat([sequence.loss_mask for sequence in sequences])
            whole = whiten(torch.cat(advantages), masks, all_reduce=self.reduce_on_device)
            advantages = list(whole.split([len(sequence) for sequence in sequences]))
        rollout.set_field("values", values)
        rollout.set_field("returns", returns)
        rollout.set_token_advantages(advantages)

    def update_critic(self, part: Rollout) -> Tensor:
        """Take one optimizer step of the critic on one part of a rollout; return its loss, equal on every rank."""
        part.set_token_weights(self.loss, self.sampling.max_tokens, self.reduce_on_device)
        critic = self._critic
        assert critic.optimizer is not None
        metrics = self.update(
            part.sequences,
            self.value_loss,
            critic.chunks,
            optimizer=critic.optimizer,
            processor=value_processor(),
            prefix="critic",
        )
        critic.optimizer.step()
        self.strategy.answer_nonfinite(critic.optimizer)
        self.log_metrics(
            {**metrics, "critic/grad_norm": critic.optimizer.grad_norm, "critic/lr": critic.optimizer.last_lr}
        )
        return self.loss_of_update(metrics["critic/loss"])
