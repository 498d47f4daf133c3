"""Environments of tests, good and bad."""

import asyncio
import time
from typing import Any

from lightning_megatron_rl.environments import Action, Ending, Environment, Episode, Reply
from lightning_megatron_rl.sample import Prompt


class Sums(Environment):
    """A game of token sums with text and token ids for replies; ends by chance, and notes what it said."""

    def __init__(self) -> None:
        self.seeds: list[tuple[int, int]] = []

    def start(self, prompt: Prompt, seed: int) -> Episode:
        self.seeds.append((prompt.index, seed))
        return SumsEpisode()


class SumsEpisode(Episode):
    def __init__(self) -> None:
        self.total = 0

    def step(self, action: Action) -> Reply:
        number = sum(action.token_ids)
        self.total += number
        reward = number % 5 / 10
        if number % 3 == 0:
            return Reply(done=True, reward=reward)
        if number % 2:
            return Reply(f"<{number % 10}", reward=reward)
        return Reply(token_ids=[40 + number % 50] * (1 + number % 3), reward=reward)

    def finish(self, reason: str) -> Ending:
        return Ending(self.total % 7 / 6, success=reason == "done")


class Bad(Environment):
    """Returns `reply` from the second turn of the prompt with index 1, "ok" otherwise."""

    def __init__(self, reply: Any, where: str = "step") -> None:
        self.reply = reply
        self.where = where

    def start(self, prompt: Prompt, seed: int) -> Episode:
        bad = prompt.index == 1
        if bad and self.where == "start":
            return answer(self.reply)
        return BadEpisode(self, bad)


class BadEpisode(Episode):
    def __init__(self, game: Bad, bad: bool) -> None:
        self.game = game
        self.bad = bad

    def step(self, action: Action) -> Reply:
        if self.bad and action.number == 1 and self.game.where == "step":
            return answer(self.game.reply)
        return Reply("ok", reward=0.25)

    def finish(self, reason: str) -> Ending:
        if self.bad and self.game.where == "finish":
            return answer(self.game.reply)
        return Ending(1.0, success=True)


class Patient(Environment):
    """Its replies are awaited."""

    def start(self, prompt: Prompt, seed: int) -> Episode:
        return PatientEpisode()


class PatientEpisode:
    async def step(self, action: Action) -> Reply:
        await asyncio.sleep(0.001)
        return Reply("ok")

    async def finish(self, reason: str) -> Ending:
        return Ending(0.5)


def answer(reply: Any) -> Any:
    """Raise an exception, hang for "hang", return anything else."""
    if isinstance(reply, BaseException):
        raise reply
    if reply == "hang":
        while True:
            time.sleep(0.01)
    return reply
