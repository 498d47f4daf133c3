"""What counts as a difference, and how it is named; numbers made by hand."""

import json
import math
from typing import Any

import pytest
import torch

from lightning_megatron_rl.verify.compare import blurred_parameters, largest_noise, make_row, model_order, reference_row
from lightning_megatron_rl.verify.job import Measurement, compare_tensors, write_tensors
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
        "gradient_errors": [dict.fromkeys(NAMES, 0.0)] * 2,
        "weight_norms": [dict.fromkeys(NAMES, 1.0)] * 2,
        "movements": [dict.fromkeys(NAMES, 0.1)] * 2,
        "gradient_norms": [dict.fromkeys(NAMES, 2.0)] * 2,
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


@pytest.mark.parametrize(
    ("error", "noise", "found"),
    [
        (1.9e-5, 0.0, False),  # a gradient of norm 2, tolerance 1e-5
        (2.1e-5, 0.0, True),
        (2.1e-5, 3e-6, False),  # ten times what rounding makes of it
        (1e-3, 3e-6, True),
        (1e-3, 2e-4, False),  # a gradient that is rounding noise
        (math.nan, 2e-4, True),
        (math.inf, 0.0, True),
    ],
)
def test_gradient_is_held_to_its_own_noise(error, noise, found):
    errors = [{**dict.fromkeys(NAMES, 0.0), NAMES[1]: error}, dict.fromkeys(NAMES, 0.0)]
    noises = measured(gradient_errors=[dict.fromkeys(NAMES, noise)] * 2)
    row = make_row(parse_layout("tp2"), [measured(gradient_errors=errors)], measured(), 1e-5, noises)
    assert (f"step 1: the gradient of {NAMES[1]} departs by" in row.reason) == found
    on_another = make_row(parse_layout("tp2"), [measured(), measured(gradient_errors=errors)], measured(), 1e-5, noises)
    assert ("on rank 1" in on_another.reason) == found


def test_noise_is_the_largest_of_several_runs():
    """Of each number that of the run in which it moved most."""
    errors = [[dict.fromkeys(NAMES, value), dict.fromkeys(NAMES, 0.0)] for value in (1e-7, 4e-5)]
    weights = [[dict.fromkeys(NAMES, value)] * 2 for value in (3e-8, 1e-8)]
    runs = [
        measured(gradient_errors=error, weight_errors=weight, losses=[2.0, 1.0 + loss], grad_norms=[4.0, 3.0 - loss])
        for error, weight, loss in zip(errors, weights, (-3e-5, 1e-5), strict=True)
    ]
    noise = largest_noise(measured(), runs)
    assert noise.gradient_errors == errors[1]
    assert noise.weight_errors == weights[0]
    assert noise.losses == [2.0, 1.0 - 3e-5]
    assert noise.grad_norms == [4.0, 3.0 + 3e-5]


@pytest.mark.parametrize(("name", "says"), [("losses", "step 2: loss"), ("grad_norms", "step 2: gradient norm")])
def test_loss_and_norm_are_held_to_their_noise(name, says):
    theirs = measured()
    first, value = getattr(theirs, name)
    mine = [measured(**{name: [first, value + 2e-4]})]
    for moved, found in ((0.0, True), (1.9e-5, True), (2.1e-5, False)):
        row = make_row(parse_layout("tp2"), mine, theirs, 1e-5, measured(**{name: [first, value - moved]}))
        assert (says in row.reason) == found


def test_gradient_that_is_zero_is_held_to_the_norm_of_all():
    """Experts without tokens: what is not exactly zero there is a millionth of a rounding error, or a fault."""
    norms = [{NAMES[0]: 2.0, NAMES[1]: 0.0, NAMES[2]: 2.0}] * 2
    reference = measured(gradient_norms=norms)
    for error, verdict in ((0.0, "same"), (1e-9, "same"), (1e-6, "departs")):
        errors = [{**dict.fromkeys(NAMES, 0.0), NAMES[1]: error}] * 2
        assert make_row(parse_layout("ep2"), [measured(gradient_errors=errors)], reference, 1e-5).verdict == verdict


def test_every_update_of_a_step_is_compared():
    gradients = [dict.fromkeys(NAMES, 2.0)] * 4
    errors = [dict.fromkeys(NAMES, 0.0)] * 3 + [{**dict.fromkeys(NAMES, 0.0), NAMES[2]: 1.0}]
    reference = measured(gradient_norms=gradients)
    row = make_row(parse_layout("tp2"), [measured(gradient_errors=errors)], reference, 1e-5)
    assert f"step 2: the gradient of {NAMES[2]} departs by 5.00e-01" in row.reason


@pytest.mark.parametrize(
    ("error", "noise", "found"),
    [
        (4e-7, 1e-7, False),  # moved by 0.1: 4 times the noise; with the tolerance that would be 1e-6
        (2e-6, 1e-7, True),  # 2e-5 of the way, and a fifth of the tolerance of the weight itself
        (2e-6, 1e-6, False),
        (2e-5, 1e-4, True),  # whatever the noise is
    ],
)
def test_weights_are_held_to_their_way(error, noise, found):
    errors = [{**dict.fromkeys(NAMES, 0.0), NAMES[1]: error}] * 2
    noises = measured(weight_errors=[dict.fromkeys(NAMES, noise)] * 2)
    row = make_row(parse_layout("tp2"), [measured(weight_errors=errors)], measured(), 1e-5, noises)
    assert (f"step 1: {NAMES[1]} departs by" in row.reason) == found


def test_gradients_of_mere_noise_are_told():
    noise = measured(gradient_errors=[{NAMES[0]: 1e-5, NAMES[1]: 1.0, NAMES[2]: 3e-4}] * 2)
    assert blurred_parameters(measured(), noise) == NAMES[1:]  # 10 x 3e-4 of 2 is more than 0.1 %
    found = report(Row("tp2", 2, "same"))
    found.blurred = NAMES[1:]
    assert f"rounding would hide an error of 0.1 % in the gradient of {NAMES[1]}, {NAMES[2]}" in found.conclusion()


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


def test_tensors_are_compared_by_name_whatever_their_order(tmp_path):
    tensors = {"a": torch.tensor([3.0, 4.0]), "b": torch.zeros(2), "c": torch.ones(1)}
    norms, checksum = write_tensors(iter(tensors.items()), tmp_path / "w")
    assert norms == {"a": 5.0, "b": 0.0, "c": 1.0}
    again, same = compare_tensors(iter(reversed(tensors.items())), tmp_path / "w")
    assert (again, same) == (dict.fromkeys(tensors, 0.0), checksum)
    other = {"a": torch.tensor([3.0, 4.5]), "b": torch.zeros(3), "d": torch.ones(1)}
    errors, changed = compare_tensors(iter(other.items()), tmp_path / "w")
    assert errors == {"a": 0.5, "b": math.inf, "c": math.inf, "d": math.inf}
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
