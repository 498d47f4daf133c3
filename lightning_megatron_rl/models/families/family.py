"""`Family`: a model family as data, each in a file of its own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Feature = Literal["TP", "TP+SP", "PP", "CP", "EP", "ETP", "packing"]
Norms = Literal["before", "around", "behind"]


def _accept(config: Any) -> None:
    """Accept every config."""


def _nothing(_: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Experts:
    """The routed experts of a family.

    Args:
        count: Field of config.json with their number.
        width: Field of config.json with the width of each.
        can_be_split: Whether tensor parallelism can split one (`expert_tensor_parallel_size` > 1).
        softmax_over_chosen: Whether the weights of a token's experts are, for a config, a softmax over the chosen ones.
        transposed: Whether Transformers stores their matrices as ``[experts, in, out]``.
        interleaved: Whether rows of `gate_up_proj` alternate between gate and up.
    """

    count: str
    width: str
    can_be_split: bool = True
    softmax_over_chosen: Callable[[Any], bool] = lambda config: False
    transposed: bool = False
    interleaved: bool = False


@dataclass(frozen=True)
class Rope:
    """The rotary embeddings that Megatron computes as Transformers does.

    Args:
        types: Values of `rope_type`.
        layers: The same by kind of layer, for families in which each kind has its own; then `types` does not count.
        constants: What Megatron has built in, by `rope_type`: the only values that config.json may have.
        keys: The only keys that config.json may have, by `rope_type`: those that vLLM reads, too.
        partial: Whether Transformers reads `partial_rotary_factor` where nothing is scaled; vLLM does in every family.
    """

    types: tuple[str, ...] = ("default",)
    layers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    constants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    keys: Mapping[str, frozenset[str]] = field(default_factory=dict)
    partial: bool = False


@dataclass(frozen=True)
class Family:
    """A family of models: how it is recognised, converted, checked and split.

    Args:
        model_type: As in config.json.
        architecture: As in config.json.
        bridges: Modules that register Megatron-Bridge's converter when they are imported, in this order; the last one
            wins. It maps the config and the names of weights.
        name: For docs/models.md, as `attention`, `mlp` and `refused` are.
        attention: What its attention is made of.
        mlp: What its MLPs are made of.
        refused: Unsupported variants.
        experts: Its routed experts; None for dense models.
        tensor_parallel_sizes: Fields of config.json that tensor parallelism must divide, beside heads; of several
            names the product.
        rope: Its rotary embeddings.
        activation: The field with the MLP's activation, and the supported value.
        no_place_for: Switches that add weights which Megatron's layers have no place for.
        check: Raises `ValueError` for a config with another unsupported part.
        relations: Relations between sizes that change what is computed, of a config, by name; see `signature`.
        dense_layers: The field that says how many layers come before those with experts.
        mxfp4: Whether checkpoints with MXFP4 experts are read.
        can_be_tied: Whether Megatron-Bridge can tie the embeddings.
        fused_rope: Whether the fused kernel computes its rotation.
        norms: Where a layer has norms: before attention and MLP, behind them, or around them.
        norm_all_heads: Whether the norms of queries and of keys are over all heads at once.
        soft_caps: Whether config.json soft-caps attention's scores and logits (`*_logit_softcapping`).
        transformer_engine: Whether its layers of Transformer Engine were compared with Transformers; if not, layers are
            made of torch modules on GPUs, too.
        sampled: Whether what vLLM samples was compared with Transformers; if not, runs that sample are refused.
        needed_to_sample: What config.json must say for vLLM to compute what Transformers does whatever it says.
        torch_settings: Fields of Megatron's `TransformerConfig` for layers made of torch modules, of Bridge's provider.
    """

    model_type: str
    architecture: str
    bridges: tuple[str, ...]
    name: str
    attention: str
    mlp: str
    refused: str
    experts: Experts | None = None
    tensor_parallel_sizes: tuple[tuple[str, ...], ...] = (("intermediate_size",),)
    rope: Rope = Rope()
    activation: tuple[str, str] = ("hidden_act", "silu")
    no_place_for: tuple[str, ...] = ()
    check: Callable[[Any], None] = _accept
    relations: Callable[[Any], dict[str, Any]] = _nothing
    dense_layers: str | None = None
    mxfp4: bool = False
    can_be_tied: bool = True
    fused_rope: bool = True
    norms: Norms = "before"
    norm_all_heads: bool = False
    soft_caps: bool = False
    transformer_engine: bool = True
    sampled: bool = True
    needed_to_sample: Mapping[str, Any] = field(default_factory=dict)
    torch_settings: Callable[[Any], dict[str, Any]] = _nothing

    @property
    def features(self) -> frozenset[Feature]:
        """How a model can be split: tensor parallelism of experts goes with sequence parallelism only."""
        features: set[Feature] = {"TP+SP", "PP", "CP", "packing"}
        if self.experts is None:
            return frozenset(features | {"TP"})
        return frozenset(features | {"EP", "ETP"} if self.experts.can_be_split else features | {"EP"})


def check_causal_and_tied(config: Any, name: str) -> None:
    """Raise `ValueError` unless attention is causal and the output layer is the embedding."""
    if config.use_bidirectional_attention or not config.tie_word_embeddings:
        raise ValueError(
            f"{name} with use_bidirectional_attention={config.use_bidirectional_attention}, tie_word_embeddings="
            f"{config.tie_word_embeddings} is not supported: attention is causal, and there is no place for an output"
            " layer"
        )


def check_window_layers(config: Any, every: int) -> None:
    """Raise `ValueError` unless all layers but every n-th have a sliding window."""
    expected = [
        "full_attention" if layer % every == 0 else "sliding_attention"
        for layer in range(1, config.num_hidden_layers + 1)
    ]
    if config.layer_types != expected or not config.sliding_window:
        raise ValueError(
            f"{config.model_type} with sliding_window={config.sliding_window}, layer_types={config.layer_types} is not "
            f"supported: every layer must have a sliding window but every {every}. one"
        )
