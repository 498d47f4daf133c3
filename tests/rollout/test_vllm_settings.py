"""Which devices an engine gets."""

import pytest

from lightning_megatron_rl.rollout.vllm_settings import engine_devices


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
