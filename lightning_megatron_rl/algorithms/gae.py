"""Generalised advantage estimation: advantages and returns per token from rewards and a critic's values."""

import torch
from torch import Tensor


@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns) per token, of the inputs' shape and the dtype of `values` (arXiv:1506.02438).

    δ_t = r_t + γ V_{t+1} - V_t, A_t = δ_t + γλ A_{t+1}, return_t = A_t + V_t, where t + 1 is the next token of the row
    that counts (a tool's answer between two turns is stepped over) and V is 0 after the last: the episode has ended.
    Advantages are not whitened; `whiten(advantages, mask, all_reduce=...)` does that over all ranks.

    Args:
        rewards: `[n]` or `[b, n]` reward of each token: usually the sample's on its last token, minus KL on all.
        values: The critic's value before each token, same shape.
        mask: Bool, the policy's own tokens; other positions get 0 and are never looked at.
        gamma: Discount per token.
        lam: 0 trusts the critic (one-step differences), 1 the rewards (return minus value).

    Raises:
        ValueError: Shapes that differ, or gamma or lam outside [0, 1].

    Example:
        Rewards 0 0 1 and values 0.5 0.5 0.5 with gamma = lam = 1: advantages 0.5 0.5 0.5, returns 1 1 1.
    """
    if not rewards.shape == values.shape == mask.shape:
        raise ValueError(
            f"rewards {tuple(rewards.shape)}, values {tuple(values.shape)} and mask {tuple(mask.shape)} must have one"
            " shape, [tokens] or [sequences, tokens]"
        )
    for name, factor in (("gamma", gamma), ("lam", lam)):
        if not 0 <= factor <= 1:
            raise ValueError(f"{name}={factor} must be in [0, 1]")
    known_rewards = torch.where(mask, rewards.double(), 0.0)
    known_values = torch.where(mask, values.double(), 0.0)
    advantages = torch.zeros_like(known_values)
    advantage = next_value = known_values.new_zeros(known_values.shape[:-1])
    for position in reversed(range(values.shape[-1])):
        counts, value = mask[..., position], known_values[..., position]
        delta = known_rewards[..., position] + gamma * next_value - value
        advantage = torch.where(counts, delta + gamma * lam * advantage, advantage)
        next_value = torch.where(counts, value, next_value)
        advantages[..., position] = torch.where(counts, advantage, 0.0)
    return advantages.to(values.dtype), (advantages + known_values).to(values.dtype)
