"""A pass over a share of sequences, as the routers of a mixture of experts see it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_megatron_rl.modules.sharing import Share

if TYPE_CHECKING:
    from lightning_megatron_rl.models.layers.routers import RouterHooks, RoutingMode


@contextmanager
def routed_pass(
    routers: "RouterHooks | None", share: Share, mode: "RoutingMode", reduce_tokens: Callable[[Tensor], Tensor]
) -> Iterator[list[Tensor]]:
    """Run what is inside as one pass over `share`; the list then holds what was recorded. A collective.

    Args:
        routers: Of the policy; None on a dense model, where nothing is done.
        share: The sequences and micro-batches of the pass.
        mode: What becomes of the routers' choices.
        reduce_tokens: Sums a tensor over all ranks that share the batch's tokens.

    Raises:
        ValueError: Routing is to be recorded or replayed on a dense model, or the settings do not say so.
    """
    recorded: list[Tensor] = []
    if routers is None:
        if mode != "free":
            raise ValueError(f"routing={mode!r}, but this model is dense: it has no routers")
        yield recorded
        return
    targets = sum(int(microbatch.mask.sum()) for microbatch in share.microbatches)
    tokens = sum(int((microbatch.sequence_index >= 0).sum()) for microbatch in share.microbatches)
    totals = reduce_tokens(torch.tensor([targets, tokens], dtype=torch.float64, device=share.device))
    routers.begin(
        [len(sequence) for sequence in share.sequences],
        mode,
        [sequence.routing for sequence in share.sequences],
        # finalize_model_grads divides by the number of targets, at least 1; see models.routers
        loss_scale=(totals[0].clamp(min=1) / totals[1].clamp(min=1)).item(),
    )
    yield recorded
    recorded += routers.end()
