"""Functions that the tests of value heads run on gloo workers."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.models.workers import CPU, start_megatron


def build(directory: Path | str, *, sp: bool, **options: Any) -> Any:
    """The `ValueModel` of `directory` and its chunks."""
    from lightning_megatron_rl.models.value_model import ValueModel

    model = ValueModel(str(directory))
    return model, model.build_chunks(
        params_dtype=torch.float32, layer_backend="auto", device=CPU, sequence_parallel=sp, **options
    )


def exported(directory: Path | str, tp: int, pp: int, vpp: int | None = None) -> dict[str, Tensor]:
    """What every rank gets from `export_weights`."""
    start_megatron(tp, pp, vpp)
    model, chunks = build(directory, sp=tp > 1)
    return {name: tensor.clone() for name, tensor in model.export_weights(chunks)}


def save(directory: Path | str, target: Path) -> None:
    """Load a checkpoint and save it as a classifier."""
    start_megatron()
    model, chunks = build(directory, sp=False)
    model.save_pretrained(chunks, target)


def head_of_rank(directory: Path | str) -> tuple[bool, int, Tensor | None]:
    """Under TP 2: whether gradients of the head are summed over ranks, how often it counts in a norm, its weight."""
    from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate

    start_megatron(2)
    _, [chunk] = build(directory, sp=True)
    head = chunk.output_layer.weight
    return head.sequence_parallel, int(param_is_not_tensor_parallel_duplicate(head)), head.detach().clone()


def build_error(directory: Path | str, pp: int) -> str:
    """What building says on this rank."""
    start_megatron(pp=pp)
    try:
        build(directory, sp=False)
    except ValueError as error:
        return str(error)
    return "no error"
