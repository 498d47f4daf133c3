"""A policy loss of your own: a function from tensors to tensors, named in a config by its import path.

With ``PYTHONPATH=examples/extending``::

    lightning-megatron-rl fit --config configs/demo/grpo.yaml --model.init_args.loss.policy_loss loss.one_sided
"""

from torch import Tensor

from lightning_megatron_rl.algorithms.policy_losses import log_ratio
from lightning_megatron_rl.algorithms.sequences import Sequences


def one_sided(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sequences: Sequences | None = None
) -> tuple[Tensor, Tensor]:
    """Learn from what went well alone, with a ratio of at most 2.

    Args:
        logprobs: Of the policy, per token; the only one with a gradient.
        old_logprobs: Before the first update, of the same shape.
        advantages: Of the same shape.
        sequences: Which tokens make one sequence; not needed here.

    Returns:
        The loss and the ratio per token, of that shape.
    """
    ratio = log_ratio(logprobs, old_logprobs).exp().clamp(max=2.0)
    return -advantages.clamp(min=0.0) * ratio, ratio.detach()
