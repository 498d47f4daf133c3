"""Running averages of trained weights, split over the ranks as the optimizer's state is."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightning_megatron_rl.checkpoints.main_parameters import MAIN
from lightning_megatron_rl.checkpoints.optimizer_state import Slice, give_tensors, slices

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer as CoreOptimizer


class AveragedWeights:
    """An average, in fp32, of the main parameters that Megatron's optimizers step.

    Each rank has the average of what its optimizer steps: 4 bytes per parameter, divided by the replicas under the
    distributed optimizer. It starts as the weights at hand; `count` is the number of updates.

    Args:
        parts: Megatron's optimizers.
        chunks: The wrapped chunks that they step.
        counts_start: Whether the weights of the start count as an update; otherwise the first update replaces them.

    Raises:
        ValueError: Parameters are kept in 8 bits or less, which an average cannot be written to.

    Example:
        ``average = optimizer.add_average("slow")``, ``average.update(decay=0.999)``, ``with average.in_place(): ...``
    """

    def __init__(
        self, parts: Sequence["CoreOptimizer"], chunks: Sequence[nn.Module], *, counts_start: bool = False
    ) -> None:
        config = chunks[0].ddp_config
        if config.fp8_param_gather or config.fp4_param_gather:  # type: ignore[union-attr]
            raise ValueError(
                "an average of the weights with ddp_config.fp8_param_gather or fp4_param_gather: parameters in 8 or 4"
                " bits cannot hold an average for a forward pass. Switch it off, or leave the average out."
            )
        self._parts = [part for part in parts if not part.is_stub_optimizer]
        self._chunks = list(chunks)
        self._counts_start = counts_start
        self.tensors: list[Tensor] = []  # per slice: fp32 [elements]
        self._kept: list[Tensor] | None = None  # the model's own weights per slice, while it has the average
        self.restart()

    @torch.no_grad()
    def restart(self) -> None:
        """Start again from the weights at hand."""
        self.tensors = [own.tensors[MAIN].to(torch.float32, copy=True) for own in self._slices()]
        self.count = int(self._counts_start)

    @torch.no_grad()
    def update(self, decay: float | None) -> None:
        """Take in the weights at hand; the first update copies them.

        Args:
            decay: ``average = decay * average + (1 - decay) * weights``; None for the equal average of all updates.
        """
        weight = 1.0 if self.count == 0 else 1 / (self.count + 1) if decay is None else 1 - decay
        for average, own in zip(self.tensors, self._slices(), strict=True):
            average.lerp_(own.tensors[MAIN].to(average), weight)
        self.count += 1

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model have the average, rounded to its dtype, and its own weights again afterwards; a collective.

        After an error each rank takes back only what its optimizer steps: it may have come up on this rank alone.
        """
        kept = self._kept = self._exchange(self.tensors)
        try:
            yield
        except BaseException:
            self._write(kept)
            raise
        finally:
            self._kept = None
        self._exchange(kept)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Let the model have its own weights inside of `in_place`, too, for a checkpoint; a collective there.

        After an error the model keeps them.
        """
        if self._kept is None:
            yield
            return
        self._exchange(self._kept)
        yield
        self._exchange(self.tensors)

    def keep_in_place(self) -> None:
        """Let the model and the optimizer's main parameters have the average from now on; a collective."""
        self._exchange(self.tensors)
        averages = iter(self.tensors)
        for part in self._parts:
            found = [replace(own, tensors={**own.tensors, MAIN: next(averages)}) for own in slices(part)]
            give_tensors(part, found)

    @torch.no_grad()
    def _exchange(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Write `tensors` to the model's parameters, on all replicas; returns copies of what was there."""
        self._gather()  # under `overlap_param_gather` the last step's may be on their way
        kept = self._write(tensors)
        self._gather()
        return kept

    @torch.no_grad()
    def _write(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Write `tensors` to this rank's slices of the model's parameters; returns copies of what was there."""
        kept = []
        for tensor, own in zip(tensors, self._slices(), strict=True):
            target = own.parameter.detach().view(-1)[own.start : own.stop]
            kept.append(target.clone())
            target.copy_(tensor)
        return kept

    def _gather(self) -> None:
        for chunk in self._chunks:
            if chunk.ddp_config.use_distributed_optimizer:  # type: ignore[union-attr]
                chunk.start_param_sync(force_sync=True)  # type: ignore[operator]

    def _slices(self) -> Iterator[Slice]:
        for part in self._parts:
            yield from slices(part)
