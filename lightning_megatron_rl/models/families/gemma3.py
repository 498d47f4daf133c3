"""Gemma 3, the text models."""

from typing import Any

from lightning_megatron_rl.models.families.family import Family, Rope, check_causal_and_tied, check_window_layers


def check(config: Any) -> None:
    """Refuse what contradicts the constants of Megatron-Bridge."""
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name):
            raise ValueError(f"Gemma 3 with {name}={getattr(config, name)} is not supported")
    check_causal_and_tied(config, "Gemma 3")
    check_window_layers(config, every=6)


def torch_settings(provider: Any) -> dict[str, Any]:
    """Windows of layers, which Bridge's own modules tell apart otherwise."""
    return {
        "window_size": (provider.window_size - 1, 0),
        "window_attn_skip_freq": sum(provider.interleaved_attn_pattern),
    }


FAMILY = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    ("megatron.bridge.models.gemma.gemma3_bridge",),
    name="Gemma 3 (text)",
    attention="grouped queries, norms of queries and keys, five layers with a window to one without, norms behind"
    " layers",
    mlp="dense",
    refused="soft-capping, bidirectional attention, other patterns of layers, images",
    rope=Rope(layers={"sliding_attention": ("default",), "full_attention": ("default", "linear")}),
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    no_place_for=("attention_bias",),
    check=check,
    fused_rope=False,  # two rotations by turns, which Megatron-Bridge hands on in a form of its own
    norms="around",
    torch_settings=torch_settings,
)
