"""The protocol of environments: they reply to the policy's turns and give rewards."""

from dataclasses import dataclass
from typing import Literal, Protocol

from lightning_megatron_rl.sample import Prompt
from lightning_megatron_rl.utilities.ranges import COUNT, FINITE, POSITIVE, check_ranges

NAME = "environment"  # of the episodes' reward, beside those of the reward functions
_RANGES = {
    "max_turns": COUNT,
    "max_turn_tokens": COUNT,
    "concurrency": COUNT,
    "deadline_s": POSITIVE.called("it is a number of seconds"),
    "default_reward": FINITE,
}


class EnvironmentSetupError(ValueError):
    """Something that an environment needs is missing in the data or on the machine.

    It ends the run whatever `EpisodeSettings(on_error)` says.

    Example:
        A prompt without an answer, for a game whose secret is the answer.
    """


@dataclass(frozen=True)
class Action:
    """What the policy wrote in one turn."""

    text: str  # decoded, special tokens left out
    token_ids: list[int]
    number: int = 0  # turns before this one
    is_cut: bool = False  # by a token limit


@dataclass
class Reply:
    """What an environment says to a turn: text or token ids for the policy to go on from, or that the episode is done.

    Text is encoded once, by the policy's tokenizer and `EpisodeSettings(reply_template)`; token ids are taken as they
    are. Neither is ever encoded again.

    Args:
        text: The reply as text.
        token_ids: The reply as token ids of the policy's vocabulary, instead.
        reward: For the turn.
        done: The episode ends with the turn; there is no text and there are no token ids then.

    Example:
        ``Reply("12", reward=0.1)``; ``Reply(done=True)``
    """

    text: str | None = None
    token_ids: list[int] | None = None
    reward: float = 0.0
    done: bool = False


@dataclass
class Ending:
    """The reward of a whole episode, beside those of its turns."""

    reward: float = 0.0
    success: bool | None = None  # None: there is no such thing


class Episode(Protocol):
    """One conversation with the policy; only one call of it runs at a time."""

    def step(self, action: Action) -> Reply:
        """Reply to a turn of the policy."""
        ...

    def finish(self, reason: str) -> Ending:
        """Judge the whole episode, which is over; the last call.

        Args:
            reason: "done", "max_turns", or "length" if the token limits leave no room for another turn.
        """
        return Ending()


class Environment(Protocol):
    """Starts episodes. A config names the class by its dotted path.

    `start`, `step` and `finish` are called in threads, those of several episodes at the same time. They may be `async`.
    """

    def start(self, prompt: Prompt, seed: int) -> Episode:
        """Return a new episode, which begins with the prompt.

        Args:
            prompt: What the policy reads first, with its answer and columns.
            seed: Differs between prompts and steps; equal for all samples of a prompt, which are to be compared.
        """
        ...


@dataclass(frozen=True)
class EpisodeSettings:
    """Limits of an episode, and what becomes of one whose environment fails.

    `sampling.max_tokens` limits what the policy writes in all turns of an episode together, and the engine's
    `max_model_len` the prompt, these turns and the replies.

    Args:
        max_turns: Most turns of the policy.
        max_turn_tokens: Most tokens of one turn; what is left of the whole episode's if not given.
        reply_template: Text around a reply that is text; `{reply}` stands for it. For chat models this is what ends the
            turn before and opens the next one.
        deadline_s: Seconds that the environment may take for the replies to one turn of all episodes; if not given
            120, or less where the other ranks do not wait that long.
        on_error: "default" gives an episode whose environment fails `default_reward` and ends it, "raise" ends the run.
        default_reward: Reward of an episode whose environment fails.
        concurrency: Calls at one time; 1 for an environment that must not be called from several threads.

    Raises:
        ValueError: A setting is outside its range.
    """

    max_turns: int = 8
    max_turn_tokens: int | None = None
    reply_template: str = "{reply}"
    deadline_s: float | None = None
    on_error: Literal["default", "raise"] = "default"
    default_reward: float = 0.0
    concurrency: int = 8

    def __post_init__(self) -> None:
        check_ranges(_RANGES, vars(self), "episodes.")
        if "{reply}" not in self.reply_template:
            raise ValueError(
                f"episodes.reply_template={self.reply_template!r} does not contain {{reply}}: all replies would be"
                " equal."
            )
        if self.on_error not in ("default", "raise"):
            raise ValueError(f"episodes.on_error={self.on_error!r}: choose one of default, raise.")
