"""Forward and backward over all micro-batches of a mini-batch in one call of Megatron's schedule.

The one scaling recipe of this project
--------------------------------------
Every chunk's config has ``calculate_per_token_loss=True``. A loss function returns
``(sum_of_weighted_token_losses, num_tokens, metrics)``: Megatron's schedule then scales nothing, its DDP *sums*
gradients over data- and context-parallel ranks, and `finalize_model_grads` divides them once by the global number of
tokens. With per-token weights ``u_t = w_t * N`` (``N`` the global number of tokens, ``w_t`` the weight of the
aggregation mode) the gradient is that of ``sum_t w_t * loss_t`` over the whole mini-batch, whatever the micro-batches
and the layout. Token mean is ``u_t = 1``.

A mini-batch may come in parts, one call for each: see `GradientSum`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

LossFunction = Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Any]]]
ForwardStep = Callable[[nn.Module, Any], tuple[Tensor, LossFunction | Callable[[Tensor], Any]]]


@dataclass
class GradientSum:
    """Gradients of one optimizer step, to which each call of `forward_backward` adds those of a part of the mini-batch.

    They stay on their rank until the last part; then they are summed over ranks and divided by the tokens of all parts.

    Args:
        is_last: Whether the next call is the last one.
        scale: What the divided gradients are multiplied by in the end.
    """

    is_last: bool = True
    scale: float = 1.0
    _num_tokens: Tensor | None = None  # of this rank, in the parts before

    @property
    def is_empty(self) -> bool:
        """Whether no part was added."""
        return self._num_tokens is None

    @contextmanager
    def adding(self, chunks: Sequence[nn.Module]) -> Iterator[None]:
        """Let Megatron's schedule add one part; what it is told by the chunks' configs is as before afterwards."""
        from megatron.core.utils import get_model_config

        configs = [get_model_config(chunk) for chunk in chunks]
        for config in configs:
            # its default None means: gradients never leave the rank (data parallel, sequence parallel, tied embeddings)
            assert config.finalize_model_grads_func is not None
        before = [(config.finalize_model_grads_func, config.no_sync_func) for config in configs]
        finalize = before[0][0]

        def keep(model: Any, num_tokens: Tensor, **_: Any) -> None:
            self._num_tokens = num_tokens if self._num_tokens is None else self._num_tokens + num_tokens

        def finish(model: Any, num_tokens: Tensor, **options: Any) -> None:
            finalize(model, num_tokens if self._num_tokens is None else num_tokens + self._num_tokens, **options)
            if self.scale != 1:
                for chunk in chunks:
                    chunk.scale_gradients(self.scale)  # type: ignore[operator]

        with ExitStack() as stack:
            if not self.is_last:  # also the last micro-batch, which the schedule takes for that of the mini-batch
                for chunk in chunks:
                    stack.enter_context(chunk.no_sync())  # type: ignore[operator]
            try:
                for config in configs:
                    config.finalize_model_grads_func = finish if self.is_last else keep
                    if not self.is_last:
                        config.no_sync_func = nullcontext
                yield
            finally:
                for config, (function, no_sync) in zip(configs, before, strict=True):
                    config.finalize_model_grads_func, config.no_sync_func = function, no_sync


def forward_backward(
    chunks: Sequence[nn.Module],
    microbatches: Sequence[Any],
    forward_step: ForwardStep,
    *,
    sequence_length: int,
    micro_batch_size: int,
    forward_only: bool = False,
    gradients: GradientSum | None = None,
) -> list[Any]:
    """Run Megatron's schedule (no pipeline, 1F1B or interleaved) over `microbatches`.

    Args:
        chunks: This rank's model chunks; wrapped by Megatron's DDP unless `forward_only`.
        microbatches: All micro-batches of the mini-batch, or of a part, equally many on every rank.
        forward_step: ``(chunk, microbatch) -> (output, loss_function)``. The loss function gets the last stage's
            output; when training it returns ``(loss_sum, num_tokens, metrics)``, else ``(anything summable, metrics)``.
        sequence_length: Longest sequence length of a micro-batch.
        micro_batch_size: Sequences per micro-batch (1 when packed).
        forward_only: No backward, no gradients.
        gradients: What the parts of a mini-batch add theirs to; None: these are all micro-batches.

    Raises:
        ValueError: The interleaved schedule with a number of micro-batches that the stages do not divide.

    Returns:
        One metrics object per micro-batch on ranks of the last pipeline stage, else an empty list.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.utils import get_model_config

    gradients = gradients or GradientSum()
    if len(chunks) > 1:
        stages = get_model_config(chunks[0]).pipeline_model_parallel_size
        if len(microbatches) % stages:
            raise ValueError(
                f"{len(microbatches)} micro-batches with {len(chunks)} chunks on each of {stages} pipeline stages: the"
                f" interleaved schedule needs a multiple of {stages} ({len(microbatches)} % {stages} ="
                f" {len(microbatches) % stages}): add micro-batches of padding."
            )
    if not forward_only and gradients.is_empty:
        for chunk in chunks:
            chunk.zero_grad_buffer()  # type: ignore[operator]

    def step(data_iterator: Any, chunk: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        return forward_step(chunk, next(data_iterator))

    with nullcontext() if forward_only else gradients.adding(chunks):
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
