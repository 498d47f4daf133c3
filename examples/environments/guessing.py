"""`NumberGuessing`: the policy looks for a number, and is told whether it is higher or lower."""

import random
import re
from typing import Any

from lightning_megatron_rl.environments.base import (
    Action,
    Ending,
    Environment,
    EnvironmentSetupError,
    Episode,
    Reply,
)
from lightning_megatron_rl.sample import Prompt
from lightning_megatron_rl.utilities.ranges import COUNT, FINITE, SEED, Range, check_ranges

_NUMBER = re.compile(r"-?\d{1,18}")


class NumberGuessing(Environment):
    """The last number of a turn is a guess; the reply says where the secret is, which is the prompt's answer.

    The reward is 1 for the secret, else 0.

    Args:
        higher: Reply to a guess below the secret.
        lower: Reply to a guess above it.
        no_guess: Reply to a turn without a number.
        consistent_reward: Reward of a turn whose guess no earlier reply has ruled out.

    Example:
        For the answer "13" the turn "10" gets the reply ">", the turn "13" ends the game with reward 1.
    """

    def __init__(
        self, higher: str = ">", lower: str = "<", no_guess: str = "?", consistent_reward: float = 0.0
    ) -> None:
        check_ranges({"consistent_reward": FINITE}, locals())
        self.higher = higher
        self.lower = lower
        self.no_guess = no_guess
        self.consistent_reward = consistent_reward

    def start(self, prompt: Prompt, seed: int) -> Episode:
        """Return a game.

        Raises:
            EnvironmentSetupError: The prompt's answer is no number.
        """
        if prompt.answer is None or not _NUMBER.fullmatch(prompt.answer.strip()):
            raise EnvironmentSetupError(
                f"number guessing takes the answer for the secret, that of prompt {prompt.index} is {prompt.answer!r}"
            )
        return _Game(self, int(prompt.answer))


class _Game(Episode):
    def __init__(self, rules: NumberGuessing, secret: int) -> None:
        self.rules = rules
        self.secret = secret
        self.low, self.high = -(10**18), 10**18  # where the replies so far say that the secret is
        self.found = False

    def step(self, action: Action) -> Reply:
        numbers = _NUMBER.findall(action.text)
        if not numbers:
            return Reply(self.rules.no_guess)
        guess = int(numbers[-1])
        reward = self.rules.consistent_reward if self.low <= guess <= self.high else 0.0
        if guess == self.secret:
            self.found = True
            return Reply(done=True, reward=reward)
        if guess < self.secret:
            self.low = max(self.low, guess + 1)
            return Reply(self.rules.higher, reward=reward)
        self.high = min(self.high, guess - 1)
        return Reply(self.rules.lower, reward=reward)

    def finish(self, reason: str) -> Ending:
        return Ending(float(self.found), success=self.found)


class GuessingRows:
    """Rows for `NumberGuessing`: ``{"prompt": "1-20:", "answer": "13"}``, the same for the same arguments.

    Args:
        size: Number of rows.
        low: Smallest secret.
        high: Largest secret.
        seed: Seed of the draw.

    Raises:
        ValueError: No rows, or no number to draw from.

    Example:
        ``GuessingRows(size=100, high=20)()``
    """

    def __init__(self, size: int, low: int = 1, high: int = 20, seed: int = 0) -> None:
        whole = Range(whole=True)
        check_ranges({"size": COUNT, "low": whole, "high": whole, "seed": SEED}, locals())
        if low > high:
            raise ValueError(f"low={low} must not be above high={high}.")
        self.size = size
        self.low = low
        self.high = high
        self.seed = seed

    def __call__(self) -> list[dict[str, Any]]:
        """Draw the rows."""
        draw = random.Random(f"{self.low}/{self.high}/{self.seed}")
        return [
            {"prompt": f"{self.low}-{self.high}:", "answer": str(draw.randint(self.low, self.high))}
            for _ in range(self.size)
        ]
