import pytest

from lightning_megatron_rl.algorithms.schedules import LinearSchedule


def test_straight_line_then_constant():
    schedule = LinearSchedule(final=0.5, num_steps=4)
    assert [schedule.at(step, start=1.5) for step in (0, 1, 2, 4, 9)] == [1.5, 1.25, 1.0, 0.5, 0.5]


def test_no_steps_are_refused():
    with pytest.raises(ValueError, match="num_steps=0 must be at least 1"):
        LinearSchedule(num_steps=0)
