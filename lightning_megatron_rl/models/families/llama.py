"""Llama 3.x."""

from lightning_megatron_rl.models.families.family import Family, Rope
from lightning_megatron_rl.models.families.rope import YARN_KEYS

# Megatron's constants for "llama3" scaling; the factor is read from the checkpoint.
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

FAMILY = Family(
    "llama",
    "LlamaForCausalLM",
    ("megatron.bridge.models.llama.llama_bridge",),
    name="Llama 3.x",
    attention="grouped queries; default, linear, llama3 and yarn rotary embedding",
    mlp="dense",
    refused="attention_bias, mlp_bias",
    rope=Rope(("default", "linear", "llama3", "yarn"), constants={"llama3": LLAMA3_ROPE}, keys={"yarn": YARN_KEYS}),
    no_place_for=("attention_bias", "mlp_bias"),
)
