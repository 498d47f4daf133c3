"""Samples for the rewards to score, and rewards of a user's own."""

from lightning_megatron_rl.sample import Prompt, Sample


def make_sample(response: str, answer: str | None = None, index: int = 0, prompt: str = "1+1=") -> Sample:
    ids = list(range(len(response)))
    prompt_record = Prompt(token_ids=[5], text=prompt, answer=answer, index=index)
    return Sample(prompt=prompt_record, response_ids=ids, response_logprobs=[-1.0] * len(ids), response=response)


def length(batch: list[Sample]) -> list[float]:
    return [float(len(sample.response)) for sample in batch]


def one_sample_only(sample: Sample) -> float:
    return 1.0


def two_arguments(samples: list[Sample], scale: float) -> list[float]:
    return [scale for _ in samples]


class HTTPJudgeV2:
    """A class without a name of its own.

    Args:
        scale: the reward.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def __call__(self, samples: list[Sample]) -> list[float]:
        return [self.scale for _ in samples]
