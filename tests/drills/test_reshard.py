"""The resharding matrix, in its short form: a checkpoint resumes in other layouts than the one that saved it."""

import json

import pytest

from lightning_megatron_rl.models.families.registry import FAMILIES as CARRIED
from tests.drills.reshard import FAMILIES, difference, kept_lines, reshard
from tests.tiny_models import tiny_config
from tests.training import Run


@pytest.mark.slow
def test_two_layouts_into_each_other(worker_pool, tmp_path):
    found = reshard(worker_pool, "qwen3", ["tp2_sp", "pp2_vpp2"], tmp_path)
    assert found["problems"] == []
    assert found["worst"] > 0.0, "the undivided process sums in another order"
    assert found["largest_step"] > 100 * found["worst"], "the run did not move enough for a difference to mean anything"


def test_expert_biases_are_summed_once(worker_pool, tmp_path):
    """Fails without `sum_expert_biases_once`: the biases' gradients are twice what they are on one process."""
    assert reshard(worker_pool, "gpt_oss", ["tp2_etp1_sp"], tmp_path)["problems"] == []


@pytest.mark.slow
@pytest.mark.deadline(600)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_in_every_layout(worker_pool, tmp_path, family):
    assert reshard(worker_pool, family, FAMILIES[family], tmp_path)["problems"] == []


def test_every_family_is_in_the_matrix():
    assert {tiny_config(family).model_type for family in FAMILIES} == CARRIED.keys()


def test_report_keeps_families_of_the_same_programs_only(tmp_path):
    path, lines = tmp_path / "report.json", [{"family": "qwen3"}]
    now = {"versions": {"torch": "2"}, "date": "2026-01-02"}
    assert kept_lines(path, now) == []
    path.write_text(json.dumps({**now, "date": "2026-01-01", "families": lines}))
    assert kept_lines(path, now) == lines
    assert kept_lines(path, {**now, "versions": {"torch": "3"}}) == []


def test_what_differs_is_measured():
    import torch

    logged = {"policy/loss": 2.0, "policy/grad_norm": 1.0, "policy/entropy": 4.0}
    reference = Run([logged], {"a": torch.ones(4)})
    assert difference(Run([logged], {"a": torch.ones(4)}), reference) == 0.0
    assert difference(Run([{**logged, "policy/loss": 2.5}], {"a": torch.ones(4)}), reference) == 0.25
    assert difference(Run([logged], {"a": torch.full((4,), 1.5)}), reference) == 0.5
