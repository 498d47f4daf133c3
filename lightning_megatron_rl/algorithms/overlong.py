"""The soft penalty of responses that come near the length limit."""

from torch import Tensor

from lightning_megatron_rl.utilities.ranges import NOT_NEGATIVE, Range, check_ranges

_RANGES = {
    "buffer": Range(above=0, most=1, note="it is the share of max_tokens in which the penalty grows"),
    "penalty": NOT_NEGATIVE.called("it is subtracted from the reward"),
}


def overlong_penalty(lengths: Tensor, *, max_length: int, buffer: float, penalty: float = 1.0) -> Tensor:
    """Return what is added to the reward of each response: 0, then linearly down to -penalty at the limit, float64.

    With L the limit and b = buffer · L tokens before it: 0 up to L - b, -penalty · (length - (L - b)) / b beyond
    (DAPO's soft overlong punishment, arXiv:2503.14476, which has L = 20480, b = 4096: a buffer of 0.2).

    Args:
        lengths: `[N]` tokens of each response.
        max_length: Limit on generated tokens.
        buffer: Share of the limit over which the penalty grows, in (0, 1].
        penalty: Its size at the limit, not negative.

    Raises:
        ValueError: Values outside these ranges.

    Example:
        ``overlong_penalty(torch.tensor([80, 90, 100]), max_length=100, buffer=0.2)`` is [0.0, -0.5, -1.0].
    """
    check_ranges(_RANGES, {"buffer": buffer, "penalty": penalty})
    width = buffer * max_length
    excess = (lengths.double() - (max_length - width)).clamp(min=0)
    return -penalty * (excess / width).clamp(max=1)
