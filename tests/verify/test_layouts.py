"""Names of layouts: what they mean, which fit, which are refused."""

import pytest

from lightning_megatron_rl.verify.layouts import default_layouts, parse_layout


@pytest.mark.parametrize(
    ("name", "world_size", "expected"),
    [
        ("single", 1, {}),
        ("microbatches", 1, {}),
        ("tp2", 2, {"tensor_model_parallel_size": 2}),
        ("tp2_dp2_sp", 4, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
        ("pp2_vpp2", 2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
        ("dp2_plain", 2, {"use_distributed_optimizer": False}),
        ("ep2", 2, {"expert_model_parallel_size": 2}),  # over two replicas of the dense layers
        ("tp2_ep2", 4, {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}),  # experts split over tp too
        ("tp2_ep2_etp1", 2, {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}),
        ("dp16_pp10", 160, {"pipeline_model_parallel_size": 10}),
    ],
)
def test_name_means_sizes(name, world_size, expected):
    layout = parse_layout(name)
    assert layout.world_size == world_size
    given = {key: value for key, value in layout.strategy.items() if value not in (1, None) or key in expected}
    given = {key: value for key, value in given.items() if value is not False or key in expected}
    assert given == expected
    assert {"tensor_model_parallel_size", "context_parallel_size", "sequence_parallel"} <= layout.strategy.keys()


def test_a_budget_may_follow_the_name():
    assert parse_layout("pp2_vpp2@96").max_tokens_per_microbatch == 96
    assert parse_layout("pp2_vpp2@96").strategy == parse_layout("pp2_vpp2").strategy
    assert parse_layout("single@8").world_size == 1
    assert parse_layout("single").max_tokens_per_microbatch is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tp2-pp2", "unknown layout 'tp2-pp2'.*tp2_pp2_sp"),
        ("tp0", "'tp0' is no part"),
        ("", "unknown layout ''"),
        ("zp3", "'zp3' is no part"),
        ("tp2_tp4", "tp is there twice"),
        ("tp2@", "layout 'tp2@': '' is no number of tokens"),
        ("tp2@4k", "'4k' is no number of tokens.*tp2@4096"),
        ("sp", "layout 'sp'.*sequence_parallel=True with tensor_model_parallel_size=1"),
        ("vpp2", "layout 'vpp2'.*at least 2 pipeline stages"),
        ("ep4_dp2", r"layout 'ep4_dp2'.*ep\(4\).* = 4 does not divide the world size 2"),
    ],
)
def test_wrong_name_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        parse_layout(name)


def test_default_layouts_are_all_products_once():
    names = default_layouts(4, has_experts=False)
    assert names[:8] == ["microbatches", "tp2", "tp2_sp", "pp2", "pp2_vpp2", "cp2", "dp2", "dp2_plain"]
    assert {"tp4_sp", "pp4_vpp2", "tp2_pp2_sp", "tp2_cp2_sp", "tp2_dp2_sp", "pp2_cp2", "pp2_dp2", "cp2_dp2"} <= {*names}
    assert len(names) == len(set(names))
    assert all(parse_layout(name).world_size in (1, 2, 4) for name in names)
    assert "tp2_pp2_cp2_sp" in default_layouts(8, has_experts=False)
    assert default_layouts(1, has_experts=True) == ["microbatches"]


def test_every_kind_is_named_in_full():
    """Ten processes: a part such as dp10 ends like an unused one."""
    names = default_layouts(10, has_experts=False)
    assert {"tp10", "pp10", "cp10", "dp10", "tp5_dp2_sp"} <= set(names)


def test_experts_have_layouts_of_their_own():
    names = default_layouts(4, has_experts=True)
    extra = [name for name in names if "ep" in name]
    assert extra == ["ep2", "tp2_ep2_etp1_sp", "ep4", "tp2_ep2_sp", "pp2_ep2", "cp2_ep2", "tp2_ep4_etp1_sp"]
    assert all(parse_layout(name).world_size <= 4 for name in extra)
