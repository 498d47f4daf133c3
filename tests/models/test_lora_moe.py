"""Adapters of experts: what is exported, merged or for PEFT, computes what the model with adapters computes."""

import json
from dataclasses import replace

import pytest
import torch

from lightning_megatron_rl.models.layers.lora import LoRASettings
from tests.models.lora_runs import adapter_error, adapter_gradients, adapter_logprobs, initial_adapter
from tests.models.test_lora import (
    assert_adapters_are_exported,
    assert_gradients_of_peft,
)

SETTINGS = LoRASettings(rank=4, alpha=6)
LATENT = ["linear_q_proj", "linear_kv_up_proj", "linear_proj", "linear_fc1", "linear_fc2"]  # of DeepSeek-V3


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3_plain", "gpt_oss"])
def test_adapters_off_merged_and_in_peft(worker_pool, checkpoint, sequences, tmp_path, family):
    """`deepseek_v3_plain` has dense layers and shared experts as well, which PEFT must not take for experts."""
    directory = checkpoint(family)
    settings = replace(SETTINGS, target_modules=LATENT) if family == "deepseek_v3_plain" else SETTINGS
    options = {"config_overrides": {"moe_router_bias_update_rate": 0.0}, "world_size": 1}
    [found] = worker_pool.run(adapter_logprobs, directory, sequences, settings, str(tmp_path), **options)
    assert_adapters_are_exported(found, directory, tmp_path, sequences)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert "model.layers.3.mlp.experts.down_proj" in config["target_parameters"]


def test_gradients_equal_peft_and_autograd(worker_pool, checkpoint, sequences, tmp_path):
    directory = checkpoint("qwen3_moe")
    options = {"target": str(tmp_path / "adapter"), "random": True, "world_size": 1}
    without_balance_loss = {"moe_aux_loss_coeff": 0.0}
    [found] = worker_pool.run(
        adapter_gradients, directory, sequences, SETTINGS, config_overrides=without_balance_loss, **options
    )
    assert any(".experts.base_layer.lora_A" in name and gradient.norm() > 0 for name, gradient in found.items())
    assert_gradients_of_peft(found, directory, tmp_path / "adapter", sequences)


def test_recompute_does_not_lose_gradients(worker_pool, checkpoint, sequences):
    settings = LoRASettings(rank=4, target_modules=["*.mlp.experts.*"])
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    plain, again = (
        worker_pool.run(
            adapter_gradients,
            checkpoint("qwen3_moe"),
            sequences,
            settings,
            random=True,
            config_overrides={"moe_aux_loss_coeff": 0.0, **options},
            world_size=1,
        )[0]
        for options in ({}, recompute)
    )
    assert plain.keys() == again.keys()
    for name, gradient in plain.items():
        assert gradient.norm() > 0, name
        assert torch.allclose(gradient, again[name], rtol=1e-5, atol=1e-6 * gradient.abs().max().item()), name


@pytest.mark.parametrize(("tp", "pp", "ep"), [(1, 1, 2), (2, 1, 1), (1, 2, 1)])
def test_initial_values_do_not_depend_on_the_layout(worker_pool, checkpoint, tp, pp, ep):
    """Experts are counted over the whole model, in the seeds of A and in what is exported."""
    directory = checkpoint("qwen3_moe")
    [alone] = worker_pool.run(initial_adapter, directory, SETTINGS, 1, 1, world_size=1)
    a = alone["model.layers.1.mlp.experts.lora_A.weight"]  # of linear_fc2, [4 experts x rank 4, 32]
    assert len({tuple(row.tolist()) for row in a}) == len(a) == 16
    assert 0.95 / 32**0.5 < a.abs().max() <= 1 / 32**0.5
    for rank in worker_pool.run(initial_adapter, directory, SETTINGS, tp, pp, ep=ep, world_size=2):
        assert rank.keys() == alone.keys()
        assert all(torch.equal(rank[name], tensor) for name, tensor in alone.items())


def test_patterns_count_experts_over_the_whole_model(worker_pool, checkpoint):
    """Under EP2 expert 3 is the second of its rank; PEFT has zeros for the others."""
    settings = LoRASettings(rank=4, target_modules=["linear_proj", "*.layers.2.*.local_experts.3.linear_fc1"])
    for ep in (1, 2):
        for found in worker_pool.run(initial_adapter, checkpoint("qwen3_moe"), settings, 1, 1, ep=ep, world_size=ep):
            [name] = [name for name in found if "experts" in name and "lora_A" in name]
            assert name == "model.layers.2.mlp.experts.lora_A.weight"
            assert found[name].abs().sum(-1).count_nonzero() == found[name][12:].abs().sum(-1).count_nonzero() == 4


def test_rank_with_nothing_to_train_is_refused(worker_pool, checkpoint):
    settings = LoRASettings(rank=4, target_modules=["*.local_experts.3.*"])
    for message in worker_pool.run(adapter_error, checkpoint("qwen3_moe"), settings, ep=2, world_size=2):
        assert "adapts no layer of some pipeline stage or expert-parallel rank" in message


def test_rank_that_expert_tensor_parallel_ranks_cannot_share_is_refused(worker_pool, checkpoint):
    settings = LoRASettings(rank=3)
    for message in worker_pool.run(adapter_error, checkpoint("qwen3_moe"), settings, etp=2, world_size=2):
        assert message.startswith(
            "train.lora.rank=3 is split over expert_tensor_parallel_size=2 in experts (decoder.layers.0"
        )
        assert "3 % 2 = 1" in message
