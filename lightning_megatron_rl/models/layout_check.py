"""Whether a model of given sizes can be split as asked: pure arithmetic, before any weight is loaded."""

from typing import Any

# What Megatron's rotary embedding knows of "llama3" scaling apart from the factor (it has these as constants).
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

# model_type -> fields of the Hugging Face config with the number of routed experts and the width of each.
EXPERT_SIZES = {
    "qwen3_moe": ("num_experts", "moe_intermediate_size"),
    "mixtral": ("num_local_experts", "intermediate_size"),
    "deepseek_v3": ("n_routed_experts", "moe_intermediate_size"),
}
# model_type -> kinds of rotary embedding that Megatron computes as Transformers does
ROPE_TYPES = {"llama": ("default", "linear", "llama3"), "deepseek_v3": ("default", "yarn")}


def check_family(config: Any, supported: list[str]) -> None:
    """Raise `ValueError` if the architecture of Hugging Face `config` is not `supported` or has a part that is not."""
    architectures = config.architectures or []
    if not set(architectures) & set(supported):
        raise ValueError(f"model architecture {architectures} is not supported; supported are {', '.join(supported)}")
    rope = config.rope_parameters or {}
    rope_type = rope.get("rope_type", "default")
    llama = config.model_type == "llama"
    if rope_type not in ROPE_TYPES.get(config.model_type, ("default",)):
        raise ValueError(f"rope_type={rope_type!r} of a {config.model_type} model is not supported")
    if rope_type == "llama3":
        for name, value in LLAMA3_ROPE.items():
            if rope[name] != value:
                raise ValueError(f"llama3 rope scaling with {name}={rope[name]}: Megatron has {value} built in")
    if getattr(config, "use_sliding_window", False):
        raise ValueError("use_sliding_window=true is not supported: set it to false in the model's config.json")
    if llama and (config.attention_bias or config.mlp_bias):
        raise ValueError("Llama with attention_bias or mlp_bias is not supported: there is no place for these weights")
    if config.hidden_act != "silu":
        raise ValueError(f"hidden_act={config.hidden_act!r} of a {config.model_type} model is not supported")
    if config.model_type in ("qwen3", "qwen3_moe") and config.attention_bias:
        raise ValueError("Qwen3 with attention_bias is not supported: there is no place for these weights")
    if config.model_type == "qwen3_moe" and (config.decoder_sparse_step != 1 or config.mlp_only_layers):
        raise ValueError(
            f"Qwen3-MoE with decoder_sparse_step={config.decoder_sparse_step} and "
            f"mlp_only_layers={config.mlp_only_layers} is not supported: Megatron-Bridge gives experts to every layer"
        )


def check_layout(
    config: Any,
    *,
    tensor_model_parallel_size: int,
    pipeline_model_parallel_size: int,
    virtual_pipeline_model_parallel_size: int | None = None,
    num_layers_in_first_pipeline_stage: int | None = None,
    num_layers_in_last_pipeline_stage: int | None = None,
    expert_model_parallel_size: int = 1,
    expert_tensor_parallel_size: int | None = None,
    sequence_parallel: bool = True,
) -> None:
    """Raise `ValueError` with arithmetic and remedy if a model of Hugging Face `config` cannot be split like this.

    The vocabulary need not be divisible: the embedding and output layer are padded with rows that take no part in
    softmax, sampling or export. `expert_tensor_parallel_size=None` splits experts like the dense layers.

    Example:
        16 heads over ``tensor_model_parallel_size=3``: "16 % 3 = 1 …: use a size that divides 16".
    """
    tp = tensor_model_parallel_size
    _check_divides("num_attention_heads", config.num_attention_heads, "tensor_model_parallel_size", tp)
    groups = config.num_key_value_heads
    if groups % tp and tp % groups:
        raise ValueError(
            f"num_key_value_heads={groups} and tensor_model_parallel_size={tp}: {groups} % {tp} = {groups % tp} and "
            f"{tp} % {groups} = {tp % groups}, but one must divide the other: {_remedy(groups)}"
        )
    _check_mlp(config, tp, expert_model_parallel_size, expert_tensor_parallel_size or tp, sequence_parallel)
    rows = -(-config.vocab_size // tp)  # of each rank
    if rows * (tp - 1) >= config.vocab_size:
        raise ValueError(
            f"vocab_size={config.vocab_size} over tensor_model_parallel_size={tp} leaves no token to the last rank "
            f"({rows} x {tp - 1} = {rows * (tp - 1)}): use fewer ranks"
        )
    _check_stages(
        config.num_hidden_layers,
        pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size or 1,
        num_layers_in_first_pipeline_stage,
        num_layers_in_last_pipeline_stage,
    )


def _check_mlp(config: Any, tp: int, ep: int, etp: int, sequence_parallel: bool) -> None:
    """Each rank must get the same part of a dense MLP, the same number of experts and the same part of each expert."""
    if config.model_type not in EXPERT_SIZES:
        _check_divides("intermediate_size", config.intermediate_size, "tensor_model_parallel_size", tp)
        for name, size, neutral in (("model", ep, 1), ("tensor", etp, tp)):
            if size != neutral:
                raise ValueError(
                    f"expert_{name}_parallel_size={size}, but a {config.model_type} model has no experts: "
                    "leave this setting out"
                )
        return
    experts, width = EXPERT_SIZES[config.model_type]
    _check_divides(experts, getattr(config, experts), "expert_model_parallel_size", ep)
    _check_divides(width, getattr(config, width), "expert_tensor_parallel_size", etp)
    if tp > 1 and not sequence_parallel:
        raise ValueError(
            f"tensor_model_parallel_size={tp} without sequence_parallel: in a model with experts all {tp} ranks would "
            "route and compute every token again, which Megatron refuses: set sequence_parallel=True"
        )


def _check_stages(layers: int, pp: int, vpp: int, first: int | None, last: int | None) -> None:
    """Every stage must get the same number of layers, apart from a first or last stage whose number is given."""
    given = [count for count in (first, last) if count is not None]
    if not given:
        if layers % (pp * vpp):
            raise ValueError(
                f"num_hidden_layers={layers} over pipeline_model_parallel_size={pp} x "
                f"virtual_pipeline_model_parallel_size={vpp}: {layers} % {pp * vpp} = {layers % (pp * vpp)}: use sizes "
                f"whose product divides {layers}, or set num_layers_in_first_pipeline_stage or "
                "num_layers_in_last_pipeline_stage"
            )
        return
    stages = pp - len(given)
    rest = layers - sum(given)
    if stages < 0 or rest < 0 or (rest if stages == 0 else rest % stages):
        raise ValueError(
            f"num_hidden_layers={layers} with {' + '.join(map(str, given))} in the first or last stage leaves "
            f"{rest} layers for {stages} of {pp} pipeline stages: they must divide evenly"
        )
    for count in (*given, *([rest // stages] if stages else [])):
        if count % vpp:
            raise ValueError(
                f"a pipeline stage of {count} layers cannot be cut in virtual_pipeline_model_parallel_size={vpp} "
                f"chunks: {count} % {vpp} = {count % vpp}"
            )


def _check_divides(what: str, value: int, size_name: str, size: int) -> None:
    """`size` ranks must share `value` equally."""
    if value % size:
        raise ValueError(
            f"{what}={value} over {size_name}={size}: {value} % {size} = {value % size}: {_remedy(value, size_name)}"
        )


def _remedy(value: int, size_name: str = "tensor_model_parallel_size") -> str:
    divisors = [str(size) for size in range(1, min(value, 64) + 1) if value % size == 0]
    return f"use a {size_name} among {', '.join(divisors)}"
