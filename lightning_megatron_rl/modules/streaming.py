"""Rollouts that do not wait: the settings of a stream, what it needs, and its place in a run."""

import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info

from lightning_megatron_rl.data.prompts import PromptDataModule
from lightning_megatron_rl.environments.guard import GuardedEnvironment
from lightning_megatron_rl.models.hf.size import model_size
from lightning_megatron_rl.modules.dynamic_sampling import shuffled_prompts
from lightning_megatron_rl.parallel.distributed import data_parallel_rank
from lightning_megatron_rl.rollout.model_directory import CheckpointLayout
from lightning_megatron_rl.rollout.protocol import StreamMode, WeightsLostError
from lightning_megatron_rl.rollout.stream import (
    SparePrompts,
    StreamPlan,
    divide_states,
    find_prompts,
    rows_of,
    state_of_rows,
)
from lightning_megatron_rl.rollout.streaming import RolloutStream
from lightning_megatron_rl.rollout.watch import StreamWatch
from lightning_megatron_rl.sample import Prompt, Sample
from lightning_megatron_rl.utilities.notices import tell_loss
from lightning_megatron_rl.utilities.ranges import COUNT, COUNT_OR_NONE, check_ranges, check_words
from lightning_megatron_rl.utilities.seeds import run_seed

if TYPE_CHECKING:
    from lightning_megatron_rl.modules.grpo import GRPOModule

OnUpdate = Literal["finished", "recomputed", "kept"]
Placement = Literal["auto", "shared", "separate"]
STATE = "rollout_stream"  # of a checkpoint

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StreamingSettings:
    """Sample ahead of training: while long responses are written, batches are made of groups that are complete.

    Args:
        max_staleness: Most versions of the policy between a group's first token and the update that trains on it. 0
            samples each batch with the newest weights and waits for it: the synchronous run.
        in_flight: Most responses sampled at a time, counted as whole groups, over all replicas; unset:
            ``(max_staleness + 1) * batch_size``.
        on_update: What becomes of responses under way when the weights change: "finished" samples them to their ends
            first, "recomputed" goes on with the new weights and computes their cache anew, "kept" goes on with the new
            weights and the cache of the old ones.
        placement: "separate" samples while the trainer works, which needs devices (or CPU cores) of the sampler's own;
            "shared" samples until every replica has its batch; "auto" is separate for an engine on other GPUs than the
            trainer's.
        batch_parts: Parts in which a batch is trained on, each as soon as its groups are complete. Their gradients add
            up to those of the whole batch, for one optimizer step.

    Raises:
        ValueError: A number out of range, an unknown word, or parts of a synchronous run.
    """

    max_staleness: int = 0
    in_flight: int | None = None
    on_update: OnUpdate = "recomputed"
    placement: Placement = "auto"
    batch_parts: int = 1

    def __post_init__(self) -> None:
        ranges = {
            "max_staleness": COUNT_OR_NONE.called("0 is the synchronous run"),
            "in_flight": COUNT,
            "batch_parts": COUNT.called("1 trains on whole batches"),
        }
        check_ranges(ranges, vars(self), "streaming.")
        check_words({"on_update": OnUpdate, "placement": Placement}, vars(self), "streaming.")
        if self.batch_parts > 1 and not self.is_on:
            raise ValueError(
                f"streaming.batch_parts={self.batch_parts} with max_staleness=0: a synchronous run waits for its whole"
                " batch. Set max_staleness to 1 or more, or batch_parts to 1."
            )

    @property
    def is_on(self) -> bool:
        """Whether anything is sampled ahead."""
        return self.max_staleness > 0


class StreamedRollouts:
    """The stream of a module: prepared in `setup`, opened by the leader of each replica when it first samples.

    Args:
        settings: With a `max_staleness` above 0.
    """

    def __init__(self, settings: StreamingSettings) -> None:
        self.settings = settings
        self.watch = StreamWatch()  # of the leader's stream
        self._module: GRPOModule | None = None
        self._stream: RolloutStream | None = None  # of the leader, once it has sampled
        self._saved: list[str] = []  # of a checkpoint, one of each replica, until the stream is opened
        self._left: RolloutStream | None = None  # of this leader, whose fit has ended: the Trainer may go on with it
        self._in_background = False

    def prepare(self, module: "GRPOModule") -> None:
        """Check that the module can stream, and tell its engine and its data so.

        Raises:
            ValueError: It cannot, with what would change that.
        """
        settings, engine = self.settings, module.engine
        self._module = module
        name = f"streaming.max_staleness={settings.max_staleness}"
        if not engine.streams:
            raise ValueError(
                f"{name} with engine={type(engine).__name__}, which samples whole batches: use VLLMEngine, or"
                " max_staleness=0."
            )
        data = module.trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, PromptDataModule):
            raise ValueError(
                f"{name} reads prompts ahead of training from a PromptDataModule, the Trainer has"
                f" {type(data).__name__}: use one, or max_staleness=0."
            )
        if module.trainer.overfit_batches:  # type: ignore[attr-defined]
            raise ValueError(f"{name} with overfit_batches, whose batches come again: use max_staleness=0.")
        if module.sampling.stop:
            raise ValueError(
                f"{name} with sampling.stop={list(module.sampling.stop)}: a response that is interrupted may have a"
                " part of a stop string, which would not be found. Use max_staleness=0, or an end-of-sequence token."
            )
        if settings.on_update == "finished" and engine.sleep_level:
            raise ValueError(
                f"streaming.on_update='finished' with engine.sleep_level={engine.sleep_level}: responses could only be"
                " finished with the memory that the trainer has then. Set sleep_level=0, or on_update to recomputed."
            )
        if settings.on_update == "kept" and engine.sleep_level:
            raise ValueError(
                f"streaming.on_update='kept' with engine.sleep_level={engine.sleep_level}: the cache is dropped when"
                " the engine falls asleep. Set sleep_level=0, or on_update to recomputed."
            )
        batch_size, in_flight = data.batch_size, self._in_flight(data.batch_size)
        if in_flight < batch_size:
            raise ValueError(
                f"streaming.in_flight={in_flight} < data.batch_size={batch_size}: a batch could never be sampled at a"
                f" time. Set in_flight to at least {batch_size}."
            )
        if settings.max_staleness > 1 and module.loss.config.correction is None and not module.loss.config.bypass:
            tell_loss(
                f"{name} without loss.correction: the policy that sampled is up to {settings.max_staleness} updates"
                " older than the one that is trained, and nothing weighs that. On the demo's sums a bound of 8 ended at"
                " an accuracy of 0.44 without correction and 0.88 with it. Set loss.correction to tis or icepop."
            )
        self._in_background = self._is_separate(engine)
        if self._in_background and engine.sleep_level:
            raise ValueError(
                f"streaming.placement='separate' with engine.sleep_level={engine.sleep_level}: an engine that sleeps"
                " cannot sample while the trainer works. Set sleep_level=0, or placement=shared."
            )
        if settings.batch_parts > 1 and (not self._in_background or module.strategy.offloads):
            why = "the sampler works while the trainer waits, and not beside it"
            if self._in_background:
                why = f"offload_while_sampling={list(module.strategy.offloads)} would move gradients between two parts"
            raise ValueError(
                f"streaming.batch_parts={settings.batch_parts}: {why}. Set batch_parts=1, or placement=separate and no"
                " offload_while_sampling."
            )
        self._check_cache(module, min(in_flight, (settings.max_staleness + 1) * batch_size))
        mode = StreamMode(background=self._in_background, keeps_cache=settings.on_update == "kept")
        if getattr(engine, "stream_mode", None) != mode:
            module.close_engine()  # if an earlier fit or validation has started it
            engine.stream_mode = mode  # type: ignore[attr-defined]
        data.read_ahead = settings.max_staleness

    def _check_cache(self, module: "GRPOModule", in_flight: int) -> None:
        """Warn of more responses in flight than the engine's cache has room for, if each gets as long as it may."""
        engine, needs, config = module.engine, module.engine.describe_needs(), module.hf_model.config
        if needs is None or getattr(config, "kv_lora_rank", None) is not None:  # a latent cache is of another size
            return
        checkpoint = CheckpointLayout.read(module.hf_model.path)
        tokens = needs.cache_tokens(model_size(config, checkpoint.shapes), checkpoint.dtype)
        replicas = module.strategy.layout.data_parallel_size(module.trainer.world_size)
        responses = in_flight // replicas * module.num_generations
        if tokens is not None and responses * engine.max_model_len > tokens:
            log.warning(
                "streaming: %d responses of a replica in flight x max_model_len=%d = %d tokens > %d tokens, which the"
                " engine's kv_cache_memory_gb=%g holds. If they get that long, some are put off and computed again:"
                " lower streaming.in_flight, or raise kv_cache_memory_gb",
                responses,
                engine.max_model_len,
                responses * engine.max_model_len,
                tokens,
                needs.kv_cache_memory_gb,
            )

    def _in_flight(self, batch_size: int) -> int:
        return self.settings.in_flight or (self.settings.max_staleness + 1) * batch_size

    def _is_separate(self, engine: Any) -> bool:
        if self.settings.placement != "auto":
            return self.settings.placement == "separate"
        if engine.is_apart:
            return True
        return bool(engine.devices) and torch.cuda.is_available() and torch.cuda.current_device() not in engine.devices

    def describe(self, batch_size: int) -> str:
        """Return what the stream does, for the table at start."""
        settings = self.settings
        placement = "beside training" if self._in_background else "between training steps"
        ahead = f"at most {settings.max_staleness} version(s) ahead"
        ahead += f", responses of {self._in_flight(batch_size)} groups in flight"
        if settings.batch_parts > 1:
            ahead += f", batches in {settings.batch_parts} parts"
        return f"{ahead}, {placement}; responses under way at an update are {settings.on_update}"

    # ---- what the leader of a replica does -------------------------------------------------------------------------

    def next_batch(
        self,
        prompts: list[Prompt],
        version: int,
        judge: Callable[[list[Sample]], None],
        environment: GuardedEnvironment | None,
        judged_by: str,
    ) -> list[Sample] | None:
        """Return the samples of the batch for a version; None if the engine must get its weights first."""
        if self._stream is None:
            self._stream = self._open(judge, environment, judged_by)
        try:
            return self._stream.next_batch(prompts, version)
        except WeightsLostError:
            self._stream.have_all_come()  # the others need not wait for new weights here
            return None

    def _open(
        self, judge: Callable[[list[Sample]], None], environment: GuardedEnvironment | None, judged_by: str
    ) -> RolloutStream:
        module = self._module
        assert module is not None, "prepare() was called"
        data: PromptDataModule = module.trainer.datamodule  # type: ignore[attr-defined]
        replicas = module.strategy.layout.data_parallel_size(module.trainer.world_size)
        plan = StreamPlan(
            data.batch_size // replicas,
            self.settings.max_staleness,
            self._in_flight(data.batch_size) // replicas,
            module.num_generations,
            self.settings.batch_parts,
        )
        tokenizer, engine, replica = module.hf_model.tokenizer, module.engine, module.strategy.replica
        assert tokenizer is not None
        assert replica is not None
        stream = RolloutStream(
            engine,  # type: ignore[arg-type]
            plan,
            module.sampling,
            tokenizer=tokenizer,
            seed=run_seed(),
            reward=judge,
            background=self._in_background,
            environment=environment,
            spares=self._spares(data, plan.batch_size, replicas),
            watch=self.watch,
            arrive=None if self._in_background else replica.arrive,
            judged_by=judged_by,
        )
        state = divide_states(self._saved, replicas)[data_parallel_rank()] if self._saved else self.state()
        if state is not None:
            stream.load_state(state, {prompt.index: prompt for prompt in data.train_items})
        self._saved, self._left = [], None
        return stream

    def _spares(self, data: PromptDataModule, batch_size: int, replicas: int) -> SparePrompts | None:
        """Return the prompts that dynamic sampling draws in the place of others."""
        assert self._module is not None
        settings = self._module.dynamic_sampling
        if settings is None:
            return None

        def order(turn: int) -> list[Prompt]:
            return list(shuffled_prompts(data.train_items, run_seed(), turn, 0))

        return SparePrompts(order, data_parallel_rank(), replicas, settings.max_rounds * batch_size)

    def metrics(self) -> dict[str, float]:
        """Return what the leader of a replica knows of its last batch, and zeros on other ranks."""
        assert self._module is not None
        if self._module.dynamic_sampling is None:
            return {}
        return {"rollout/refill_groups": 0.0 if self._stream is None else float(self._stream.num_passed_over)}

    def put_away(self) -> None:
        """Take everything out of the engine."""
        if self._stream is not None:
            self._stream.put_away()

    def before_update(self, *, puts_away: bool = False) -> None:
        """Do with responses under way what `on_update` says, as far as that comes before the update.

        Args:
            puts_away: None of them may go on with the new weights.
        """
        if self._stream is not None and self.settings.on_update == "finished":
            with suppress(WeightsLostError):  # nobody can finish them with weights that are gone
                self._stream.finish_under_way()
        if puts_away:
            self.put_away()

    def close(self, *, engine_ends: bool = False) -> None:
        """End the stream; the next fit of the same Trainer goes on with what is under way.

        Args:
            engine_ends: As in `RolloutStream.close`.
        """
        if self._stream is not None:
            self._left = self._stream if self._stream.close(engine_ends=engine_ends) else None
            self._stream = None

    def state(self) -> str | None:
        """Return what is under way in this replica; None on ranks that do not lead one, or if nothing was sampled."""
        if self._stream is not None:
            return self._stream.state()
        return None if self._left is None else self._left.known_state()

    def load(self, states: list[str]) -> None:
        """Go on from a checkpoint's streams, one of each replica, when the stream is opened."""
        self.close()
        self._saved, self._left = states, None

    @property
    def not_yet_opened(self) -> list[str]:
        """The states of a checkpoint from which no stream was opened yet, of all replicas."""
        return self._saved


class Backlog:
    """Prompts that a run had read ahead which streamed; resumed without a stream, it samples them first.

    Responses that were begun are sampled again, with the newest weights.
    """

    def __init__(self) -> None:
        self._saved: list[str] = []  # of a checkpoint, one of each replica, until the first batch
        self._waiting: deque[Prompt] = deque()
        self._is_leader = False

    def load(self, states: list[str]) -> None:
        """Take what the streams of a checkpoint had read."""
        self._saved = states
        self._waiting.clear()
        if states:
            count = sum(len(rows_of(state)) for state in states)
            rank_zero_info(
                f"The checkpoint is of a run that sampled ahead: {count} prompts were read and not yet trained on. They"
                " are sampled first, with the newest weights; what was sampled of them is not used."
            )

    def take(self, prompts: list[Prompt], module: "GRPOModule") -> list[Prompt]:
        """Return the prompts of a step, as many as a batch has, and keep those that the data loader gave besides."""
        if not self._saved and not self._waiting:
            return prompts
        data: PromptDataModule = module.trainer.datamodule  # type: ignore[attr-defined]
        replicas = module.strategy.layout.data_parallel_size(module.trainer.world_size)
        assert module.strategy.replica is not None
        self._is_leader = module.strategy.replica.is_leader
        if self._saved:
            mine = divide_states(self._saved, replicas)[data_parallel_rank()]
            self._waiting.extend(find_prompts(rows_of(mine), {prompt.index: prompt for prompt in data.train_items}))
            self._saved = []
        self._waiting.extend(prompts)
        return [self._waiting.popleft() for _ in range(data.batch_size // replicas)]

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left, on every rank alike."""
        return not self._saved and not self._waiting

    def state(self) -> str | None:
        """Return what is left on this replica; None on ranks that do not lead one."""
        return state_of_rows([prompt.index for prompt in self._waiting]) if self._waiting and self._is_leader else None

    @property
    def not_yet_opened(self) -> list[str]:
        """The states of a checkpoint, before the first batch."""
        return self._saved


def save_streams(checkpoint: dict[str, Any], streamed: StreamedRollouts | Backlog) -> None:
    """Put what the streams of all replicas have under way into a checkpoint; a collective."""
    states: list[str | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(states, streamed.state())
    if kept := [state for state in states if state is not None] or streamed.not_yet_opened:
        checkpoint[STATE] = kept


def load_streams(checkpoint: dict[str, Any], streamed: StreamedRollouts | Backlog, data: Any) -> None:
    """Go on with the streams of a checkpoint.

    Raises:
        ValueError: There are some, and the prompts do not come from a data module that knows their rows.
    """
    states = checkpoint.get(STATE, [])
    if states and not isinstance(data, PromptDataModule):
        raise ValueError(
            "the checkpoint holds a stream of rollouts, prompts that were read and not yet trained on, and the Trainer"
            f" has {type(data).__name__}: resume with a PromptDataModule, or start from exported weights instead of"
            " ckpt_path."
        )
    streamed.load(states)
