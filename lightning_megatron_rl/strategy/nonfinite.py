"""Steps with a non-finite loss or gradient: which samples, parameters and ranks, and what is kept of the batch."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch import distributed as dist

OnNonfinite = Literal["stop", "skip"]
_NAMED = 3  # samples and parameters that a message names


class NonFiniteError(RuntimeError):
    """A loss or gradient is not finite, and the run was told to stop."""


@dataclass
class UpdateTrace:
    """The inputs of the current gradients on this rank.

    Args:
        chunks: The trained chunks.
        metric: Name of the loss; "" if unknown.
        loss: Of the whole mini-batch, the same on every rank.
        samples: What this replica computed, as plain data: "origin" names a sample.
        token_losses: On the last pipeline stage, per micro-batch, each token's loss and its sample's place in
            `samples`, -1 on padding; ``[b, s]`` both.
    """

    chunks: Sequence[nn.Module]
    metric: str
    loss: float
    samples: Sequence[Mapping[str, Any]]
    token_losses: Sequence[tuple[Tensor, Tensor]]

    @property
    def loss_is_finite(self) -> bool:
        """Whether the loss is finite."""
        return math.isfinite(self.loss)

    def bad_samples(self) -> list[str]:
        """Return the origins of samples with a token whose loss is not finite.

        Example:
            Losses ``[[0.1, nan, 0.3]]`` at places ``[[0, 1, 1]]`` name ``samples[1]``.
        """
        places = {
            place for losses, index in self.token_losses for place in index[~losses.isfinite()].tolist() if place >= 0
        }
        return [str(self.samples[place]["origin"]) for place in sorted(places)]

    def bad_parameters(self) -> list[str]:
        """Return the names of this rank's parameters whose gradient is not finite."""
        return [name for name, gradient in self._gradients() if not bool(gradient.isfinite().all())]

    def _gradients(self) -> Iterator[tuple[str, Tensor]]:
        from megatron.core.utils import unwrap_model

        for chunk in unwrap_model(list(self.chunks)):
            for name, parameter in chunk.named_parameters():
                if parameter.requires_grad:
                    yield name, parameter.main_grad


def describe_failure(trace: UpdateTrace, grad_norm: float, step: int) -> str:
    """Say which samples and parameters of which ranks are not finite; a collective, equal on every rank.

    Gradients are named where they are after the reduction over replicas: a shard of the distributed optimizer's holds
    what all replicas brought, so of a sample's own rank the names of samples are the better witness.
    """
    mine = (trace.bad_samples(), trace.bad_parameters())
    everywhere: list[tuple[list[str], list[str]]] = [mine] * dist.get_world_size()
    dist.all_gather_object(everywhere, mine)
    found = [
        f"rank {rank}: {_some(names)}"
        for rank, (samples, _) in enumerate(everywhere)
        if (names := sorted(set(samples)))
    ]
    held = [f"rank {rank}: {_some(names)}" for rank, (_, names) in enumerate(everywhere) if names]
    loss = f" and {trace.metric}={trace.loss:g}" if trace.metric else ""
    return (
        f"gradient norm {grad_norm:g}{loss} at global_step {step}: the optimizer step was not taken, the weights are"
        " what they were."
        f" Samples whose loss is not finite: {'; '.join(found) or 'none, it came up in the backward pass'}."
        f" Parameters whose gradient is not finite: {'; '.join(held) or 'none'}."
    )


def write_batch(trace: UpdateTrace, directory: Path) -> None:
    """Write this rank's part of the batch to ``<directory>/batch/<rank>.pt``, as plain tensors."""
    (directory / "batch").mkdir(parents=True, exist_ok=True)
    content = {
        "samples": [dict(sample) for sample in trace.samples],
        "token_losses": [(losses.cpu(), index.cpu()) for losses, index in trace.token_losses],
        "bad_samples": trace.bad_samples(),
        "bad_parameters": trace.bad_parameters(),
    }
    torch.save(content, directory / "batch" / f"{dist.get_rank()}.pt")


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
