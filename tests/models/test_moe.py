"""Router settings: what is in force, what is refused and why; the formulas of balance by hand."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_megatron_rl.models.layers.moe import (
    MoESettings,
    balance_loss,
    balance_metrics,
    resolve_moe_settings,
    z_loss,
)
from tests.tiny_models import tiny_config


def resolve(settings: MoESettings | None, family: str = "qwen3_moe", **options: Any) -> MoESettings | None:
    options = {"model_config": {}, "default_aux_loss_coeff": 0.0, "has_old_logprobs": True, **options}
    return resolve_moe_settings(settings, tiny_config(family), options.pop("model_config"), **options)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_what_is_not_said_comes_from_the_method_and_not_from_the_model(family):
    config = tiny_config(family)
    assert "router_aux_loss_coef" not in config.to_dict() or config.router_aux_loss_coef > 0
    assert resolve(None, family) == MoESettings(aux_loss_coeff=0.0)
    assert resolve(None, family, default_aux_loss_coeff=0.01) == MoESettings(aux_loss_coeff=0.01)
    assert resolve(MoESettings(aux_loss_coeff=0.5), family).aux_loss_coeff == 0.5
    assert resolve(MoESettings(freeze_router=True), family, default_aux_loss_coeff=0.01).aux_loss_coeff == 0.0


def test_megatrons_own_losses_are_off_whatever_ours_are():
    fields = MoESettings(aux_loss_coeff=0.5, z_loss_coeff=0.5).megatron_fields()
    assert fields["moe_aux_loss_coeff"] == 0.0
    assert fields["moe_z_loss_coeff"] is None
    assert fields["moe_router_load_balancing_type"] == "none"
    assert fields["moe_router_dtype"] == "fp32"
    assert "moe_enable_routing_replay" not in fields


def test_replay_turns_the_fused_top_k_off_whoever_turned_it_on():
    """Trap 16: with it Megatron would choose anew, without a word; a provider of Megatron-Bridge's may have set it."""
    fields = MoESettings(aux_loss_coeff=0.0, router_replay="R2").megatron_fields()
    assert fields["moe_router_fusion"] is False
    assert fields["moe_enable_routing_replay"] is True
    assert "moe_router_fusion" not in MoESettings(aux_loss_coeff=0.0).megatron_fields()


def test_table_shows_everything_in_force():
    settings = MoESettings(aux_loss_coeff=0.01, freeze_router=True, router_dtype=None, router_replay="R2")
    text = str(settings.describe(has_expert_bias=True))
    for part in ("aux_loss_coeff 0.01", "z_loss_coeff 0", "frozen, in the precision", "bias frozen", "replay R2"):
        assert part in text
    moving = replace(settings, expert_bias_update_rate=1e-3)
    assert "updated by 0.001" in str(moving.describe(has_expert_bias=True))
    assert "no expert bias" in str(moving.describe(has_expert_bias=False))
    assert "frozen" in str(MoESettings(aux_loss_coeff=0.0).describe(has_expert_bias=False, learns=False))


def test_dense_model_has_no_settings_and_takes_none():
    assert resolve(None, "qwen3") is None
    assert resolve(MoESettings(), "qwen3") is None
    assert resolve(MoESettings(aux_loss_coeff=0.0), "qwen3", default_aux_loss_coeff=0.01) is None


@pytest.mark.parametrize(
    "settings",
    [
        {"aux_loss_coeff": 0.01},
        {"z_loss_coeff": 0.001},
        {"freeze_router": True},
        {"expert_bias_update_rate": 0.001},
        {"router_replay": "R2"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_router_settings_of_a_dense_model_are_refused(settings):
    name = next(iter(settings))
    with pytest.raises(ValueError, match=rf"moe\.{name}=.*qwen3 model is dense.*Remove moe\.{name}"):
        resolve(MoESettings(**settings), "qwen3")


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({}, {"model_config": {"moe_z_loss_coeff": 0.1}}, r"moe_z_loss_coeff=0\.1: .* set train\.moe\.z_loss_coeff"),
        ({}, {"model_config": {"moe_router_dtype": "fp64"}}, r"set train\.moe\.router_dtype"),
        ({"router_replay": "R2"}, {"has_old_logprobs": False}, "no pass for old log-probs"),
        ({"router_replay": "R2"}, {"model_config": {"moe_router_fusion": True}}, "ignore the replay in silence"),
        ({"router_replay": "R2"}, {"model_config": {"overlap_moe_expert_parallel_comm": True}}, "take turns"),
        ({"freeze_router": True, "aux_loss_coeff": 0.1}, {}, r"Set aux_loss_coeff=0 or freeze_router=False"),
        ({"freeze_router": True, "z_loss_coeff": 0.1}, {}, r"Set z_loss_coeff=0 or freeze_router=False"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, options, message):
    with pytest.raises(ValueError, match=message):
        resolve(MoESettings(**settings), **options)


def test_fused_top_k_is_fine_without_replay():
    assert resolve(None, model_config={"moe_router_fusion": True}) is not None


@pytest.mark.parametrize("name", ["aux_loss_coeff", "z_loss_coeff", "expert_bias_update_rate"])
def test_negative_coefficients_are_refused(name):
    with pytest.raises(ValueError, match=rf"moe\.{name}=-0\.1"):
        MoESettings(**{name: -0.1})


def test_balance_loss_by_hand():
    """Two tokens, both to expert 0 of two: f = (1, 0), P = (0.75, 0.25), loss 2 * 0.75."""
    assert balance_loss(torch.tensor([2.0, 0.0]), torch.tensor([1.5, 0.5]), 1).item() == 1.5
    assert balance_loss(torch.full((4,), 3.0), torch.full((4,), 1.5), 2).item() == 1.0, "even load"
    assert balance_loss(torch.zeros(4), torch.zeros(4), 2).item() == 0.0, "no tokens"


def test_parts_of_a_micro_batch_add_up():
    """Ranks share a micro-batch: counts of all of it with scores of a part give the part's share."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(10, 4, generator=generator)
    chosen = torch.tensor([4.0, 7.0, 1.0, 8.0])
    whole = balance_loss(chosen, scores.sum(0), 2)
    parts = [balance_loss(chosen, part.sum(0), 2) for part in scores.split([3, 0, 7])]
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-6)  # reassociated fp32 sums


def test_z_loss_leaves_padding_out():
    logits = torch.tensor([[0.0, 0.0], [100.0, 0.0]])
    expected = torch.log(torch.tensor(2.0)).square().item()
    assert z_loss(logits, torch.tensor([True, False])).item() == pytest.approx(expected)


def test_metrics_are_means_over_layers_with_experts():
    """Loads 3:1 and 2:2 are 1.5 and 1 times the mean; a dense layer does not count."""
    routed = torch.tensor([[0.0, 0.0], [3.0, 1.0], [2.0, 2.0]])
    scores = torch.tensor([[0.0, 0.0], [2.0, 2.0], [2.0, 2.0]])
    metrics = balance_metrics(routed, routed, scores, 1)
    assert metrics == {"moe/aux_loss": 1.0, "moe/load_imbalance": 1.25}
    assert balance_metrics(*torch.zeros(3, 2, 4), 1) == {}
