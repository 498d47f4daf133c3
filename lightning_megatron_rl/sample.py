"""The two records that travel through every room: a prompt on its way in, a sample on its way out."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Prompt:
    """One prompt of a data set, tokenised once; token ids are never produced from text again.

    Example:
        ``Prompt(token_ids=[5, 9], text="1+1=", answer="2", index=0)``
    """

    token_ids: list[int]  # [prompt tokens], chat template applied
    text: str  # what the ids decode to, for rewards and logs
    answer: str | None = None  # reference answer of the data set
    index: int = 0  # row of the data set: names the prompt in seeds, logs and errors
    dataset: str = "train"  # name of the set it came from
    columns: dict[str, Any] = field(default_factory=dict)  # every other column of the row


@dataclass
class Sample:
    """One response to one prompt, with all that later phases add to it.

    Example:
        ``Sample(prompt=prompt, response_ids=[7, 2], response_logprobs=[-0.1, -0.3], response="2")``
    """

    prompt: Prompt
    response_ids: list[int]  # [response tokens], the end-of-sequence token included if it was sampled
    response_logprobs: list[float]  # [response tokens], log-probs of the sampler's own (tempered) distribution
    response: str = ""  # decoded, special tokens left out
    finish_reason: str = "stop"  # "stop", or "length" when cut by the token limit
    weight_version: int = 0  # version of the weights that sampled it
    rewards: dict[str, float] = field(default_factory=dict)  # unweighted components by name
    reward: float = 0.0  # weighted sum of the components
    reward_errors: dict[str, str] = field(default_factory=dict)  # by reward: why its component is the default
    advantage: float = 0.0

    @property
    def is_truncated(self) -> bool:
        """Whether the token limit cut the response."""
        return self.finish_reason == "length"
