"""Tokens of experts that Megatron sorts although they are in order.

Megatron's dispatcher (megatron-core 0.19.2) puts tokens in the order of their experts before ranks exchange them, and
sorts what has come afterwards, wherever a rank has several experts. Tokens of several ranks need that. Those of one are
in order: there it copies all of a layer's tokens, twice forward and twice backward. In Qwen3-30B-A3B each token is
there eight times.
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
