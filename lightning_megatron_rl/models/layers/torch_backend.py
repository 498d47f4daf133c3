"""Megatron's layers in plain torch, under the parameter names of Transformer Engine.

Checkpoints, distributed optimizer and Megatron-Bridge's mappings are then the same with and without Transformer Engine.
Megatron's own "local" layers have other names and know neither packed sequences nor context parallelism.
"""

import dataclasses
import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

from lightning_megatron_rl.models.families.family import Norms
from lightning_megatron_rl.models.layers.packed_attention import (
    Softmax,
    dense_attention,
    packed_attention,
    packed_positions,
    packed_zigzag_attention,
    zigzag_attention,
)


def _add_norm_parameters(module: torch.nn.Module, prefix: str, size: int, config: TransformerConfig) -> None:
    """Give `module` the parameters `{prefix}weight` and, for LayerNorm, `{prefix}bias`, both [size]."""
    initial = 0.0 if config.layernorm_zero_centered_gamma else 1.0
    weight = torch.nn.Parameter(torch.full((size,), initial, dtype=config.params_dtype))
    bias = (
        torch.nn.Parameter(torch.zeros(size, dtype=config.params_dtype))
        if config.normalization == "LayerNorm"
        else None
    )
    module.register_parameter(f"{prefix}weight", weight)
    module.register_parameter(f"{prefix}bias", bias)
    for parameter in (weight, bias):
        if parameter is not None:
            # each rank sees a part of the sequence only: finalize_model_grads must sum the gradient over the TP group
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def _normalize(hidden: Tensor, weight: Tensor, bias: Tensor | None, eps: float, config: TransformerConfig) -> Tensor:
    """RMSNorm (Zhang & Sennrich 2019) or LayerNorm (Ba et al. 2016) of the last dimension."""
    if config.layernorm_zero_centered_gamma:
        weight = weight + 1
    if config.normalization == "RMSNorm":
        return F.rms_norm(hidden, (hidden.size(-1),), weight, eps)
    return F.layer_norm(hidden, (hidden.size(-1),), weight, bias, eps)


class TorchNorm(torch.nn.Module):
    """RMSNorm or LayerNorm, as `config.normalization` says."""

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, has_residual: bool = False
    ) -> None:
        super().__init__()
        self.config = config
        self.eps = eps
        _add_norm_parameters(self, "", hidden_size, config)

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise `hidden` [..., hidden_size]."""
        return _normalize(hidden, self.weight, self.bias, self.eps, self.config)


class TorchAllHeadsNorm(torch.nn.Module):
    """RMSNorm over the queries, or the keys, of all heads of a token at once (OLMoE, MiniMax-M2).

    Every tensor-parallel rank has the whole weight [heads x d] and uses the part of its own heads. Megatron sums the
    gradients of norms of queries and keys over these ranks, so that of the whole weight comes together.
    """

    weight: Tensor

    def __init__(self, heads: int, hidden_size: int, config: TransformerConfig, eps: float) -> None:
        super().__init__()
        self.heads = heads
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(heads * hidden_size, dtype=config.params_dtype))

    def forward(self, states: Tensor) -> Tensor:
        """Normalise `states` [..., heads of this rank, d] by the mean square over the heads of all ranks."""
        group = get_tensor_model_parallel_group()
        here, width = states.shape[-2:]
        numbers = states.flatten(-2).float()
        squares = numbers.square().sum(-1, keepdim=True)
        if group.size() > 1:  # summed in both directions: what every rank makes of it depends on the heads of each
            squares = copy_to_tensor_model_parallel_region(
                reduce_from_tensor_model_parallel_region(squares, group=group), group=group
            )
        # ranks that share a head (more ranks than key-value heads) count it as often above as below the fraction line
        normalized = numbers * torch.rsqrt(squares / (group.size() * here * width) + self.eps)
        first = group.rank() * self.heads // group.size()
        weight = self.weight[first * width : (first + here) * width]
        return (weight * normalized.to(states.dtype)).view_as(states)


class TorchLayerNormColumnParallelLinear(ColumnParallelLinear):
    """A norm followed by a linear layer whose output features are split over the tensor-parallel ranks."""

    layer_norm_weight: Tensor
    layer_norm_bias: Tensor | None

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.return_layernorm_output = False  # an adapter on this layer wants it; Transformer Engine's name
        _add_norm_parameters(self, "layer_norm_", input_size, config)

    def forward(self, hidden: Tensor, *args: Any, **options: Any) -> tuple[Any, Tensor | None]:
        """Map `hidden` [s, b, input_size] to [s, b, output_size / tp], and the bias if it was skipped.

        With `return_layernorm_output` the former comes in a tuple with the normalised input.
        """
        eps = self.config.layernorm_epsilon
        normalized = _normalize(hidden, self.layer_norm_weight, self.layer_norm_bias, eps, self.config)
        output, bias = super().forward(normalized, *args, **options)
        return ((output, normalized) if self.return_layernorm_output else output), bias


class TorchRowParallelLinearNorm(RowParallelLinear):
    """A linear layer whose input features are split over the tensor-parallel ranks, followed by a norm (Gemma)."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.post_layernorm = TorchNorm(config, output_size, config.layernorm_epsilon)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Map `hidden` [s, b, input_size / tp] to [s, b, output_size], normalised; there is no bias."""
        output, bias = super().forward(hidden)
        return self.post_layernorm(output), bias


class TorchExpertLinear(RowParallelLinear):
    """The second linear layer of an expert; Megatron adds a bias to its output in place, so that must be no view."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Map `hidden` [tokens, input_size / etp] to [tokens, output_size], and the bias that was skipped."""
        output, bias = super().forward(hidden)
        return (output if bias is None else output.clone()), bias


class TorchLinear(torch.nn.Module):
    """A linear layer that every tensor-parallel rank holds whole (the down projections of latent attention)."""

    parallel_mode = "duplicated"

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Any,
        bias: bool = False,
        skip_bias_add: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.skip_bias_add = skip_bias_add
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        if config.perform_initialization:
            init_method(self.weight)
        self.bias = torch.nn.Parameter(torch.zeros(output_size, dtype=config.params_dtype)) if bias else None
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Multiply `hidden` [s, b, input_size]: [s, b, output_size] and the bias if it was skipped."""
        if self.skip_bias_add:
            return F.linear(hidden, self.weight), self.bias
        return F.linear(hidden, self.weight, self.bias), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The same tensor on every tensor-parallel rank, for Megatron's distributed checkpoints."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, sharded_offsets=sharded_offsets)


class TorchSelfAttention(SelfAttention):
    """Megatron's self-attention, which rotates the packed queries and keys of a micro-batch at once.

    Without a fused kernel Megatron rotates them sequence by sequence, into slices of one tensor, whose backward copies
    the whole gradient once per sequence. Here the angles are laid out like the tokens, which then count as one sequence
    until attention, where `cu_seqlens` separates them.
    """

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend over `hidden_states` [s, b, h] by angles `rotary_pos_emb` [longest, 1, 1, d]: [s, b, h], a bias.

        Where layers with a window have angles of their own (Gemma 3), both come: [2, longest, 1, 1, d].
        """
        if rotary_pos_emb is not None and rotary_pos_emb.dim() == 5:
            rotary_pos_emb = rotary_pos_emb[0 if self.core_attention.window is not None else 1]
        if packed_seq_params is not None and rotary_pos_emb is not None:
            boundaries = tuple(_padded_boundaries(packed_seq_params).tolist())
            group = self.pg_collection.cp
            positions = packed_positions(boundaries, group.size(), group.rank(), rotary_pos_emb.device)
            rotary_pos_emb = rotary_pos_emb[positions]  # [s, 1, 1, d]
            packed_seq_params = dataclasses.replace(packed_seq_params, qkv_format="sbhd")
        return super().forward(
            hidden_states,
            attention_mask,
            *args,
            rotary_pos_emb=rotary_pos_emb,
            packed_seq_params=packed_seq_params,
            **options,
        )


class TorchLatentAttention(MLASelfAttention):
    """Megatron's multi-head latent attention, whose down projections are whole on every tensor-parallel rank.

    Megatron knows such layers from Transformer Engine only. Those it builds instead, split by output features, get a
    wrong gradient: the rotary part of the key, which all heads share, collects it from the heads of one rank.
    """

    def __init__(
        self, config: MLATransformerConfig, submodules: MLASelfAttentionSubmodules, *args: Any, **options: Any
    ) -> None:
        super().__init__(config, submodules, *args, **options)
        width = config.kv_lora_rank + config.qk_pos_emb_head_dim
        linear = partial(TorchLinear, config.hidden_size, config=config, init_method=config.init_method)
        self.linear_kv_down_proj = linear(output_size=width)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = linear(output_size=config.q_lora_rank)

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        """The modules that were asked for: Megatron would take Transformer Engine's otherwise."""
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}


class TorchDotProductAttention(MegatronModule):
    """Causal attention on torch's scaled_dot_product_attention: grouped queries, packed sequences, context parallelism.

    Layers may see a window of the last tokens only, and heads may have a learned sink (`softmax_offset`). Under context
    parallelism the keys and values are gathered over the ranks, which hold zigzag shares of a sequence.
    """

    softmax_offset: Tensor | None

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        cap: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(config=config)
        self.cap = cap
        if config.softmax_type not in ("vanilla", "learnable"):
            raise ValueError(f"train.layer_backend='torch' has no softmax_type={config.softmax_type!r}")
        if attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
            raise ValueError(f"train.layer_backend='torch' has causal attention only, not {attn_mask_type}")
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp", "tp"])
        self.cp_group = groups.cp
        self.scale = softmax_scale if softmax_scale is not None else 1 / math.sqrt(k_channels or config.kv_channels)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.window = None  # tokens that a query sees, its own included
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            self.window = config.window_size[0] + 1
        sink = None
        if config.softmax_type == "learnable":
            sink = torch.nn.Parameter(
                torch.zeros(config.num_attention_heads // groups.tp.size(), dtype=config.params_dtype)
            )
            set_tensor_model_parallel_attributes(sink, is_parallel=True, dim=0, stride=1)
        self.register_parameter("softmax_offset", sink)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The sinks, one part on each tensor-parallel rank, for Megatron's distributed checkpoints."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Map `query` [s, b, heads, d] to [s, b, heads x d]; packed batches may come without b, and go without it."""
        if attention_mask is not None or attention_bias is not None:
            raise ValueError("train.layer_backend='torch' takes no attention mask or bias: pad on the right, or pack")
        dropout = self.dropout if self.training else 0.0
        softmax = Softmax(self.scale, dropout, self.window, self.softmax_offset, self.cap)
        cp_size = self.cp_group.size()
        shape = query.shape[:-2]
        cu_seqlens = None
        if packed_seq_params is not None:
            cu_seqlens = _padded_boundaries(packed_seq_params)
            query, key, value = (tensor.flatten(0, -3) for tensor in (query, key, value))  # [tokens, heads, d]
        if cp_size == 1:
            if cu_seqlens is None:
                return dense_attention(query, key, value, softmax).flatten(2)
            return packed_attention(query, key, value, cu_seqlens, softmax).reshape(*shape, -1)
        key, value = (
            gather_from_sequence_parallel_region(
                tensor.contiguous(), tensor_parallel_output_grad=True, group=self.cp_group
            ).unflatten(0, (cp_size, -1))
            for tensor in (key, value)
        )
        rank = self.cp_group.rank()
        if cu_seqlens is None:
            return zigzag_attention(query, key, value, rank, softmax).flatten(2)
        return packed_zigzag_attention(query, key, value, cu_seqlens, rank, softmax).reshape(*shape, -1)


def _padded_boundaries(packed_seq_params: Any) -> Tensor:
    """Where sequences start in memory: the padded boundaries if there are such, [sequences + 1]."""
    padded = packed_seq_params.cu_seqlens_q_padded
    return padded if padded is not None else packed_seq_params.cu_seqlens_q


class TorchSpecProvider(BackendSpecProvider):
    """The modules of a transformer layer, as Megatron's spec builders ask for them.

    Args:
        norms: Where a layer has norms: before attention and MLP, behind them (before what they return joins the
            residual stream), or around, that is both.
    """

    def __init__(self, norms: Norms = "before") -> None:
        self.norms = norms

    def linear(self) -> type:
        """A linear layer that is not split."""
        return TorchLinear

    def column_parallel_linear(self) -> type:
        """A linear layer split by output features."""
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        """A linear layer split by input features."""
        return RowParallelLinear if self.norms == "before" else TorchRowParallelLinearNorm

    def fuse_layernorm_and_linear(self) -> bool:
        """Norms belong to the linear layers behind them, as in Transformer Engine."""
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        """A linear layer split by output features, with the norm in front of it if there is one."""
        return ColumnParallelLinear if self.norms == "behind" else TorchLayerNormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> Any:
        """A norm that stands alone."""
        return TorchNorm

    def core_attention(self) -> type:
        """Attention between projections."""
        return TorchDotProductAttention

    def activation_func(self) -> None:
        """No module: `config.activation_func` is used."""
        return None

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
        """Experts, one after the other."""
        experts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=TorchExpertLinear, activation_func=None)
        return partial(SequentialMLP, submodules=experts)
