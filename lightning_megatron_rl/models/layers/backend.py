"""Chooses a model's layers: Transformer Engine's, or plain torch under the same parameter names."""

import importlib.util
from functools import partial
from typing import Any, Literal

import torch

from lightning_megatron_rl.devices.checks import ENGINE_CAPABILITY
from lightning_megatron_rl.models.families.family import Family, Norms

LayerBackend = Literal["auto", "torch", "transformer_engine"]


def resolve_layer_backend(
    layer_backend: LayerBackend,
    device: torch.device,
    *,
    params_dtype: torch.dtype = torch.bfloat16,
    context_parallel_size: int = 1,
    latent_attention: bool = False,
    family: Family | None = None,
) -> LayerBackend:
    """Return "torch" or "transformer_engine": "auto" is the latter on CUDA where it is installed and can run.

    Raises `ValueError` if Transformer Engine is asked for and cannot run: without CUDA or the package; with context
    parallelism in fp32, for which it has no attention; with latent attention in fp32, or a `family`, which were not
    compared.
    """
    installed = importlib.util.find_spec("transformer_engine") is not None
    compared = family is None or family.transformer_engine
    has_attention = params_dtype != torch.float32 or (context_parallel_size == 1 and not latent_attention)
    if layer_backend == "auto":
        runs = device.type == "cuda" and installed and has_attention and compared
        return "transformer_engine" if runs and _is_made_for(device) else "torch"
    if layer_backend == "torch":
        return layer_backend
    if layer_backend != "transformer_engine":
        raise ValueError(f"train.layer_backend={layer_backend!r} is none of 'auto', 'torch', 'transformer_engine'")
    if device.type != "cuda":
        raise ValueError(
            f"train.layer_backend='transformer_engine' runs on CUDA only, and this run is on {device.type!r}: "
            "use train.layer_backend='auto' or 'torch'"
        )
    if not installed:
        raise ValueError(
            "train.layer_backend='transformer_engine', but Transformer Engine is not installed: "
            "pip install 'lightning-megatron-rl[gpu]', or use train.layer_backend='torch'"
        )
    if family is not None and not compared:
        raise ValueError(
            f"train.layer_backend='transformer_engine' with {family.architecture}: its layers of Transformer Engine"
            " were never compared with Transformers. Use train.layer_backend='auto' or 'torch'"
        )
    if not has_attention and latent_attention:
        raise ValueError(
            "train.layer_backend='transformer_engine' with latent attention (kv_lora_rank) in fp32: this was never"
            " compared with Transformers. Use Trainer(precision='bf16-mixed'), or train.layer_backend='torch'"
        )
    if not has_attention:
        raise ValueError(
            f"train.layer_backend='transformer_engine' with context_parallel_size={context_parallel_size} in fp32: its "
            "attention is split over ranks in 16-bit precisions only: use Trainer(precision='bf16-mixed'), or "
            "train.layer_backend='torch'"
        )
    return layer_backend


def _is_made_for(device: torch.device) -> bool:
    """Whether Transformer Engine is made for this GPU."""
    return torch.cuda.get_device_capability(device) >= ENGINE_CAPABILITY


def torch_block_spec(
    config: Any,
    vp_stage: int | None = None,
    *,
    norms: Norms = "before",
    norm_all_heads: bool = False,
    cap: float | None = None,
) -> Any:
    """Megatron's description of the transformer layers that this pipeline stage builds from torch modules.

    `config` is a `TransformerConfig`, whose `moe_layer_freq` says which layers have experts; the result is a
    `TransformerBlockSubmodules`, which Megatron-Bridge's providers take as `transformer_layer_spec`. `norms` says where
    a layer has norms; with `norm_all_heads` queries are normalised over all heads at once, and so are keys. `cap`
    bounds attention's scores softly.
    """
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    from lightning_megatron_rl.models.layers.torch_backend import TorchAllHeadsNorm, TorchSpecProvider

    backend = TorchSpecProvider(norms)
    attention = _latent_attention(config, backend) if config.multi_latent_attention else _attention(config, backend)
    if norm_all_heads:
        queries, keys = config.num_attention_heads, config.num_query_groups
        attention.submodules.q_layernorm = partial(TorchAllHeadsNorm, queries)
        attention.submodules.k_layernorm = partial(TorchAllHeadsNorm, keys)
    if cap is not None:
        attention.submodules.core_attention = partial(backend.core_attention(), cap=cap)
    dense, moe = _layer_spec(config, backend, attention, None), None
    if config.num_moe_experts:
        moe = _layer_spec(config, backend, attention, config.num_moe_experts)
    layers = [moe if has_experts else dense for has_experts in expert_layers(config)]
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=layers[first : first + count], layer_norm=backend.layer_norm())


def expert_layers(config: Any) -> list[bool]:
    """Which layers of the model of a `TransformerConfig` have experts: `moe_layer_freq` lists them, or every n-th has.

    Example:
        Four layers with ``moe_layer_freq=2``: ``[True, False, True, False]``.
    """
    if not config.num_moe_experts:
        return [False] * config.num_layers
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return [layer % frequency == 0 for layer in range(config.num_layers)]
    return [bool(has_experts) for has_experts in frequency]


def _layer_spec(config: Any, backend: Any, attention: Any, num_experts: int | None) -> Any:
    """One transformer layer of `backend`'s modules; `num_experts` is None for a dense one."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=backend.layer_norm() if config.multi_latent_attention else IdentityOp,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=backend.layer_norm() if num_experts else IdentityOp,
            mlp=get_mlp_module_spec_for_backend(backend=backend, num_experts=num_experts),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _attention(config: Any, backend: Any) -> Any:
    """Multi-head attention with grouped queries; the norm in front belongs to its first linear layer."""
    from megatron.core.transformer.attention import SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec

    from lightning_megatron_rl.models.layers.torch_backend import TorchSelfAttention

    query_key_norm = backend.layer_norm(for_qk=True) if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=TorchSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=backend.column_parallel_layer_norm_linear(),
            core_attention=backend.core_attention(),
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=query_key_norm,
            k_layernorm=query_key_norm,
        ),
    )


def _latent_attention(config: Any, backend: Any) -> Any:
    """Multi-head latent attention (DeepSeek-V2, 2024); norms of the latents belong to the up projections."""
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec

    from lightning_megatron_rl.models.layers.torch_backend import TorchLatentAttention

    up = backend.column_parallel_layer_norm_linear() if config.qk_layernorm else backend.column_parallel_linear()
    return ModuleSpec(
        module=TorchLatentAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=backend.column_parallel_linear(),
            linear_q_down_proj=backend.column_parallel_linear(),
            linear_q_up_proj=up,
            linear_kv_down_proj=backend.column_parallel_linear(),
            linear_kv_up_proj=up,
            core_attention=backend.core_attention(),
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=IdentityOp,
            kv_layernorm=IdentityOp,
        ),
    )
