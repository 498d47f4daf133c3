"""A pass of the policy as its routers see it: which tokens, how their losses are scaled, what is replayed."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Optional

import torch
from torch import Tensor

from lightning_megatron_rl.modules.sharing import Share

if TYPE_CHECKING:
    from lightning_megatron_rl.models.routers import RouterHooks, RoutingMode


def begin_routing(
    routers: Optional["RouterHooks"], share: Share, mode: "RoutingMode", reduce_tokens: Callable[[Tensor], Tensor]
) -> None:
    """Start a pass over `share` on the routers, if the model has any; a collective.

    Args:
        routers: Of the policy.
        share: The sequences and micro-batches of the pass.
        mode: What becomes of the routers' choices.
        reduce_tokens: Sums a tensor over all ranks that share the batch's tokens.

    Raises:
        ValueError: Routing is to be recorded or replayed, and the model is dense or the run's settings do not say so.
    """
    if routers is None:
        if mode != "free":
            raise ValueError(f"routing={mode!r}, but this model is dense: it has no routers")
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
