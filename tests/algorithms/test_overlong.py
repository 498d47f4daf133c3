import pytest
import torch

from lightning_megatron_rl.algorithms.overlong import overlong_penalty


def test_soft_penalty_by_hand():
    lengths = torch.tensor([0, 80, 81, 90, 99, 100, 120])
    expected = [0, 0, -0.05, -0.5, -0.95, -1, -1]  # 0 up to 100 - 20, then a straight line to -1 at the limit
    assert overlong_penalty(lengths, max_length=100, buffer=0.2).tolist() == pytest.approx(expected, abs=1e-14)
    half = overlong_penalty(lengths, max_length=100, buffer=0.2, penalty=0.5)
    assert half.tolist() == pytest.approx([x / 2 for x in expected], abs=1e-14)


def test_the_papers_numbers():
    """L_max = 20480 with a cache of 4096: at 18432, in its middle, half of the penalty."""
    lengths = torch.tensor([16384, 18432, 20480])
    assert overlong_penalty(lengths, max_length=20480, buffer=0.2).tolist() == pytest.approx([0, -0.5, -1], abs=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"buffer": 0.0}, r"buffer=0.0 must be in \(0, 1\]"), ({"buffer": 0.2, "penalty": -1.0}, "penalty=-1.0")],
)
def test_bad_settings_are_refused(options: dict[str, float], message: str):
    with pytest.raises(ValueError, match=message):
        overlong_penalty(torch.zeros(1), max_length=10, **options)
