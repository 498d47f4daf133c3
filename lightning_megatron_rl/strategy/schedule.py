"""Forward and backward over all micro-batches of a mini-batch in one call of Megatron's schedule.

The one scaling recipe of this project
--------------------------------------
Every chunk's config has ``calculate_per_token_loss=True``. A loss function returns
``(sum_of_weighted_token_losses, num_tokens, metrics)``: Megatron's schedule then scales nothing, its DDP *sums*
gradients over data- and context-parallel ranks, and `finalize_model_grads` divides them once by the global number of
tokens. With per-token weights ``u_t = w_t * N`` (``N`` the global number of tokens, ``w_t`` the weight of the
aggregation mode) the gradient is that of ``sum_t w_t * loss_t`` over the whole mini-batch, whatever the micro-batches
and the layout. Token mean is ``u_t = 1``.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

LossFunction = Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Any]]]
ForwardStep = Callable[[nn.Module, Any], tuple[Tensor, LossFunction | Callable[[Tensor], Any]]]


def forward_backward(
    chunks: Sequence[nn.Module],
    microbatches: Sequence[Any],
    forward_step: ForwardStep,
    *,
    sequence_length: int,
    micro_batch_size: int,
    forward_only: bool = False,
) -> list[Any]:
    """Run Megatron's schedule (no pipeline, 1F1B or interleaved) over `microbatches`.

    Args:
        chunks: This rank's model chunks; wrapped by Megatron's DDP unless `forward_only`.
        microbatches: All micro-batches of the mini-batch, equally many on every rank.
        forward_step: ``(chunk, microbatch) -> (output, loss_function)``. The loss function gets the last stage's
            output; when training it returns ``(loss_sum, num_tokens, metrics)``, else ``(anything summable, metrics)``.
        sequence_length: Longest sequence length of a micro-batch.
        micro_batch_size: Sequences per micro-batch (1 when packed).
        forward_only: No backward, no gradients.

    Raises:
        ValueError: The interleaved schedule with a number of micro-batches that the stages do not divide.

    Returns:
        One metrics object per micro-batch on ranks of the last pipeline stage, else an empty list.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.utils import get_model_config

    if len(chunks) > 1:
        stages = get_model_config(chunks[0]).pipeline_model_parallel_size
        if len(microbatches) % stages:
            raise ValueError(
                f"{len(microbatches)} micro-batches with {len(chunks)} chunks on each of {stages} pipeline stages: the"
                f" interleaved schedule needs a multiple of {stages} ({len(microbatches)} % {stages} ="
                f" {len(microbatches) % stages}): add micro-batches of padding."
            )
    if not forward_only:
        for chunk in chunks:
            # its default None means: gradients never leave the rank (data parallel, sequence parallel, tied embeddings)
            assert get_model_config(chunk).finalize_model_grads_func is not None
            chunk.zero_grad_buffer()  # type: ignore[operator]

    def step(data_iterator: Any, chunk: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        return forward_step(chunk, next(data_iterator))

    results = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(microbatches) for _ in chunks] if len(chunks) > 1 else iter(microbatches),
        model=list(chunks),
        num_microbatches=len(microbatches),
        seq_length=sequence_length,
        micro_batch_size=micro_batch_size,
        forward_only=forward_only,
    )
    return list(results)
