"""Weights that are NaN or infinite are found, whatever their type."""

import pytest
import torch

from lightning_megatron_rl.utilities.finite import describe_nonfinite, nonfinite_names, not_finite


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_one_number_among_many_is_found(dtype: torch.dtype, number: float):
    bad = torch.ones(7, 5, dtype=dtype)
    bad[3, 2] = number
    tensors = {"a": torch.ones(3, dtype=dtype), "b": bad, "c": torch.full((2,), torch.finfo(dtype).max, dtype=dtype)}
    assert nonfinite_names(tensors.items()) == ["b"]


def test_what_has_no_numbers_is_left_out():
    tensors = {"empty": torch.empty(0), "whole": torch.tensor([1]), "meta": torch.empty(2, device="meta")}
    assert nonfinite_names(tensors.items()) == []
    assert nonfinite_names([]) == []


def test_message():
    assert describe_nonfinite(torch.tensor([1.0, torch.nan, -torch.inf])) == "1 NaN and 1 infinite of 3 numbers"
    assert not_finite(list("abcde")).startswith("5 loaded weights are not finite: a; b; c and 2 more. Every loss")
