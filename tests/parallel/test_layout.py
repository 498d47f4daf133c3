"""The layout object checks its arithmetic and says it."""

from dataclasses import replace

import pytest

from lightning_megatron_rl.parallel.layout import ParallelLayout


def test_data_parallel_size_is_what_is_left():
    layout = ParallelLayout(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, sequence_parallel=True)
    assert layout.data_parallel_size(8) == 2
    assert layout.describe(8) == "world 8 = tp 2 x pp 2 x cp 1 x dp 2, sequence parallel"


def test_world_that_does_not_divide_is_refused_with_the_arithmetic():
    layout = ParallelLayout(tensor_model_parallel_size=3, pipeline_model_parallel_size=2)
    with pytest.raises(ValueError, match=r"tp\(3\) x pp\(2\) x cp\(1\) = 6 does not divide the world size 8"):
        layout.data_parallel_size(8)


def test_expert_sizes_are_checked_against_the_world():
    layout = ParallelLayout(expert_model_parallel_size=3)
    with pytest.raises(ValueError, match=r"etp\(1\) x ep\(3\) x pp\(1\) = 3 does not divide the world size 4"):
        layout.data_parallel_size(4)


def test_experts_are_split_like_dense_layers_unless_told_otherwise():
    split = ParallelLayout(tensor_model_parallel_size=2, expert_model_parallel_size=2, sequence_parallel=True)
    message = r"etp\(2\) x ep\(2\) x pp\(1\) = 4 .* world size 2: .*not given, so it follows tp\(2\): 1 leaves"
    with pytest.raises(ValueError, match=message):
        split.data_parallel_size(2)
    whole = replace(split, expert_tensor_parallel_size=1)
    assert whole.data_parallel_size(2) == 1
    with pytest.raises(
        ValueError, match=r"etp\(1\) x ep\(2\) x pp\(3\) = 6 does not divide the world size 9: .*size\.$"
    ):
        ParallelLayout(
            pipeline_model_parallel_size=3, expert_model_parallel_size=2, expert_tensor_parallel_size=1
        ).data_parallel_size(9)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tensor_model_parallel_size": 0}, "tensor_model_parallel_size=0"),
        ({"sequence_parallel": True}, "tensor_model_parallel_size=1"),
        ({"virtual_pipeline_model_parallel_size": 2}, "at least 2 pipeline stages"),
    ],
)
def test_contradictions_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        ParallelLayout(**sizes)
