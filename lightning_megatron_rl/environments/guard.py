"""A guard around an environment: its errors and timeouts cost one episode, not the run."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Real
from typing import Any

from lightning_megatron_rl.environments.base import (
    Action,
    Ending,
    Environment,
    EnvironmentSetupError,
    Episode,
    EpisodeSettings,
    Reply,
)
from lightning_megatron_rl.rewards.deadline import BoundedCalls, EventLoopError, awaited
from lightning_megatron_rl.rewards.guard import DEADLINE_SECONDS
from lightning_megatron_rl.sample import Prompt


class ContractError(ValueError):
    """An environment returned something else than a reply, episode or ending."""


class GuardedEnvironment:
    """Calls an environment for many episodes at a time, all of them bounded by one deadline, and checks its answers.

    A call that raises, is late or returns something outside the contract gives an exception in its episode's place.

    Args:
        environment: Starts the episodes.
        settings: Limits.
        vocab_size: Token ids of replies are below it.
        timeout_s: Seconds that the other ranks wait for a rollout.

    Raises:
        ValueError: The deadline may take longer than the ranks wait, with the arithmetic.
    """

    def __init__(
        self, environment: Environment, settings: EpisodeSettings, *, vocab_size: int, timeout_s: float = math.inf
    ) -> None:
        self.environment = environment
        self.settings = settings
        self.vocab_size = vocab_size
        rounds = settings.max_turns + 2  # start, a reply to each turn, finish
        longest = settings.deadline_s
        if longest is None:
            longest = min(DEADLINE_SECONDS, timeout_s / 2 / rounds)
        elif rounds * longest >= timeout_s:
            raise ValueError(
                f"episodes.deadline_s={longest:g} with max_turns={settings.max_turns}: an environment may take"
                f" {rounds} x {longest:g} = {rounds * longest:g} s (start, replies, finish), but the other ranks wait"
                f" only MegatronStrategy(timeout_s={timeout_s:g}). Lower deadline_s or raise timeout_s."
            )
        self.deadline_s = longest
        self._calls = BoundedCalls(settings.concurrency)

    def start(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Episode | BaseException]:
        """Return an episode for each prompt, or what went wrong.

        Raises:
            EnvironmentSetupError: What the environment needs is not there.
        """
        return self._run(
            [partial(self.environment.start, prompt.copy(), seed) for prompt, seed in zip(prompts, seeds, strict=True)],
            _checked_episode,
        )

    def step(self, episodes: Sequence[Episode], actions: Sequence[Action]) -> list[Reply | BaseException]:
        """Return the reply to each episode's turn, or what went wrong."""
        return self._run(
            [partial(episode.step, action) for episode, action in zip(episodes, actions, strict=True)],
            partial(_checked_reply, vocab_size=self.vocab_size),
        )

    def finish(self, episodes: Sequence[Episode], reasons: Sequence[str]) -> list[Ending | BaseException]:
        """Return the ending of each episode, or what went wrong."""
        return self._run(
            [partial(episode.finish, reason) for episode, reason in zip(episodes, reasons, strict=True)],
            _checked_ending,
        )

    def _run[T](self, calls: list[Callable[[], Any]], check: Callable[[Any], T]) -> list[T | BaseException]:
        results = self._calls.run([partial(self._call, call, check) for call in calls], self.deadline_s)
        for result in results:
            if isinstance(result, EnvironmentSetupError):
                raise result
        return results

    def _call[T](self, call: Callable[[], Any], check: Callable[[Any], T]) -> T:
        try:
            answer = awaited(call(), self.deadline_s)
        except EventLoopError as error:
            raise EnvironmentSetupError(f"the environment {type(self.environment).__name__}: {error}") from error
        return check(answer)


def _checked_episode(episode: Any) -> Episode:
    for method in ("step", "finish"):
        if not callable(getattr(episode, method, None)):
            raise ContractError(
                f"start of the environment returned a {type(episode).__name__} without a method {method}: an episode"
                " has step(action) and finish(reason)"
            )
    return episode  # type: ignore[no-any-return]


def _checked_reply(reply: Any, vocab_size: int) -> Reply:
    if not isinstance(reply, Reply):
        raise ContractError(f"step returned a {type(reply).__name__}: return a Reply")
    _check_number("Reply.reward", reply.reward)
    if not isinstance(reply.done, bool):
        raise ContractError(f"Reply.done is {reply.done!r}: give True or False")
    given = [name for name in ("text", "token_ids") if getattr(reply, name) is not None]
    if reply.done and given:
        raise ContractError(f"Reply.done with {given[0]}: nobody reads a reply after the end; leave it out")
    if not reply.done and len(given) != 1:
        found = "neither text nor token_ids" if not given else "both text and token_ids"
        raise ContractError(f"Reply with {found}, though the episode is not done: give one of them")
    if reply.text is not None and (not isinstance(reply.text, str) or not reply.text):
        raise ContractError(f"Reply.text is {reply.text!r}: give text that is not empty")
    if reply.text is not None:
        try:
            reply.text.encode()
        except UnicodeEncodeError as error:  # no tokenizer takes it
            raise ContractError(
                f"Reply.text holds {reply.text[error.start]!r}, half of a character: decode what a tool printed with"
                " errors='replace'"
            ) from error
    if reply.token_ids is not None:
        if not isinstance(reply.token_ids, list) or not reply.token_ids:
            raise ContractError(f"Reply.token_ids is {str(reply.token_ids)[:60]}: give a list of token ids, not empty")
        for position, token in enumerate(reply.token_ids):
            if type(token) is not int:
                raise ContractError(
                    f"Reply.token_ids[{position}] is {token!r}, a {type(token).__name__}: token ids are integers (of an"
                    " array or tensor its .tolist())"
                )
            if not 0 <= token < vocab_size:
                raise ContractError(
                    f"Reply.token_ids[{position}] is {token}, outside the vocabulary of {vocab_size}: is it of another"
                    " tokenizer?"
                )
    return reply


def _checked_ending(ending: Any) -> Ending:
    if not isinstance(ending, Ending):
        raise ContractError(f"finish returned a {type(ending).__name__}: return an Ending")
    _check_number("Ending.reward", ending.reward)
    if ending.success is not None and not isinstance(ending.success, bool):
        raise ContractError(f"Ending.success is {ending.success!r}: give True, False or None")
    return ending


def _check_number(name: str, value: Any) -> None:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ContractError(f"{name} is {value!r}: give a finite number")
