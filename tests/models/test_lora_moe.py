"""Adapters of experts: what is exported, merged or for PEFT, computes what the model with adapters computes."""

import json
from dataclasses import replace

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from lightning_megatron_rl.models.lora import LoRASettings
from lightning_megatron_rl.models.peft_files import merge_adapter
from tests.models.conftest import hf_logprobs
from tests.models.lora_runs import adapter_logprobs
from tests.models.test_lora import MERGED, TRANSFORMERS, largest_difference

SETTINGS = LoRASettings(rank=4, alpha=6)
LATENT = ["linear_q_proj", "linear_kv_up_proj", "linear_proj", "linear_fc1", "linear_fc2"]  # of DeepSeek-V3


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3_plain", "gpt_oss"])
def test_adapters_off_merged_and_in_peft(worker_pool, checkpoint, sequences, tmp_path, family):
    """`deepseek_v3_plain` has dense layers and shared experts as well, which PEFT must not take for experts."""
    directory = checkpoint(family)
    settings = replace(SETTINGS, target_modules=LATENT) if family == "deepseek_v3_plain" else SETTINGS
    options = {"config_overrides": {"moe_router_bias_update_rate": 0.0}, "world_size": 1}
    [found] = worker_pool.run(adapter_logprobs, directory, sequences, settings, str(tmp_path), **options)
    assert largest_difference(found["start"], found["base"]) == 0.0, "B is zero"
    assert largest_difference(found["off"], found["base"]) == 0.0
    assert largest_difference(found["lora"], found["base"]) > 0.1, "the adapters do nothing: this test shows nothing"
    assert largest_difference(found["lora"], found["merged"]) <= MERGED
    assert found["unchanged"], "an export changed the training weights"
    assert largest_difference(found["after"], found["lora"]) == 0.0

    assert largest_difference(found["lora"], hf_logprobs(tmp_path / "merged", sequences)) <= TRANSFORMERS
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    print(family, largest_difference(found["lora"], hf_logprobs(adapted, sequences)))
    assert largest_difference(found["lora"], hf_logprobs(adapted, sequences)) <= TRANSFORMERS
    merged = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    merge_adapter(merged, tmp_path / "adapter")
    assert largest_difference(found["lora"], hf_logprobs(merged, sequences)) <= TRANSFORMERS
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert "model.layers.3.mlp.experts.down_proj" in config["target_parameters"]
