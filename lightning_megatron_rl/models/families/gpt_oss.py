"""GPT-OSS."""

from typing import Any

from lightning_megatron_rl.models.families.family import Experts, Family, Rope, check_window_layers

# Megatron-Bridge does not take these from the checkpoint.
GPT_OSS_ROPE = {
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def relations(config: Any) -> dict[str, Any]:
    """Which matrices are square or nearly so: Megatron-Bridge tells them from transposed ones by their shapes."""
    hidden = config.hidden_size
    known = {hidden: "equal", 2 * hidden: "twice", hidden / 2: "half"}
    return {"intermediate_size to hidden_size": known.get(config.intermediate_size, "another")}


FAMILY = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    ("megatron.bridge.models.gpt_oss.gpt_oss_bridge", "lightning_megatron_rl.models.families.gpt_oss_bridge"),
    name="GPT-OSS",
    attention="grouped queries with biases and sinks, every other layer with a window; yarn rotary embedding",
    mlp="experts with biases in every layer, softmax over the chosen ones",
    refused="other values of yarn than the released models', one expert per token",
    experts=Experts(
        "num_local_experts",
        "intermediate_size",
        can_be_split=False,  # each of the ranks would add the bias
        softmax_over_chosen=lambda config: True,
        transposed=True,
        interleaved=True,
    ),
    tensor_parallel_sizes=(),
    rope=Rope(("yarn",), constants={"yarn": GPT_OSS_ROPE}),
    check=lambda config: check_window_layers(config, every=2),
    relations=relations,
    mxfp4=True,
    can_be_tied=False,
)
