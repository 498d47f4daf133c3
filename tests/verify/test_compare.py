"""What counts as a difference, and how it is named; numbers made by hand."""

import json
import math
from typing import Any

import pytest
import torch

from lightning_megatron_rl.verify.compare import make_row, model_order, reference_row
from lightning_megatron_rl.verify.job import Measurement, compare_weights, write_weights
from lightning_megatron_rl.verify.layouts import parse_layout
from lightning_megatron_rl.verify.report import Report, Row

NAMES = ["model.embed_tokens.weight", "model.layers.2.mlp.up_proj.weight", "model.layers.10.mlp.up_proj.weight"]


def measured(**changes: Any) -> Measurement:
    values: dict[str, Any] = {
        "rank": 0,
        "losses": [2.0, 1.0],
        "grad_norms": [4.0, 3.0],
        "logprobs": {0: torch.tensor([0.0, -1.0]), 1: torch.tensor([0.0, -2.0, -3.0])},
        "metrics": [{}, {}],
        "step_s": 1.0,
        "peak_memory_gb": 1.0,
        "weight_errors": [dict.fromkeys(NAMES, 0.0)] * 2,
        "checksum": "0",
        "num_experts": 0,
        "balance_coeff": 0.0,
    }
    return Measurement(**{**values, **changes})


def reason(tolerance: float = 1e-5, **changes: Any) -> str:
    row = make_row(parse_layout("tp2"), [measured(**changes), measured(rank=1)], measured(), tolerance)
    assert (row.verdict == "departs") == bool(row.reason)
    return row.reason


def test_equal_within_tolerance():
    assert reason() == ""
    assert reason(losses=[2.0 + 1e-5, 1.0], grad_norms=[4.0, 3.0 + 2e-5]) != ""
    row = make_row(parse_layout("tp2"), [measured(grad_norms=[4.0, 3.00002])], measured(), 1e-5)
    assert row.verdict == "same"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"losses": [2.1, 1.0]}, "loss 2.1 instead of 2 (5.00e-02 relative), no parameter departs"),
        ({"losses": [2.0, math.nan]}, "step 2: loss nan instead of 1"),
        ({"grad_norms": [4.0, 3.3]}, "step 2: gradient norm 3.3 instead of 3 (1.00e-01 relative)"),
        ({"grad_norms": [math.inf, 3.0]}, "step 1: gradient norm inf instead of 4"),
        ({"logprobs": {1: torch.tensor([0.0, -2.0, -3.1])}}, "token 2 of sequence 1 is off by 1.00e-01"),
        ({"logprobs": {0: torch.tensor([0.0, math.nan])}}, "token 1 of sequence 0 is off by nan"),
    ],
)
def test_departure_is_named(changes, expected):
    assert expected in reason(**changes)


def test_first_parameter_in_model_order_of_the_first_wrong_step_is_named():
    errors = [dict.fromkeys(NAMES, 0.0), {NAMES[0]: 0.5, NAMES[1]: 0.5, NAMES[2]: 0.5}]
    assert "step 2: model.embed_tokens.weight departs by 5.00e-01" in reason(weight_errors=errors)
    errors = [{NAMES[0]: 0.0, NAMES[1]: 0.1, NAMES[2]: 0.3}, dict.fromkeys(NAMES, 0.9)]
    found = reason(weight_errors=errors)
    assert "step 1: model.layers.2.mlp.up_proj.weight departs by 1.00e-01, first in model order of 2 of 3" in found
    assert "step 2" not in found


def test_missing_weight_departs():
    assert "embed_tokens.weight departs by inf" in reason(weight_errors=[{NAMES[0]: math.inf}] * 2)


def test_ranks_must_report_one_loss():
    row = make_row(parse_layout("tp2"), [measured(), measured(rank=1, losses=[2.0, 1.0000001])], measured(), 1e-5)
    assert row.reason == "step 2: rank 1 reports loss 1.0000001, rank 0 1"


def test_loss_that_cancels_is_compared_on_the_scale_of_a_loss():
    row = make_row(parse_layout("tp2"), [measured(losses=[1e-9, 1.0])], measured(losses=[-1e-9, 1.0]), 1e-5)
    assert row.verdict == "same"


def test_model_order():
    names = [
        "model.embed_tokens.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.layers.0.mlp.experts.2.up_proj.weight",
        "model.layers.0.mlp.experts.10.up_proj.weight",
        "model.layers.9.self_attn.q_proj.weight",
        "model.layers.10.input_layernorm.weight",
        "model.norm.weight",
        "lm_head.weight",
    ]
    assert sorted(names, key=model_order) == names


def test_weights_are_compared_by_name_whatever_their_order(tmp_path):
    weights = {"a": torch.tensor([3.0, 4.0]), "b": torch.zeros(2), "c": torch.ones(1)}
    errors, checksum = write_weights(iter(weights.items()), tmp_path / "w")
    assert errors == {"a": 0.0, "b": 0.0, "c": 0.0}
    again, same = compare_weights(iter(reversed(weights.items())), tmp_path / "w")
    assert (again, same) == (errors, checksum)
    other = {"a": torch.tensor([3.0, 4.5]), "b": torch.zeros(3), "d": torch.ones(1)}
    errors, changed = compare_weights(iter(other.items()), tmp_path / "w")
    assert errors == {"a": pytest.approx(0.1), "b": math.inf, "c": math.inf, "d": math.inf}
    assert changed != checksum


def report(*rows: Row, requested: list[str] | None = None) -> Report:
    return Report(
        "M(m)", "b", "cpu", 2, 1e-5, [reference_row(parse_layout("single"), measured()), *rows], requested or []
    )


def test_report_passes_only_if_something_was_compared_and_is_the_same():
    same, refused = Row("tp2", 2, "same"), Row("cp2", 2, "refused", "7 % 2 = 1")
    assert report(same, refused).ok
    assert "cp2: refused: 7 % 2 = 1" in str(report(same, refused))
    asked = report(same, refused, requested=["tp2", "cp2"])
    assert asked.exit_code == 1
    assert "cp2: asked for, but refused: 7 % 2 = 1" in asked.conclusion()
    assert report(refused).problems == ["no layout was compared with the single process"]
    departs = report(same, Row("dp2", 2, "departs", "loss 2 instead of 1"))
    assert "NOT THE SAME  dp2: departs: loss 2 instead of 1" in str(departs)
    assert report(Row("dp2", 2, "failed", "boom")).exit_code == 1
    assert departs["dp2"].world_size == 2
    with pytest.raises(KeyError, match="pp2: the report has single, tp2, dp2"):
        departs["pp2"]


def test_table_is_aligned_and_json_is_json():
    rows = report(Row("tp2_dp2_cp2_pp2_vpp2_sp", 16, "refused", "x"), Row("tp2", 2, "departs", "y", [math.nan], [1.0]))
    lines = rows.table().splitlines()
    assert lines[4].startswith("layout")
    assert lines[4].endswith("verdict")
    assert lines[-1].endswith("DEPARTS")
    assert lines[-1].index("DEPARTS") == lines[4].index("verdict")
    loaded = json.loads(rows.to_json())
    assert loaded["ok"] is False
    assert loaded["rows"][2]["losses"] == ["nan"]
