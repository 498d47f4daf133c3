"""Whether a model's sizes can be split as asked, with the arithmetic, before any weight is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lightning_megatron_rl.parallel.layout import ParallelLayout


@dataclass(frozen=True)
class PipelineSplit:
    """Fields of Megatron's `TransformerConfig` that give pipeline stages unequal numbers of layers.

    Example:
        Seven layers over two stages: ``PipelineSplit(account_for_loss_in_pipeline_split=True)`` gives 4 and 3.
    """

    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    account_for_embedding_in_pipeline_split: bool = False  # the embedding counts as a layer of the first stage
    account_for_loss_in_pipeline_split: bool = False  # the output layer counts as a layer of the last stage

    @classmethod
    def from_overrides(cls, overrides: Mapping[str, Any]) -> "PipelineSplit":
        """Take these fields out of overrides of the `TransformerConfig`."""
        return cls(**{field.name: overrides[field.name] for field in fields(cls) if field.name in overrides})


@dataclass(frozen=True)
class DividedExperts:
    """Sizes of routed experts, under the names that they have in config.json."""

    count: tuple[str, int]
    width: tuple[str, int]  # of each
    can_be_split: bool  # by tensor parallelism


@dataclass(frozen=True)
class DividedSizes:
    """Sizes that the ranks of a model share, under the names of config.json."""

    model_type: str
    num_attention_heads: int
    num_key_value_heads: int  # latent attention: as many as heads
    vocab_size: int
    num_hidden_layers: int
    widths: Mapping[str, int]  # that tensor parallelism must divide, beside heads
    experts: DividedExperts | None  # None: a dense model


def check_layout(sizes: DividedSizes, layout: ParallelLayout, split: PipelineSplit = PipelineSplit()) -> None:
    """Raise `ValueError` with arithmetic and remedy if a model of these sizes cannot be split like this.

    The vocabulary need not be divisible: the embedding and output layer are padded with rows that take no part in
    softmax, sampling or export.

    Example:
        16 heads over ``ParallelLayout(tensor_model_parallel_size=3)``: "16 % 3 = 1 …: use a size that divides 16".
    """
    tp = layout.tensor_model_parallel_size
    _check_divides("num_attention_heads", sizes.num_attention_heads, "tensor_model_parallel_size", tp)
    groups = sizes.num_key_value_heads
    if groups % tp and tp % groups:
        raise ValueError(
            f"num_key_value_heads={groups} and tensor_model_parallel_size={tp}: {groups} % {tp} = {groups % tp} and "
            f"{tp} % {groups} = {tp % groups}, but one must divide the other: {_remedy(groups)}"
        )
    _check_mlp(sizes, layout)
    rows = -(-sizes.vocab_size // tp)  # of each rank
    if rows * (tp - 1) >= sizes.vocab_size:
        raise ValueError(
            f"vocab_size={sizes.vocab_size} over tensor_model_parallel_size={tp} leaves no token to the last rank "
            f"({rows} x {tp - 1} = {rows * (tp - 1)}): use fewer ranks"
        )
    _check_stages(
        sizes.num_hidden_layers,
        layout.pipeline_model_parallel_size,
        layout.virtual_pipeline_model_parallel_size or 1,
        split,
    )


def _check_mlp(sizes: DividedSizes, layout: ParallelLayout) -> None:
    """Each rank must get the same part of a dense MLP, the same number of experts and the same part of each expert."""
    tp, ep = layout.tensor_model_parallel_size, layout.expert_model_parallel_size
    etp = layout.expert_tensor_parallel_size or tp
    for name, width in sizes.widths.items():
        _check_divides(name, width, "tensor_model_parallel_size", tp)
    experts = sizes.experts
    if experts is None:
        for name, size, neutral in (("model", ep, 1), ("tensor", etp, tp)):
            if size != neutral:
                raise ValueError(
                    f"expert_{name}_parallel_size={size}, but a {sizes.model_type} model has no experts: "
                    "leave this setting out"
                )
        return
    _check_divides(*experts.count, "expert_model_parallel_size", ep)
    _check_divides(*experts.width, "expert_tensor_parallel_size", etp)
    if etp > 1 and not experts.can_be_split:
        raise ValueError(
            f"expert_tensor_parallel_size={etp} (by default tensor_model_parallel_size={tp}): experts with biases "
            "cannot be split, each of the ranks would add the bias: set expert_tensor_parallel_size=1"
        )
    if tp > 1 and not layout.sequence_parallel:
        raise ValueError(
            f"tensor_model_parallel_size={tp} without sequence_parallel: in a model with experts all {tp} ranks would "
            "route and compute every token again, which Megatron refuses: set sequence_parallel=True"
        )


def _check_stages(layers: int, pp: int, vpp: int, split: PipelineSplit) -> None:
    """Every stage must get the same number of layers, apart from a first or last stage whose number is given."""
    counted = {
        "embedding": split.account_for_embedding_in_pipeline_split,
        "loss": split.account_for_loss_in_pipeline_split,
    }
    extra = [name for name, is_counted in counted.items() if is_counted]
    first, last = split.num_layers_in_first_pipeline_stage, split.num_layers_in_last_pipeline_stage
    given = [count for count in (first, last) if count is not None]
    if given and extra:
        raise ValueError(
            f"{' and '.join(map(str, given))} layers in the first or last pipeline stage, and"
            f" account_for_{extra[0]}_in_pipeline_split: the one says how many layers, the other computes it: set one"
        )
    if not given:
        total = layers + len(extra)
        if total % (pp * vpp):
            sum_of = f"num_hidden_layers={layers}" + "".join(f" + 1 for the {name}" for name in extra)
            raise ValueError(
                f"{sum_of} over pipeline_model_parallel_size={pp} x virtual_pipeline_model_parallel_size={vpp}: "
                f"{total} % {pp * vpp} = {total % (pp * vpp)}: use sizes whose product divides {total}, or set "
                "num_layers_in_first_pipeline_stage or num_layers_in_last_pipeline_stage"
            )
        return
    stages = pp - len(given)
    rest = layers - sum(given)
    if min(given) < 1 or (stages > 0 and rest == 0):
        raise ValueError(
            f"num_hidden_layers={layers} with {' + '.join(map(str, given))} in the first or last stage leaves a stage"
            f" of {pp} without a layer: where these numbers are given, each needs at least one"
        )
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
    article = "an" if size_name.startswith("e") else "a"
    return f"use {article} {size_name} among {', '.join(divisors)}"
