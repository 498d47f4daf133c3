"""Conversions as functions that a warm worker runs: importing Megatron costs ten seconds in a process of its own."""

import contextlib
import io
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from tests.distributed import WorkerPool


def command(arguments: list[str]) -> tuple[int, str]:
    """Run `lightning-megatron-rl convert`; return its exit code and all that it printed."""
    from lightning_megatron_rl.convert.command import main

    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        try:
            code = main(arguments)
        except SystemExit as exited:
            code = int(exited.code or 0)
    return code, shown.getvalue()


def convert(pool: WorkerPool, *arguments: Any) -> tuple[int, str]:
    """Run the command in a worker."""
    given = [str(argument) for argument in arguments]
    return pool.run(command, given, world_size=1, init_process_group=False)[0]


def must_convert(pool: WorkerPool, *arguments: Any) -> str:
    """Run the command in a worker and return what it printed, if it succeeded."""
    code, shown = convert(pool, *arguments)
    assert code == 0, shown
    return shown


def tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors in a directory's safetensors files."""
    found: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stream:
            for name in stream.keys():  # noqa: SIM118 (no mapping: it has no __iter__)
                assert name not in found, name
                found[name] = stream.get_tensor(name)
    return found


def assert_same_tensors(have: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Bit for bit."""
    assert have.keys() == want.keys(), have.keys() ^ want.keys()
    for name, tensor in want.items():
        assert have[name].dtype == tensor.dtype, name
        assert torch.equal(have[name], tensor), name
