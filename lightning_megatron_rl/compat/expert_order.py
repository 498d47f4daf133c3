"""Tokens of experts that Megatron sorts although they are in order.

Before the exchange between ranks tokens are put in the order of their experts. What comes from several ranks has to be
sorted after it, and Megatron's dispatcher sorts (megatron-core 0.19.2) wherever a rank has several experts: where there
is nobody to exchange with it copies all of a layer's tokens twice forward and twice backward, eight of them for each
one in Qwen3-30B-A3B.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn


def leave_sorted_tokens(chunks: Iterable[nn.Module]) -> None:
    """Leave out the sorting of tokens where no other rank has any of a layer's experts.

    Args:
        chunks: Model chunks, before they are wrapped for training.
    """
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    for chunk in chunks:
        for module in chunk.modules():
            dispatcher: Any = getattr(module, "token_dispatcher", None)
            if type(dispatcher) is MoEAlltoAllTokenDispatcher and dispatcher.tp_size * dispatcher.ep_size == 1:
                dispatcher.num_local_experts = 1  # it sorts where there are more, and reads this for nothing else
