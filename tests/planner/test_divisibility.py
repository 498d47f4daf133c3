"""Layouts that are refused, with the arithmetic in the message, and those that are not."""

from dataclasses import fields
from typing import Any

import pytest
from transformers import (
    DeepseekV3Config,
    GptOssConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from lightning_megatron_rl.models.families.check import divided_sizes
from lightning_megatron_rl.parallel.layout import ParallelLayout
from lightning_megatron_rl.planner.divisibility import PipelineSplit, check_layout

SIZES = {
    "vocab_size": 130,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def layout(**options: Any) -> tuple[ParallelLayout, PipelineSplit]:
    names = {field.name for field in fields(PipelineSplit)}
    sizes = {name: value for name, value in options.items() if name not in names}
    sizes.setdefault("sequence_parallel", sizes.get("tensor_model_parallel_size", 1) > 1)
    return ParallelLayout(**sizes), PipelineSplit.from_overrides(options)


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ({}, {"tensor_model_parallel_size": 3}, r"num_attention_heads=8 over .*8 % 3 = 2.*among 1, 2, 4, 8"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 6},
            {"tensor_model_parallel_size": 4},
            r"num_key_value_heads=6 .*6 % 4 = 2 and 4 % 6 = 4",
        ),
        ({"intermediate_size": 98}, {"tensor_model_parallel_size": 4}, r"intermediate_size=98 over .*98 % 4 = 2"),
        ({"vocab_size": 5}, {"tensor_model_parallel_size": 4}, r"vocab_size=5 .*no token to the last rank"),
        ({}, {"pipeline_model_parallel_size": 4}, r"num_hidden_layers=6 .*6 % 4 = 2.*num_layers_in_first"),
        (
            {},
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
            r"6 % 4 = 2",
        ),
        (
            {},
            {"pipeline_model_parallel_size": 4, "num_layers_in_first_pipeline_stage": 2},
            r"with 2 in the first or last stage leaves 4 layers for 3 of 4",
        ),
        (
            {},
            {
                "pipeline_model_parallel_size": 2,
                "num_layers_in_first_pipeline_stage": 2,
                "num_layers_in_last_pipeline_stage": 3,
            },
            r"with 2 \+ 3 .* leaves 1 layers for 0 of 2",
        ),
        (
            {},
            {"pipeline_model_parallel_size": 2, "num_layers_in_last_pipeline_stage": 0},
            r"num_hidden_layers=6 with 0 .* leaves a stage of 2 without a layer",
        ),
        (
            {},
            {
                "pipeline_model_parallel_size": 3,
                "num_layers_in_first_pipeline_stage": 2,
                "num_layers_in_last_pipeline_stage": 4,
            },
            r"with 2 \+ 4 .* leaves a stage of 3 without a layer",
        ),
        (
            {},
            {
                "pipeline_model_parallel_size": 2,
                "num_layers_in_first_pipeline_stage": 3,
                "virtual_pipeline_model_parallel_size": 2,
            },
            r"stage of 3 layers cannot be cut .*3 % 2 = 1",
        ),
        (
            {},
            {"pipeline_model_parallel_size": 2, "account_for_loss_in_pipeline_split": True},
            r"num_hidden_layers=6 \+ 1 for the loss over .*7 % 2 = 1",
        ),
        (
            {},
            {
                "pipeline_model_parallel_size": 2,
                "num_layers_in_first_pipeline_stage": 2,
                "account_for_embedding_in_pipeline_split": True,
            },
            r"2 layers in the first or last pipeline stage, and account_for_embedding_in_pipeline_split",
        ),
    ],
)
def test_layouts_that_do_not_divide_are_refused(sizes: dict[str, int], options: dict[str, int], message: str):
    with pytest.raises(ValueError, match=message):
        check_layout(divided_sizes(Qwen3Config(**{**SIZES, **sizes})), *layout(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"expert_model_parallel_size": 4},
            r"num_experts=6 over expert_model_parallel_size=4: 6 % 4 = 2: use an expert",
        ),
        (
            {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 4},
            r"moe_intermediate_size=10 over expert_tensor_parallel_size=4: 10 % 4 = 2: .* among 1, 2, 5, 10",
        ),
        ({"tensor_model_parallel_size": 4}, r"moe_intermediate_size=10 over expert_tensor_parallel_size=4"),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": False}, r"all 2 ranks would .* sequence_parallel=True"),
    ],
)
def test_experts_that_cannot_be_shared_out_are_refused(options: dict[str, Any], message: str):
    config = Qwen3MoeConfig(**SIZES, num_experts=6, moe_intermediate_size=10)
    check_layout(divided_sizes(config), *layout(tensor_model_parallel_size=2, expert_model_parallel_size=3))
    check_layout(divided_sizes(config), *layout(tensor_model_parallel_size=4, expert_tensor_parallel_size=1))
    with pytest.raises(ValueError, match=message):
        check_layout(divided_sizes(config), *layout(**options))


def test_dense_layers_among_experts_must_divide_too():
    sizes = {**SIZES, "num_key_value_heads": 8, "intermediate_size": 98, "moe_intermediate_size": 16}
    with pytest.raises(ValueError, match="intermediate_size=98 over tensor_model_parallel_size=4"):
        check_layout(divided_sizes(DeepseekV3Config(**sizes)), *layout(tensor_model_parallel_size=4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expert_model_parallel_size": 2}, "expert_model_parallel_size=2, but a qwen3 model has no experts"),
        ({"expert_tensor_parallel_size": 2}, "expert_tensor_parallel_size=2, but a qwen3 model has no experts"),
    ],
)
def test_expert_parallelism_of_a_dense_model_is_refused(options: dict[str, int], message: str):
    with pytest.raises(ValueError, match=message):
        check_layout(divided_sizes(Qwen3Config(**SIZES)), *layout(**options))


def test_experts_with_biases_are_not_split():
    config = GptOssConfig(**{**SIZES, "num_local_experts": 4})
    check_layout(divided_sizes(config), *layout(tensor_model_parallel_size=2, expert_tensor_parallel_size=1))
    with pytest.raises(
        ValueError, match=r"expert_tensor_parallel_size=2 \(by default .*set expert_tensor_parallel_size=1"
    ):
        check_layout(divided_sizes(config), *layout(tensor_model_parallel_size=2))


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_model_parallel_size": 4},  # 130 tokens are padded to 132
        {"tensor_model_parallel_size": 8},  # two ranks share a key-value head
        {"pipeline_model_parallel_size": 3, "virtual_pipeline_model_parallel_size": 2},
        {"pipeline_model_parallel_size": 4, "num_layers_in_first_pipeline_stage": 3},
        {
            "pipeline_model_parallel_size": 4,
            "account_for_embedding_in_pipeline_split": True,
            "account_for_loss_in_pipeline_split": True,
        },
        {
            "pipeline_model_parallel_size": 2,
            "num_layers_in_first_pipeline_stage": 2,
            "num_layers_in_last_pipeline_stage": 4,
        },
    ],
)
def test_layouts_that_divide_pass(options: dict[str, int]):
    check_layout(divided_sizes(Qwen3Config(**SIZES)), *layout(**options))
