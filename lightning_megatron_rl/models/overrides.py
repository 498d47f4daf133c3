"""Overrides of Megatron's `TransformerConfig`: where each has an effect, and which need each other."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lightning_megatron_rl.compat.field_rules import Rule, check_settings, dataclass_defaults
from lightning_megatron_rl.parallel.layout import ParallelLayout

OWNER = "train.model_config"
_TE_NUMBERS = "use bf16-mixed without it, or a GPU with Transformer Engine"
_TE_SPEED = "it is a fused kernel of Transformer Engine's"
_NO_GRAPHS = "micro-batches differ in length, which a captured graph cannot; remove it"
_NO_SAMPLER = "Megatron's inference is not used, responses are sampled by the rollout engine; remove it"
_NO_FLEX = "it belongs to Megatron's dispatcher 'flex', which is not supported; remove it"
_OWN_LOGPROBS = "log-probs are computed from hidden states chunk by chunk, without Megatron's output layer; remove it"

RULES: dict[str, Rule] = {
    # low precision
    "fp8": Rule("transformer_engine", _TE_NUMBERS),
    "fp8_*": Rule("transformer_engine", _TE_NUMBERS),
    "fp4": Rule("transformer_engine", _TE_NUMBERS),
    "fp4_*": Rule("transformer_engine", _TE_NUMBERS),
    "first_last_layers_bf16": Rule("transformer_engine", _TE_NUMBERS),
    "quant_recipe": Rule("transformer_engine", _TE_NUMBERS),
    "use_kitchen*": Rule("never", "the library behind it is not a dependency; use fp8"),
    "activation_func_fp8_input_store": Rule("cuda", "it stores activations in fp8; remove it"),
    "disable_bf16_reduced_precision_matmul": Rule("cuda", "it steers cuBLAS; remove it"),
    "enable_autocast": Rule("never", "the dtypes are those of Trainer(precision=...); remove it"),
    # fused kernels
    "apply_rope_fusion": Rule("transformer_engine", _TE_SPEED, speed_only=True),
    "fused_single_qkv_rope": Rule("transformer_engine", _TE_SPEED, speed_only=True),
    "fused_residual_rmsnorm": Rule("transformer_engine", _TE_SPEED, speed_only=True),
    "use_te_activation_func": Rule("transformer_engine", _TE_SPEED, speed_only=True),
    "gradient_accumulation_fusion": Rule("transformer_engine", _TE_SPEED, speed_only=True),
    "use_transformer_engine_op_fuser": Rule("transformer_engine", _TE_SPEED, speed_only=True),
    "moe_grouped_gemm": Rule("transformer_engine", "experts run one after the other", speed_only=True),
    "moe_permute_fusion": Rule("transformer_engine", _TE_SPEED, speed_only=True),
    "moe_router_fusion": Rule("transformer_engine", _TE_SPEED, speed_only=True),
    "moe_shared_expert_overlap": Rule("cuda", "it runs on a CUDA stream of its own", speed_only=True),
    "bias_activation_fusion": Rule("cuda", "it is compiled for CUDA", speed_only=True),
    "bias_dropout_fusion": Rule("cuda", "it is compiled for CUDA", speed_only=True),
    "masked_softmax_fusion": Rule("never", "no backend's attention uses Megatron's softmax", speed_only=True),
    "persist_layer_norm": Rule("never", "no backend uses the norms of Apex", speed_only=True),
    "memory_efficient_layer_norm": Rule("never", "no backend uses the norms of Apex; recompute activations instead"),
    "cross_entropy_loss_fusion": Rule("never", _OWN_LOGPROBS),
    "cross_entropy_fusion_impl": Rule("never", _OWN_LOGPROBS),
    "defer_embedding_wgrad_compute": Rule("never", _OWN_LOGPROBS),
    "wgrad_deferral_limit": Rule("never", _OWN_LOGPROBS),
    # attention
    "attention_backend": Rule("transformer_engine", "torch picks the kernel of scaled_dot_product_attention"),
    "flash_attention_version": Rule("transformer_engine", "torch picks the kernel of scaled_dot_product_attention"),
    "apply_query_key_layer_scaling": Rule("transformer_engine", "torch's attention accumulates in fp32; remove it"),
    "attention_softmax_in_fp32": Rule("never", "every kernel's softmax is in fp32; remove it"),
    "batch_invariant_mode": Rule("transformer_engine", "it selects kernels of flash-attention; remove it"),
    "log_max_attention_logit": Rule("transformer_engine", "torch's attention does not give its logits; remove it"),
    "qk_clip*": Rule("never", "it belongs to the Muon optimizer, which is not supported; remove it"),
    "cp_comm_type": Rule(
        "transformer_engine", "with torch layers keys and values are always all-gathered", speed_only=True
    ),
    # overlap of communication
    "tp_comm_*": Rule("never", "its buffers have one length, and micro-batches differ in theirs; remove it"),
    "overlap_moe_expert_parallel_comm": Rule("never", "it needs another schedule of Megatron's; remove it"),
    "overlap_dispatch_backward_with_experts_wgrad": Rule("never", "it needs another schedule of Megatron's; remove it"),
    "ep_overlap_early_attn_memory_release": Rule("never", "it needs another schedule of Megatron's; remove it"),
    "delay_wgrad_compute": Rule("never", "it needs another schedule of Megatron's; remove it"),
    "high_priority_a2a_comm_stream": Rule("never", "it needs another schedule of Megatron's; remove it"),
    "use_ring_exchange_p2p": Rule("never", "it needs a torch of its own; remove it"),
    "moe_enable_deepep": Rule("never", _NO_FLEX),
    "moe_flex_dispatcher_*": Rule("never", _NO_FLEX),
    "moe_deepep_*": Rule("never", _NO_FLEX),
    "moe_hybridep_*": Rule("never", _NO_FLEX),
    "moe_ncclep_*": Rule("never", _NO_FLEX),
    "mtp_*": Rule("never", "layers of multi-token prediction are neither loaded, trained nor exported; remove it"),
    # memory
    "cpu_offloading*": Rule(
        "transformer_engine", "activations already are in host memory, or stay on the GPU; remove it"
    ),
    "fine_grained_activation_offloading": Rule("cuda", "activations already are in host memory; remove it"),
    "offload_modules": Rule("cuda", "activations already are in host memory; remove it"),
    "moe_paged_stash*": Rule("never", "it needs captured graphs; remove it"),
    "init_model_with_meta_device": Rule("never", "it belongs to Megatron's FSDP; remove it"),
    "num_microbatches_with_partial_activation_checkpoints": Rule(
        "never", "every micro-batch is recomputed alike; set recompute_granularity"
    ),
    "moe_layer_recompute": Rule("never", "set recompute_granularity='selective', recompute_modules=['moe']"),
    "disable_parameter_transpose_cache": Rule("transformer_engine", "it is Transformer Engine's cache; remove it"),
    # the rest
    "enable_cuda_graph": Rule("never", _NO_GRAPHS),
    "external_cuda_graph": Rule("never", _NO_GRAPHS),
    "cuda_graph_*": Rule("never", _NO_GRAPHS),
    "inference_*": Rule("never", _NO_SAMPLER),
    "flash_decode": Rule("never", _NO_SAMPLER),
    "use_inference_optimized_layers": Rule("never", _NO_SAMPLER),
    "symmetric_ar_type": Rule("never", _NO_SAMPLER),
    "nccl_all_reduce_for_prefill": Rule("never", _NO_SAMPLER),
    "mlp_chunks_for_prefill": Rule("never", _NO_SAMPLER),
    "use_te_rng_tracker": Rule("never", "the strategy seeds and saves Megatron's own tracker; remove it"),
    "transformer_impl": Rule("never", "set train.layer_backend"),
    "hybrid_context_parallel": Rule("never", "set MegatronStrategy(context_parallel_size=...)"),
    "hierarchical_context_parallel_sizes": Rule("never", "set MegatronStrategy(context_parallel_size=...)"),
    "max_seqlen_per_dp_cp_rank": Rule("never", "set train.max_tokens_per_microbatch"),
}

DISPATCHER = "moe_token_dispatcher_type"
DISPATCHERS = ("alltoall", "allgather")
# Settings that gathered tokens were not tried with.
_NOT_GATHERED = (
    "moe_expert_capacity_factor",
    "moe_pad_expert_input_to_capacity",
    "moe_router_padding_for_quantization",
    "moe_router_padding_for_fp8",
    "fp8",
    "fp4",
)

_RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")
_RECOMPUTE_MODULES = ("core_attn", "mlp", "layernorm", "moe", "moe_act", "shared_experts", "mla_up_proj")


def check_overrides(overrides: Mapping[str, Any], *, device: torch.device, transformer_engine: bool) -> dict[str, Any]:
    """Return the overrides that do something on this device with these layers, in Megatron's types.

    Raises:
        ValueError: An override without effect here although it changes numbers or memory, or that lacks another.
    """
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    overrides = dict(overrides)
    backend = overrides.get("attention_backend")
    if isinstance(backend, str):  # YAML has no enums
        if backend not in AttnBackend.__members__:
            raise ValueError(f"{OWNER}: attention_backend={backend!r} is none of {', '.join(AttnBackend.__members__)}.")
        overrides["attention_backend"] = AttnBackend[backend]
    for prefix, remedy in (("fp8", "hybrid"), ("fp4", "e2m1")):
        loose = [name for name in overrides if name.startswith(f"{prefix}_")]
        if loose and not overrides.get(prefix):
            raise ValueError(
                f"{OWNER}: {loose[0]}={overrides[loose[0]]!r} does nothing without {prefix}: set {prefix}={remedy!r} or"
                f" remove {loose[0]}."
            )
    return check_settings(
        OWNER,
        overrides,
        dataclass_defaults(TransformerConfig),
        RULES,
        device=device,
        transformer_engine=transformer_engine,
    )


def default_dispatcher(given: Mapping[str, Any], layout: ParallelLayout) -> str:
    """Return how tokens come to experts on other ranks where the user does not say it: the way that sends less.

    Args:
        given: Fields of the `TransformerConfig` as the model will be built.
        layout: The parallel layout.
    """
    chosen = given["moe_router_topk"] if given["num_moe_experts"] else 0
    is_possible = not any(given.get(name) for name in ("moe_shared_expert_overlap", *_NOT_GATHERED))
    return "allgather" if layout.gathers_tokens(chosen) and is_possible else "alltoall"


def check_dispatcher(dispatcher: Any, given: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """Refuse a way to send tokens to experts that is unknown, or does nothing or was not tried with other settings.

    Args:
        dispatcher: The user's `moe_token_dispatcher_type`.
        given: Fields of the `TransformerConfig` as the model will be built.
        overrides: Those that the user sets.

    Raises:
        ValueError: With the value and what to set.
    """
    if dispatcher not in DISPATCHERS:
        raise ValueError(f"{OWNER}: {DISPATCHER}={dispatcher!r} is none of {', '.join(map(repr, DISPATCHERS))}.")
    if dispatcher == "alltoall":
        return
    setting = f"{OWNER}: {DISPATCHER}={dispatcher!r}"
    if not given["num_moe_experts"]:
        raise ValueError(f"{setting} does nothing: the model has no experts. Remove it.")
    if given["expert_model_parallel_size"] == 1:
        raise ValueError(
            f"{setting} with expert_model_parallel_size=1 does nothing: each rank has all experts, and tokens stay"
            " there. Remove it, or raise expert_model_parallel_size."
        )
    if given["expert_tensor_parallel_size"] > 1:
        raise ValueError(
            f"{setting} with expert_tensor_parallel_size={given['expert_tensor_parallel_size']} (by default"
            f" tensor_model_parallel_size={given['tensor_model_parallel_size']}): gathered tokens are for whole"
            " experts. Set expert_tensor_parallel_size=1, or remove it."
        )
    if overrides.get("moe_shared_expert_overlap"):
        raise ValueError(
            f"{setting} with moe_shared_expert_overlap=True: shared experts are computed during an all-to-all only."
            " Remove one of the two."
        )
    for name in _NOT_GATHERED:
        if given.get(name):
            raise ValueError(f"{setting} with {name}={given[name]!r} was not tried. Remove one of the two.")


@dataclass(frozen=True)
class LayerParts:
    """Features of a model's layers that activation recompute depends on; the default is a dense model."""

    experts: bool = False
    dense_mlp: bool = True  # in at least one layer
    shared_experts: bool = False  # that see every token
    grouped_experts: bool = False  # one grouped GEMM for all experts of a rank
    latent_attention: bool = False  # DeepSeek's


def check_recompute(overrides: Mapping[str, Any], parts: LayerParts) -> None:
    """Refuse settings of activation recompute that lack their counterpart or do not apply to this model.

    Args:
        overrides: Overrides of the `TransformerConfig`.
        parts: What the model's layers have.

    Raises:
        ValueError: With the value and what to set.

    Example:
        ``{"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}`` is complete.
    """
    granularity, method, layers, modules = (overrides.get(name) for name in _RECOMPUTE)
    if granularity not in (None, "full", "selective"):
        raise ValueError(f"{OWNER}: recompute_granularity={granularity!r} is none of 'full', 'selective'.")
    for name, value in (("recompute_method", method), ("recompute_num_layers", layers)):
        if value is not None and granularity != "full":
            raise ValueError(
                f"{OWNER}: {name}={value!r} with recompute_granularity={granularity!r} does nothing: it belongs to"
                " recompute_granularity='full'."
            )
    if modules is not None and granularity != "selective":
        raise ValueError(
            f"{OWNER}: recompute_modules={modules!r} with recompute_granularity={granularity!r} does nothing: it"
            " belongs to recompute_granularity='selective'."
        )
    if granularity == "full":
        if method not in ("uniform", "block"):
            raise ValueError(
                f"{OWNER}: recompute_granularity='full' with recompute_method={method!r}: set it to 'uniform'"
                " (checkpoints every recompute_num_layers layers) or 'block' (the first recompute_num_layers layers)."
            )
        if not isinstance(layers, int) or layers < 1:
            raise ValueError(
                f"{OWNER}: recompute_granularity='full' with recompute_num_layers={layers!r}: set it to a number of"
                " layers per pipeline stage, at least 1."
            )
    if granularity == "selective":
        _check_modules(["core_attn"] if modules is None else modules, parts)


def _check_modules(modules: Any, parts: LayerParts) -> None:
    if not isinstance(modules, list) or not modules:
        raise ValueError(
            f"{OWNER}: recompute_modules={modules!r} is not a list of one or more of {', '.join(_RECOMPUTE_MODULES)}."
        )
    no_experts = "the model has no experts: use 'mlp'"
    absent = {
        "mlp": (not parts.dense_mlp, "every layer has experts: use 'moe'"),
        "layernorm": (
            not parts.experts and not parts.latent_attention,
            "the norms of this model are part of the linear layers behind them, which keep their input only",
        ),
        "moe": (not parts.experts, no_experts),
        "moe_act": (
            not parts.grouped_experts,
            "experts run one after the other, and only a grouped GEMM (moe_grouped_gemm, of Transformer Engine) can"
            " recompute its activation alone: use 'moe'"
            if parts.experts
            else no_experts,
        ),
        "shared_experts": (
            not parts.shared_experts,
            "the model has experts, but none that all tokens share: use 'moe'" if parts.experts else no_experts,
        ),
        "mla_up_proj": (not parts.latent_attention, "the model has no latent attention"),
    }
    for module in modules:
        if module not in _RECOMPUTE_MODULES:
            raise ValueError(f"{OWNER}: {module!r} in recompute_modules is none of {', '.join(_RECOMPUTE_MODULES)}.")
        missing, reason = absent.get(module, (False, ""))
        if missing:
            raise ValueError(f"{OWNER}: {module!r} in recompute_modules does nothing: {reason}.")
