"""vLLM's kernel for the log-probs of drawn tokens, which reads logits in wider blocks here.

It goes through each row of logits twice, 1,024 of them at a time, in four warps of one multiprocessor (vLLM 0.26). One
multiprocessor has room for 32 warps, with which it takes a third of the time or less, and log-probs are as exact
(tests/gpu/test_logprobs.py).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

BLOCK_SIZE, WARPS = 16_384, 32  # logits at a time, and warps that share them: as many as a multiprocessor may have


class _Wide:
    """A kernel of Triton that is launched with these numbers, whatever it is asked for."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return partial(self._launch, self._kernel[grid])

    def _launch(self, launcher: Callable[..., Any], *arguments: Any, **constants: Any) -> Any:
        return launcher(*arguments, **{**constants, "BLOCK_SIZE": BLOCK_SIZE, "num_warps": WARPS})


def widen_logprobs() -> None:
    """Let vLLM in this process read logits in wide blocks from now on; nothing changes without CUDA.

    It is for the newer of vLLM's model runners; the other one has torch compute log-probs.
    """
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu.sample import logprob

    kernel = logprob._topk_log_softmax_kernel
    if current_platform.is_cuda() and not isinstance(kernel, _Wide):
        logprob._topk_log_softmax_kernel = _Wide(kernel)
