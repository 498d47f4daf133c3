"""The model families that are carried and what each can do: checks, tests and docs/models.md read this table."""

from dataclasses import dataclass
from typing import Any, Literal

Feature = Literal["TP", "TP+SP", "PP", "CP", "EP", "ETP", "packing"]


@dataclass(frozen=True)
class Family:
    """A family of models, by what its layers are made of and how they can be split.

    Example:
        ``FAMILIES["qwen3_moe"].expert_fields == ("num_experts", "moe_intermediate_size")``
    """

    name: str
    architecture: str  # in config.json
    attention: str
    mlp: str
    refused: str  # variants that `layout_check.check_family` turns down
    expert_fields: tuple[str, str] | None = None  # of config.json: number of routed experts, width of each
    expert_tensor_parallel: bool = True

    @property
    def features(self) -> frozenset[Feature]:
        """How a model can be split: tensor parallelism of experts goes with sequence parallelism only."""
        features: set[Feature] = {"TP+SP", "PP", "CP", "packing"}
        if self.expert_fields is None:
            return frozenset(features | {"TP"})
        return frozenset(features | {"EP", "ETP"} if self.expert_tensor_parallel else features | {"EP"})


# by model_type in config.json
FAMILIES = {
    "llama": Family(
        "Llama 3.x",
        "LlamaForCausalLM",
        "grouped queries; default, linear and llama3 rotary embedding",
        "dense",
        "attention_bias, mlp_bias",
    ),
    "mistral": Family(
        "Mistral",
        "MistralForCausalLM",
        "grouped queries, sliding window in every layer if the checkpoint has one",
        "dense",
        "scaled rotary embedding",
    ),
    "qwen2": Family(
        "Qwen2, Qwen2.5",
        "Qwen2ForCausalLM",
        "grouped queries with biases",
        "dense",
        "use_sliding_window, scaled rotary embedding",
    ),
    "qwen3": Family(
        "Qwen3",
        "Qwen3ForCausalLM",
        "grouped queries, norms of queries and keys",
        "dense",
        "use_sliding_window, attention_bias, scaled rotary embedding",
    ),
    "qwen3_moe": Family(
        "Qwen3-MoE",
        "Qwen3MoeForCausalLM",
        "like Qwen3",
        "experts in every layer, softmax router",
        "decoder_sparse_step, mlp_only_layers (dense layers in between), one expert per token with norm_topk_prob",
        ("num_experts", "moe_intermediate_size"),
    ),
    "mixtral": Family(
        "Mixtral",
        "MixtralForCausalLM",
        "like Mistral",
        "experts in every layer, softmax over the chosen ones",
        "scaled rotary embedding, one expert per token",
        ("num_local_experts", "intermediate_size"),
    ),
    "deepseek_v3": Family(
        "DeepSeek-V3, -R1",
        "DeepseekV3ForCausalLM",
        "latent attention; default and yarn rotary embedding",
        "first layers dense, then shared and routed experts; sigmoid router with a bias per expert, groups of experts",
        "attention_bias, norm_topk_prob=false, one expert per token, several groups of experts unless"
        " num_experts_per_tok // topk_group is 2, rms_norm_eps other than 1e-6, yarn with truncate, attention_factor or"
        " only one of mscale and mscale_all_dim; multi-token prediction is ignored",
        ("n_routed_experts", "moe_intermediate_size"),
    ),
    "gemma3_text": Family(
        "Gemma 3 (text)",
        "Gemma3ForCausalLM",
        "grouped queries, norms of queries and keys, five layers with a window to one without, norms behind layers",
        "dense",
        "soft-capping, bidirectional attention, other patterns of layers, images",
    ),
    "gpt_oss": Family(
        "GPT-OSS",
        "GptOssForCausalLM",
        "grouped queries with biases and sinks, every other layer with a window; yarn rotary embedding",
        "experts with biases in every layer, softmax over the chosen ones",
        "other values of yarn than the released models', one expert per token",
        ("num_local_experts", "intermediate_size"),
        expert_tensor_parallel=False,  # each of the ranks would add the bias
    ),
}


def table() -> str:
    """The families and their features as a Markdown table, for docs/models.md."""
    columns: tuple[Feature, ...] = ("TP", "TP+SP", "PP", "CP", "EP", "ETP", "packing")
    lines = [
        "| family | `architectures` | attention | MLP | " + " | ".join(columns) + " | refused |",
        "|---" * (len(columns) + 5) + "|",
    ]
    for family in FAMILIES.values():
        marks = ["✓" if feature in family.features else "–" for feature in columns]
        cells = [family.name, f"`{family.architecture}`", family.attention, family.mlp, *marks, family.refused]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def num_experts(config: Any) -> int:
    """Return how many routed experts a layer of the model of a Hugging Face config has; 0 in a dense model."""
    fields = FAMILIES[config.model_type].expert_fields
    return getattr(config, fields[0]) if fields else 0
