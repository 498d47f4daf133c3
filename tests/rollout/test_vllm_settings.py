"""Which devices an engine gets, and which environment."""

from importlib.metadata import EntryPoint

import pytest

from lightning_megatron_rl.rollout.vllm import settings as vllm_settings
from lightning_megatron_rl.rollout.vllm.settings import engine_devices, engine_environment

RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


def test_own_device_and_those_behind_it():
    assert engine_devices(None, 1, own=3, count=4) == [3]
    assert engine_devices(None, 2, own=2, count=4) == [2, 3]
    assert engine_devices([1, 0], 2, own=2, count=4) == [1, 0]


@pytest.mark.parametrize(
    ("wanted", "size", "message"),
    [
        (None, 2, r"wants devices \[3, 4\] .* there are 4: \[4\]"),
        ([0], 2, r"devices=\[0\]: tensor_parallel_size=2"),
        ([1, 1], 2, r"devices=\[1, 1\]"),
        ([-1], 1, r"\[-1\] do\(es\) not exist"),
    ],
)
def test_devices_that_cannot_be(wanted, size, message):
    with pytest.raises(ValueError, match=message):
        engine_devices(wanted, size, own=3, count=4)


@pytest.mark.parametrize(
    ("device", "architecture", "expected"),
    [
        ("cuda", "Qwen3MoeForCausalLM", "1"),
        ("cuda", "Qwen3ForCausalLM", None),  # vLLM's own choice
        ("cuda", "MixtralForCausalLM", None),  # not tested
        ("cpu", "Qwen3MoeForCausalLM", None),
    ],
)
def test_mixtures_that_were_tested_get_the_newer_runner(device, architecture, expected, monkeypatch):
    monkeypatch.delenv(RUNNER, raising=False)
    assert engine_environment(device, [architecture], eager=True).get(RUNNER) == expected


@pytest.mark.parametrize(("size", "expected"), [(4, "1"), (8, None)])
def test_runner_of_more_gpus_than_were_tested_is_vllms_choice(size, expected, monkeypatch):
    monkeypatch.delenv(RUNNER, raising=False)
    environment = engine_environment("cuda", ["Qwen3MoeForCausalLM"], eager=True, tensor_parallel_size=size)
    assert environment.get(RUNNER) == expected


def test_runner_that_somebody_chose_is_kept(monkeypatch):
    monkeypatch.setenv(RUNNER, "0")
    assert engine_environment("cuda", ["Qwen3MoeForCausalLM"], eager=True)[RUNNER] == "0"


def test_newer_runner_is_not_asked_for_where_it_would_refuse(monkeypatch):
    monkeypatch.delenv(RUNNER, raising=False)
    plugin = EntryPoint("mine", "somewhere:Processor", "vllm.logits_processors")
    monkeypatch.setattr(vllm_settings, "entry_points", lambda group: [plugin] if group == plugin.group else [])
    assert RUNNER not in engine_environment("cuda", ["Qwen3MoeForCausalLM"], eager=True)
