"""Records of all phases: prompts, samples and their turns."""

from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass
class Prompt:
    """One prompt of a data set, tokenised once; token ids are never produced from text again."""

    token_ids: list[int]  # [prompt tokens], chat template applied
    text: str  # what the ids decode to, for rewards and logs
    answer: str | None = None  # reference answer of the data set
    index: int = 0  # row of the data set: names the prompt in seeds, logs and errors
    dataset: str = "train"  # name of the set it came from
    columns: dict[str, Any] = field(default_factory=dict)  # every other column of the row

    def copy(self) -> "Prompt":
        """Return a deep copy."""
        return replace(self, token_ids=list(self.token_ids), columns=deepcopy(self.columns))


@dataclass
class Turn:
    """What the policy wrote in one turn of an episode: tokens `start` to `stop` of the response."""

    start: int  # of the first token, in the response
    stop: int  # behind the last one
    text: str = ""  # decoded, special tokens left out
    reward: float = 0.0  # that the environment gave for it


@dataclass
class Outcome:
    """How an episode ended."""

    reason: str  # "done", "max_turns", "length" when the token limits left no room, "error"
    reward: float = 0.0  # given at the end, beside those of the turns; of an error what the sample gets in all
    success: bool | None = None  # None: the environment does not say
    error: str = ""  # what the environment did wrong


def copies(samples: list["Sample"]) -> list["Sample"]:
    """Return samples that share nothing with these which could be changed; those of one prompt share its copy."""
    prompts = {id(sample.prompt): sample.prompt.copy() for sample in samples}
    return [sample.copy(prompts[id(sample.prompt)]) for sample in samples]


@dataclass
class Sample:
    """One response to one prompt, with all that later phases add to it.

    A response of several turns is one transcript: what the policy wrote and, between its turns, what the environment
    replied. `turns` says which is which; a response without `turns` is all the policy's.
    """

    prompt: Prompt
    response_ids: list[int]  # [response tokens], the end-of-sequence token included if it was sampled
    response_logprobs: list[float]  # [response tokens], of the sampler's own (tempered) distribution; 0 on replies
    response: str = ""  # decoded, special tokens left out
    finish_reason: str = "stop"  # "stop", or "length" when cut by the token limit
    weight_version: int = 0  # version of the weights that sampled it, or its first token
    rewards: dict[str, float] = field(default_factory=dict)  # unweighted components by name
    reward: float = 0.0  # weighted sum of the components
    reward_errors: dict[str, str] = field(default_factory=dict)  # by reward: why its component is the default
    advantage: float = 0.0
    turns: list[Turn] = field(default_factory=list)  # of an episode, in order; empty: the response is one turn
    outcome: Outcome | None = None  # of an episode
    # (version of the weights, tokens drawn with them) end to end; empty: `weight_version` drew all
    segments: list[tuple[int, int]] = field(default_factory=list)

    def copy(self, prompt: Prompt) -> "Sample":
        """Return a sample of `prompt` that shares nothing else with this one which could be changed."""
        return replace(
            self,
            prompt=prompt,
            response_ids=list(self.response_ids),
            response_logprobs=list(self.response_logprobs),
            segments=list(self.segments),
            rewards=dict(self.rewards),
            reward_errors=dict(self.reward_errors),
            turns=[replace(turn) for turn in self.turns],
            outcome=None if self.outcome is None else replace(self.outcome),
        )

    @property
    def response_mask(self) -> list[bool]:
        """Per response token, whether the policy wrote it: these are trained on, an environment's replies are not.

        Example:
            ``Sample(prompt, [7, 8, 9], [-0.1, 0.0, -0.2], turns=[Turn(0, 1), Turn(2, 3)]).response_mask`` is
            ``[True, False, True]``.
        """
        if not self.turns:
            return [True] * len(self.response_ids)
        mask = [False] * len(self.response_ids)
        for turn in self.turns:
            mask[turn.start : turn.stop] = [True] * (turn.stop - turn.start)
        return mask

    @property
    def policy_ids(self) -> list[int]:
        """The response tokens that the policy wrote."""
        if not self.turns:
            return list(self.response_ids)
        return [token for token, own in zip(self.response_ids, self.response_mask, strict=True) if own]

    @property
    def final_text(self) -> str:
        """The text of the last turn, where the policy's answer is; without turns the whole response."""
        return self.turns[-1].text if self.turns else self.response

    @property
    def is_truncated(self) -> bool:
        """Whether a token limit cut the response."""
        return self.finish_reason == "length"
