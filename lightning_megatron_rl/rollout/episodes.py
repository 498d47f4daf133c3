"""Episodes: the policy and an environment take turns; each engine call writes one turn of all open episodes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lightning_megatron_rl.environments.base import NAME, Action, Ending, Episode, Reply
from lightning_megatron_rl.environments.guard import ContractError, GuardedEnvironment
from lightning_megatron_rl.models.hf.continuing import continuing_ids
from lightning_megatron_rl.rewards.base import describe_sample
from lightning_megatron_rl.rewards.guard import describe_error
from lightning_megatron_rl.rollout.protocol import (
    GenerationRequest,
    RolloutEngine,
    SamplingParams,
    derive_seed,
)
from lightning_megatron_rl.rollout.stream import Response
from lightning_megatron_rl.sample import Outcome, Prompt, Sample, Turn
from lightning_megatron_rl.utilities.notices import tell_loss

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAX_NAMED = 3  # failed episodes that a warning describes


@dataclass
class Transcript:
    """An episode as it grows; its token ids are only ever appended to."""

    prompt: Prompt
    number: int  # among the samples of its prompt
    game: Episode | BaseException  # what could not be started is an exception
    response: Response = field(default_factory=Response)
    turn_start: int = 0  # of the turn that the policy writes, in the response
    is_cut: bool = False  # the last turn, by a token limit
    reason: str = ""  # why it is over, if it is
    cause: BaseException | None = None  # of an error

    @property
    def token_ids(self) -> list[int]:
        """What the policy reads next."""
        return self.prompt.token_ids + self.response.token_ids

    def room(self, params: SamplingParams, max_model_len: int, max_turn_tokens: int | None = None) -> int:
        """Tokens that the policy may still write, in all or in the turn that it writes."""
        in_turn = len(self.response.token_ids) - self.turn_start
        written = sum(turn.stop - turn.start for turn in self.response.turns) + in_turn
        room = min(params.max_tokens - written, max_model_len - len(self.token_ids))
        return room if max_turn_tokens is None else min(room, max_turn_tokens - in_turn)

    def end_turn(self, tokenizer: "PreTrainedTokenizerBase", *, is_cut: bool) -> Action:
        """Return the turn that the policy wrote, as the environment sees it."""
        response, start = self.response, self.turn_start
        written = response.token_ids[start:]
        text = _decode(tokenizer, written)
        self.turn_start, self.is_cut = len(response.token_ids), is_cut
        response.turns.append(Turn(start, self.turn_start, text))
        return Action(text, written, len(response.turns) - 1, is_cut)

    def add_reply(self, token_ids: list[int]) -> None:
        """Append what the environment said; the sampler has no log-probs of it."""
        self.response.add_foreign(token_ids)
        self.turn_start = len(self.response.token_ids)

    def fail(self, error: BaseException) -> None:
        """End the episode with an error of its environment."""
        self.reason, self.cause = "error", error

    def finish(self, ending: Ending | BaseException | None, default_reward: float) -> None:
        """Judge the episode, which is over: by its ending, or as failed."""
        if isinstance(ending, BaseException):
            self.fail(ending)
        if self.cause is not None or not isinstance(ending, Ending):
            assert self.cause is not None, "an episode without an ending has failed"
            self.response.outcome = Outcome("error", default_reward, error=describe_error(self.cause))
        else:
            self.response.outcome = Outcome(self.reason, float(ending.reward), ending.success)
        # an environment may well call an answer done of which it has only the beginning
        is_truncated = self.reason == "length" or (self.reason == "done" and self.is_cut)
        self.response.finish_reason = "length" if is_truncated else "stop"


def play_episodes(
    engine: RolloutEngine,
    environment: GuardedEnvironment,
    prompts: list[Prompt],
    params: SamplingParams,
    *,
    num_generations: int,
    tokenizer: "PreTrainedTokenizerBase",
    seed: int,
    step: int,
) -> list[Sample]:
    """Play `num_generations` episodes of each prompt to their ends; those of one prompt stand together.

    The transcript is the prompt's token ids, the sampled ones and those of the replies, end to end: nothing is decoded
    and encoded again. Whatever an environment does wrong ends its episode alone, with a warning that names it.

    Args:
        engine: A started engine.
        environment: Replies.
        prompts: This replica's prompts.
        params: `max_tokens` limits what the policy writes in all turns of an episode together.
        num_generations: Episodes per prompt.
        tokenizer: Decodes turns for the environment, and encodes replies that are text.
        seed: The run's seed. Each (step, prompt, sample, turn) gets a seed of its own.
        step: The `global_step`.

    Raises:
        ValueError: A prompt that fills `max_model_len`.
        EnvironmentSetupError: What the environment needs is not there.
        RuntimeError: The environment failed, and `on_error` is "raise".
    """
    for prompt in prompts:
        if len(prompt.token_ids) >= engine.max_model_len:
            raise ValueError(
                f"prompt {prompt.index} of {prompt.dataset!r} has {len(prompt.token_ids)} tokens: max_model_len="
                f"{engine.max_model_len} leaves no room for a turn. Raise max_model_len, or set the data module's"
                " on_long_prompt."
            )
    pairs = [(prompt, number) for prompt in prompts for number in range(num_generations)]
    seeds = [derive_seed(seed, step, prompt.index, f"{prompt.dataset}/{NAME}") for prompt, _ in pairs]
    games = environment.start([prompt for prompt, _ in pairs], seeds)
    transcripts = [Transcript(prompt, number, game) for (prompt, number), game in zip(pairs, games, strict=True)]
    for transcript in transcripts:
        if isinstance(transcript.game, BaseException):
            transcript.fail(transcript.game)
    for turn in range(environment.settings.max_turns):
        live = [transcript for transcript in transcripts if not transcript.reason]
        if not live:
            break
        actions = _take_turn(engine, live, params, environment.settings.max_turn_tokens, tokenizer, seed, step, turn)
        replies = environment.step(_games(live), actions)
        is_last = turn + 1 == environment.settings.max_turns
        for transcript, reply in zip(live, replies, strict=True):
            take_reply(transcript, reply, environment, tokenizer, params, engine.max_model_len, is_last=is_last)
    _finish(transcripts, environment)
    samples = [_sample(transcript, tokenizer, engine.weight_version) for transcript in transcripts]
    report_failures(transcripts, samples, environment)
    return samples


def _games(transcripts: Sequence[Transcript]) -> list[Episode]:
    return [transcript.game for transcript in transcripts if not isinstance(transcript.game, BaseException)]


def _take_turn(
    engine: RolloutEngine,
    live: list[Transcript],
    params: SamplingParams,
    max_turn_tokens: int | None,
    tokenizer: "PreTrainedTokenizerBase",
    seed: int,
    step: int,
    turn: int,
) -> list[Action]:
    """Let the policy write one turn of each episode, in one call of the engine."""
    requests = []
    for transcript in live:
        prompt = transcript.prompt
        requests.append(
            GenerationRequest(
                token_ids=transcript.token_ids,
                seed=derive_seed(seed, step, prompt.index, f"{prompt.dataset}/{transcript.number}/{turn}"),
                max_tokens=transcript.room(params, engine.max_model_len, max_turn_tokens),
            )
        )
    actions = []
    for transcript, (generation,) in zip(live, engine.generate(requests, params), strict=True):
        transcript.response.token_ids += generation.token_ids
        transcript.response.logprobs += generation.logprobs
        actions.append(transcript.end_turn(tokenizer, is_cut=generation.finish_reason == "length"))
    return actions


def take_reply(
    transcript: Transcript,
    reply: Reply | BaseException,
    environment: GuardedEnvironment,
    tokenizer: "PreTrainedTokenizerBase",
    params: SamplingParams,
    max_model_len: int,
    *,
    is_last: bool,
) -> None:
    """Append a reply that the policy will read; a transcript always ends with the policy's own tokens."""
    if isinstance(reply, BaseException):
        transcript.fail(reply)
        return
    transcript.response.turns[-1].reward = float(reply.reward)
    if reply.done:
        transcript.reason = "done"
        return
    if transcript.room(params, max_model_len) < 1:
        transcript.reason = "length"
        return
    if is_last:
        transcript.reason = "max_turns"
        return
    token_ids = reply.token_ids
    if token_ids is None:
        assert reply.text is not None, "the guard has checked it"
        text = environment.settings.reply_template.replace("{reply}", reply.text)
        token_ids = continuing_ids(tokenizer, text, str(tokenizer.convert_ids_to_tokens(transcript.token_ids[-1])))
    if not token_ids:
        transcript.fail(ContractError(f"the tokenizer makes no token of the reply {reply.text!r}"))
    elif transcript.room(params, max_model_len - len(token_ids)) < 1:
        transcript.reason = "length"
    else:
        transcript.add_reply(token_ids)


def _finish(transcripts: list[Transcript], environment: GuardedEnvironment) -> None:
    ended = [transcript for transcript in transcripts if transcript.cause is None]
    endings = iter(environment.finish(_games(ended), [transcript.reason for transcript in ended]))
    for transcript in transcripts:
        ending = next(endings) if transcript.cause is None else None
        transcript.finish(ending, environment.settings.default_reward)


def _sample(transcript: Transcript, tokenizer: "PreTrainedTokenizerBase", weight_version: int) -> Sample:
    response = transcript.response
    assert response.finish_reason is not None
    return Sample(
        prompt=transcript.prompt,
        response_ids=response.token_ids,
        response_logprobs=response.logprobs,
        response=_decode(tokenizer, response.token_ids),
        finish_reason=response.finish_reason,
        weight_version=weight_version,
        turns=response.turns,
        outcome=response.outcome,
    )


def report_failures(transcripts: list[Transcript], samples: list[Sample], environment: GuardedEnvironment) -> None:
    """Name the episodes whose environment failed, or raise for the first."""
    failed = [(transcript, sample) for transcript, sample in zip(transcripts, samples, strict=True) if transcript.cause]
    if not failed:
        return
    name = type(environment.environment).__name__
    named = [
        f"turn {len(sample.turns)} of {describe_sample(sample)}: {sample.outcome.error}"
        for transcript, sample in failed[:_MAX_NAMED]
        if sample.outcome is not None
    ]
    if environment.settings.on_error == "raise":
        raise RuntimeError(
            f"the environment {name} failed in {named[0]}. Let it reply to a bad turn instead of raising, or set"
            " episodes.on_error to default."
        ) from failed[0][0].cause
    more = f"; and {len(failed) - _MAX_NAMED} more" if len(failed) > _MAX_NAMED else ""
    tell_loss(
        f"the environment {name} failed in {len(failed)} of {len(samples)} episodes, which get"
        f" {environment.settings.default_reward:g}: {'; '.join(named)}{more}"
    )


def _decode(tokenizer: "PreTrainedTokenizerBase", token_ids: list[int]) -> str:
    return str(tokenizer.decode(token_ids, skip_special_tokens=True))


def add_episode_rewards(samples: list[Sample]) -> None:
    """Add each episode's reward to its sample's, as the component "environment": turns and end, or the default.

    Example:
        Turns worth 0.1 and 0.2 and an end worth 1 add 1.3.
    """
    for sample in samples:
        outcome = sample.outcome
        assert outcome is not None
        reward = outcome.reward
        if outcome.error:
            sample.reward_errors = {**sample.reward_errors, NAME: outcome.error}
        else:
            reward += sum(turn.reward for turn in sample.turns)
        sample.rewards = {NAME: reward, **sample.rewards}
        sample.reward += reward
