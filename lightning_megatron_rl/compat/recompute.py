"""Megatron's recomputation of single outputs (norms, up-projections) without Transformer Engine and without a compiler.

`CheckpointWithoutOutput` frees an output's memory and fills it again in backward. Its argument `fp8` is on unless it is
None, and its default is False: without Transformer Engine that is a NameError. And it fills the memory through a C++
extension that is compiled when the first backward runs, on every machine anew (megatron-core 0.19.2).
"""

from torch import Tensor


def install_recompute(*, transformer_engine: bool) -> None:
    """Let norms and up-projections be recomputed in torch layers; with Transformer Engine everything is Megatron's.

    Args:
        transformer_engine: Whether the layers are Transformer Engine's.
    """
    if transformer_engine:
        return
    from megatron.core.tensor_parallel import random

    random.CheckpointWithoutOutput.__init__.__defaults__ = (None,)  # fp8, which torch layers do not have
    random._share_storage_ext = _CopiedStorage


class _CopiedStorage:
    """What Megatron's extension does, by a copy."""

    @staticmethod
    def share_storage(output: Tensor, recomputed: Tensor) -> None:
        """Give `output`, whose memory was freed, and all its views the numbers of `recomputed`.

        Storages are below autograd: nothing notices that a tensor it has saved was written.
        """
        source = recomputed.untyped_storage()
        storage = output.untyped_storage()
        storage.resize_(source.nbytes())
        storage.copy_(source)
