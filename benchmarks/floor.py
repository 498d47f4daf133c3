"""The physical floor of a GRPO step: what the arithmetic and the bytes alone take; formulas in docs/results.md."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Work:
    """What one step does."""

    samples: int
    prompts: int
    prompt_tokens: int  # of one prompt
    response_tokens: int  # of one sample
    parameters: int
    linear_flops: float  # of a forward pass, per token; see models.flops.sequence_flops
    quadratic_flops: float  # of a forward pass, per squared token
    cache_bytes_per_token: int  # keys and values of all layers
    weight_bytes: int = 2  # of a parameter, in trainer and sampler
    optimizer_bytes: int = 30  # of a parameter


def floor_seconds(work: Work, flops_per_s: float, bytes_per_s: float) -> dict[str, float]:
    """Return the least seconds of each phase, and their sum as "step".

    Decoding reads all weights and the cache of all samples once for each token, or computes, whichever takes longer;
    the prompts of a group are prefilled once. The update takes three forward passes, and has the old policy's log-probs
    from the first of them; the optimizer and the sync move bytes. Phases follow each other.

    Example:
        One sample, no cache, 1e9 parameters of 2 bytes at 2e12 bytes per second: 1 ms per token.
    """
    tokens = work.prompt_tokens + work.response_tokens

    def forward(length: int) -> float:
        return work.linear_flops * length + work.quadratic_flops * length**2

    prefill = work.prompts * forward(work.prompt_tokens) / flops_per_s
    decode = 0.0
    for position in range(work.response_tokens):
        context = work.prompt_tokens + position
        moved = work.parameters * work.weight_bytes + work.samples * context * work.cache_bytes_per_token
        computed = work.samples * (work.linear_flops + 2 * work.quadratic_flops * context)
        decode += max(moved / bytes_per_s, computed / flops_per_s)
    one_pass = work.samples * forward(tokens) / flops_per_s
    phases = {
        "weight_sync": 2 * work.parameters * work.weight_bytes / bytes_per_s,  # read and written
        "rollout": prefill + decode,
        "update": 3 * one_pass + work.parameters * work.optimizer_bytes / bytes_per_s,
    }
    return {**phases, "step": sum(phases.values())}


def optimizer_bytes(moments: str = "fp32", weight_bytes: int = 2) -> int:
    """Return what the optimizer moves of a parameter: gradient, parameter and moments in, the last two out.

    With moments in bf16 the main parameter is the model's and two more bytes; in fp32 it is the model's itself.

    Example:
        ``optimizer_bytes() == (4 + 4 + 8) + (4 + 2 + 8)``
    """
    main, both = 4, 8 if moments == "fp32" else 4
    copy = weight_bytes if moments == "fp32" and weight_bytes != main else 0
    return (4 + main + both) + (main + copy + both)


def cache_bytes_per_token(config: Any, element_bytes: int = 2) -> int:
    """Return the bytes that keys and values of one token take in all layers.

    Example:
        28 layers with 8 groups of 128 in bf16: ``2 * 28 * 8 * 128 * 2 == 114_688``.
    """
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * element_bytes
