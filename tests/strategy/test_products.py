"""What is refused about TF32 before anything is multiplied; tests/gpu/test_precision.py measures the products."""

import os
import subprocess
import sys

import pytest
import torch

from lightning_megatron_rl.strategy.products import (
    TF32_OVERRIDE,
    TORCH_TF32_OVERRIDE,
    asks_for_tf32,
    check_products,
    choose_products,
)

CUDA = torch.device("cuda", 0)  # only its type is looked at


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch):
    """Neither variable is set, and torch's switches are put back."""
    monkeypatch.setenv(TF32_OVERRIDE, "")  # so that it is taken away again, whoever sets it
    monkeypatch.delenv(TF32_OVERRIDE)
    monkeypatch.delenv(TORCH_TF32_OVERRIDE, raising=False)
    flags = torch.backends.cuda.matmul
    sums = flags.allow_bf16_reduced_precision_reduction, flags.allow_fp16_reduced_precision_reduction
    yield
    torch.set_float32_matmul_precision("highest")
    flags.allow_bf16_reduced_precision_reduction, flags.allow_fp16_reduced_precision_reduction = sums


def test_fp32_tells_cublas_before_its_first_product():
    choose_products("32-true", CUDA)
    assert os.environ[TF32_OVERRIDE] == "0"


def test_sums_of_16_bit_products_are_kept_in_fp32():
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    choose_products("bf16-mixed", CUDA)
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    assert not torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    assert TF32_OVERRIDE not in os.environ


def test_nothing_changes_on_a_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(TORCH_TF32_OVERRIDE, "1")
    choose_products("32-true", torch.device("cpu"))
    check_products(torch.device("cpu"), transformer_engine=False)
    assert TF32_OVERRIDE not in os.environ


def test_torchs_switch_is_obeyed():
    torch.set_float32_matmul_precision("high")
    assert asks_for_tf32()
    choose_products("32-true", CUDA)
    assert TF32_OVERRIDE not in os.environ


SWITCHES = [
    ("", False),
    ("torch.set_float32_matmul_precision('medium')", True),
    ("torch.backends.cuda.matmul.allow_tf32 = True", True),
    ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", True),
    ("torch.backends.fp32_precision = 'tf32'", True),
    ("torch.backends.fp32_precision = 'tf32'; torch.backends.cuda.matmul.fp32_precision = 'ieee'", False),
]
IN_CHILDREN = """
import os, sys, torch
from lightning_megatron_rl.strategy.products import asks_for_tf32
for lines in sys.argv[1:]:
    if os.fork() == 0:
        exec(lines)
        print(asks_for_tf32(), flush=True)
        os._exit(0)
    os.wait()
"""


def test_every_switch_of_torch_counts():
    """Each in a process of its own: torch refuses to read one interface after the other was written."""
    lines = [line for line, _ in SWITCHES]
    command = [sys.executable, "-c", IN_CHILDREN, *lines]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == [str(asked) for _, asked in SWITCHES]


@pytest.mark.parametrize(
    ("variable", "value", "asked", "words"),
    [
        (TF32_OVERRIDE, "1", False, r"NVIDIA_TF32_OVERRIDE=1 makes every fp32 product TF32 .* unset it"),
        (TF32_OVERRIDE, "0", True, r"NVIDIA_TF32_OVERRIDE=0 forbids it: unset"),
        (TORCH_TF32_OVERRIDE, "1", True, r"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 asks for TF32 .* unset it"),
    ],
)
def test_environment_against_the_config_is_refused(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, asked: bool, words: str
):
    monkeypatch.setenv(variable, value)
    torch.set_float32_matmul_precision("high" if asked else "highest")  # torch sets it so with its own variable
    with pytest.raises(ValueError, match=words):
        choose_products("32-true", CUDA)
    choose_products("bf16-mixed", CUDA)  # no product is in fp32
