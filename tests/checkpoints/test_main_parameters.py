"""Halves of main parameters: put together and taken apart; tests/gpu tests them in Transformer Engine's Adam."""

import struct

import pytest
import torch

from lightning_megatron_rl.checkpoints.main_parameters import join, split


def number(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


@pytest.mark.parametrize(
    ("bits", "upper", "remainder", "joined"),
    [
        (0x3F800000, 0x3F80, 0, 0x3F800000),
        (0x3F801234, 0x3F80, 0x1234, 0x3F801234),
        (0x3F80FFFF, 0x3F81, -1, 0x3F80FFFF),  # rounded up, so it was one less
        (0xBF80FFFF, 0xBF81, -1, 0xBF80FFFF),  # away from zero, too
        (0x3F818000, 0x3F82, -0x8000, 0x3F818000),  # halfway, rounded to the even one above
        (0x3F808000, 0x3F80, 0x7FFF, 0x3F807FFF),  # halfway, to the one below: one bit less
        (0x00000001, 0x0000, 1, 0x00000001),
        (0x80000000, 0x8000, 0, 0x80000000),
    ],
)
def test_numbers_worked_out_by_hand(bits, upper, remainder, joined):
    whole = torch.tensor([number(bits)])
    parameter = whole.bfloat16()
    assert parameter.view(torch.int16).item() & 0xFFFF == upper
    half = split(whole, parameter)
    assert half.item() == remainder
    assert parameter.view(torch.int16).item() & 0xFFFF == upper, "what was rounded before stays"
    assert join(parameter, half).view(torch.int32).item() & 0xFFFFFFFF == joined


def test_a_round_trip_is_exact_but_for_numbers_halfway():
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(2**20, generator=generator) * torch.logspace(-30, 30, 2**20)
    parameter = whole.bfloat16()
    before = parameter.clone()
    back = join(parameter, split(whole, parameter))
    assert torch.equal(parameter, before)
    low = whole.view(torch.int32) & 0xFFFF
    assert torch.equal(back[low != 0x8000], whole[low != 0x8000])
    assert (back - whole).abs().max() <= whole.abs().max() * 2**-23
    assert torch.equal(join(parameter, split(back, parameter)), back), "a second one changes nothing"


def test_a_parameter_of_other_numbers_becomes_their_rounding():
    whole, parameter = torch.tensor([1.0, -2.5, 3.001]), torch.tensor([0.0, 7.0, 3.0]).bfloat16()
    half = split(whole, parameter)
    assert torch.equal(parameter, whole.bfloat16())
    assert torch.equal(join(parameter, half), whole)
