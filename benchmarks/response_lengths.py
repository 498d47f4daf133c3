"""Response lengths with a long tail, which belong to prompts: whoever samples a prompt draws as many tokens."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b, sha256
from statistics import NormalDist
from typing import Any

MEDIAN, SIGMA = 700 / 3900, 0.75  # of lognormal lengths: the median as a share of the longest one
Group = tuple[list[int], list[int]]  # a prompt's tokens, and the lengths of its responses


class LongTail:
    """Lognormal lengths; one in ninety would be longer than the longest, and is cut off there.

    A length depends on the prompt's tokens and the response's place among those to this prompt, on nothing else.

    Args:
        longest: Tokens of the longest response.

    Example:
        ``LongTail(3900)`` has lengths of 884 on average, a median of 700 and at most 3,900.
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest

    def __call__(self, prompt: Sequence[int], place: int) -> int:
        """Return the tokens of a response."""
        drawn = int.from_bytes(blake2b(f"{place}/{list(prompt)}".encode(), digest_size=6).digest(), "big")
        deviations = NormalDist().inv_cdf((drawn + 0.5) / 2**48)
        return min(self.longest, max(1, round(self.longest * MEDIAN * math.exp(SIGMA * deviations))))


def work(groups: Iterable[Group]) -> dict[str, Any]:
    """Return what an epoch has trained on, in whatever order: the same for the same prompts and lengths."""
    rows = sorted(groups)
    return {
        "samples": sum(len(lengths) for _, lengths in rows),
        "response_tokens": sum(sum(lengths) for _, lengths in rows),
        "groups_sha256": sha256(repr(rows).encode()).hexdigest(),
    }


def force_lengths(llm: Any, lengths: LongTail) -> None:
    """Make `generate` of a `vllm.LLM` end each response at its length; equal prompts are places of one group."""
    plain = llm.generate

    def generate(prompts: list[dict[str, Any]], sampling_params: Any, **options: Any) -> Any:
        places: Counter[tuple[int, ...]] = Counter()
        each = []
        for prompt in prompts:
            tokens = tuple(prompt["prompt_token_ids"])
            own = sampling_params.clone()
            own.max_tokens = lengths(tokens, places[tokens])
            places[tokens] += 1
            each.append(own)
        return plain(prompts, sampling_params=each, **options)

    llm.generate = generate
