"""Log-probs and entropy of tokens under a vocabulary split over tensor-parallel ranks, by chunks of tokens.

Logits are made from hidden states, reduced to a few numbers per token, and made again in backward. Those of a
micro-batch that is one chunk are kept. Each rank reduces its own columns; two all-reduces per micro-batch then join the
ranks.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron_rl.compat.torch_names import assert_on_device


def logprob_processor(
    *,
    vocab_size: int,
    temperature: float = 1.0,
    chunk_size: int = 512,
    with_entropy: bool = False,
    cap: float | None = None,
) -> Callable[..., Tensor]:
    """An `output_processor` for Megatron's `GPTModel.forward` that turns hidden states into log-probs of `labels`.

    The model then returns fp32 [1, b, s], or [2, b, s] with the entropy of the whole distribution as second row; both
    are differentiable. They belong to the sampled distribution: logits divided by `temperature`; with `cap` they are
    soft-capped before, as cap tanh(logit / cap). Columns beyond `vocab_size`, which pad the vocabulary to the
    tensor-parallel size, take no part. At most `chunk_size` tokens have logits at any time. Logits of a
    micro-batch with no more tokens are kept for its backward pass. Raises `ValueError` for a temperature or a chunk
    size that is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be > 0: log-probs divide the logits by it")
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size} must be at least 1 token")

    def process(
        *, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, labels: Tensor, **unused: Any
    ) -> Tensor:
        weight = output_layer.weight if output_weight is None else output_weight
        hidden = _gathered(hidden_states, output_layer).flatten(0, 1)  # [s b, h]
        is_trained = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
        logprobs, entropy = _TokenLogprobs.apply(
            hidden,
            weight,
            labels.transpose(0, 1).flatten(),
            vocab_size,
            temperature,
            chunk_size,
            with_entropy,
            cap,
            output_layer.tp_group,
            is_trained and hidden.size(0) <= chunk_size,
        )
        rows = [logprobs, entropy] if with_entropy else [logprobs]
        batch, length = labels.shape
        return torch.stack([row.view(length, batch).transpose(0, 1) for row in rows])

    return process


def _gathered(hidden_states: Tensor, output_layer: Any) -> Tensor:
    """The hidden states of all tokens; their gradient is summed over the ranks, which see different columns."""
    from megatron.core.tensor_parallel import mappings

    if output_layer.sequence_parallel:
        return mappings.gather_from_sequence_parallel_region(
            hidden_states, tensor_parallel_output_grad=True, group=output_layer.tp_group
        )
    return mappings.copy_to_tensor_model_parallel_region(hidden_states, group=output_layer.tp_group)


class _TokenLogprobs(torch.autograd.Function):
    """log p(label) and entropy of softmax(hidden weight^T / temperature), columns split over `group`.

    With z the scaled logits, log Z = log sum_j exp z_j, p = exp(z - log Z) and H = log Z - sum_j p_j z_j:
    d log p(label) / dz = 1[label] - p and dH / dz = -p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [tokens, h]
        weight: Tensor,  # [columns of this rank, h]
        labels: Tensor,  # [tokens]
        vocab_size: int,
        temperature: float,
        chunk_size: int,
        with_entropy: bool,
        cap: float | None,
        group: dist.ProcessGroup,
        keeps_logits: bool,  # those of a single chunk, for backward
    ) -> tuple[Tensor, Tensor]:
        assert_on_device(
            ((labels >= 0) & (labels < vocab_size)).all(), f"a label is not a token of the vocabulary [0, {vocab_size})"
        )
        first = group.rank() * weight.size(0)
        columns = min(weight.size(0), vocab_size - first)  # the rest is padding
        local = labels - first  # column of the label, if this rank has it
        largest, total, weighted, label_logit = (
            torch.empty(hidden.size(0), dtype=torch.float32, device=hidden.device) for _ in range(4)
        )
        reduce_logits = _kernels().reduce_logits if hidden.is_cuda else _reduce_logits
        ctx.logits = None
        for start in range(0, hidden.size(0), chunk_size):
            part = slice(start, start + chunk_size)
            logits = hidden[part] @ weight[:columns].T  # in the model's own precision, as in inference
            if keeps_logits:
                ctx.logits = logits
            logits = logits if cap is None else cap * torch.tanh(logits / cap)
            largest[part], total[part], weighted[part], label_logit[part] = reduce_logits(
                logits, local[part], temperature
            )
        own_largest = largest.clone()
        if group.size() > 1:  # NCCL takes hundreds of MiB for a group that is used, be it one rank's
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        shift = own_largest - largest  # every rank took its own maximum out of its sums
        weighted = (weighted + total * shift) * shift.exp() if with_entropy else torch.zeros_like(total)
        sums = torch.stack([total * shift.exp(), weighted, label_logit])
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
        total, weighted, label_logit = sums
        log_z = largest + total.log()
        entropy = total.log() - weighted / total
        ctx.save_for_backward(hidden, weight, local, log_z, entropy)
        ctx.columns, ctx.temperature, ctx.chunk_size, ctx.cap = columns, temperature, chunk_size, cap
        return label_logit - log_z, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # grads: log-probs, entropy, each [tokens]
        grad_logprobs, grad_entropy = grads
        hidden, weight, local, log_z, entropy = ctx.saved_tensors
        weight_used = weight[: ctx.columns]
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # chunks are summed in fp32, so that their number does not show in a bf16 gradient
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        differentiate_logits = _kernels().differentiate_logits if hidden.is_cuda else _differentiate_logits
        for start in range(0, hidden.size(0), ctx.chunk_size):
            part = slice(start, start + ctx.chunk_size)
            logits = hidden[part] @ weight_used.T if ctx.logits is None else ctx.logits
            ctx.logits = None
            slope = None
            if ctx.cap is not None:
                bounded = torch.tanh(logits / ctx.cap)
                logits, slope = ctx.cap * bounded, 1 - bounded.square()
            grad_logits = differentiate_logits(
                logits,
                local[part],
                log_z[part],
                entropy[part],
                grad_logprobs[part],
                grad_entropy[part],
                ctx.temperature,
            )
            grad_logits = grad_logits if slope is None else grad_logits * slope
            if grad_hidden is not None:
                grad_hidden[part] = grad_logits @ weight_used
            if grad_weight is not None:
                _add_product(grad_weight[: ctx.columns], grad_logits.T, hidden[part])
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            *(None,) * 8,
        )


def _kernels() -> Any:
    """The same two functions for CUDA; Triton is imported there only."""
    from lightning_megatron_rl.models.layers import logprob_kernels

    return logprob_kernels


def _reduce_logits(logits: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `logprob_kernels.reduce_logits`."""
    z = logits.float() / temperature
    label_logit = _at(z, labels)
    largest = z.amax(1)
    z -= largest[:, None]
    exponentials = z.exp()
    return largest, exponentials.sum(1), (exponentials * z).sum(1), label_logit


def _differentiate_logits(
    logits: Tensor,
    labels: Tensor,
    log_z: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor,
    temperature: float,
) -> Tensor:
    """See `logprob_kernels.differentiate_logits`."""
    log_p = logits.float().div_(temperature) - log_z[:, None]
    factor = grad_logprobs[:, None] + grad_entropy[:, None] * (log_p + entropy[:, None])
    gradient = -log_p.exp() * factor
    _add_at(gradient, labels, grad_logprobs)
    return (gradient / temperature).to(logits.dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left @ right`` to the fp32 `total` in place."""
    if total.is_cuda and left.dtype != torch.float32:  # in the product's own sums, without a copy in 16 bits
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right


def _at(logits: Tensor, column: Tensor) -> Tensor:
    """`logits[i, column[i]]`, or 0 where that column is another rank's, [tokens]."""
    mine = (column >= 0) & (column < logits.size(1))
    found = logits.gather(1, column.clamp(0, logits.size(1) - 1)[:, None])[:, 0]
    return found.masked_fill(~mine, 0.0)


def _add_at(grad_logits: Tensor, column: Tensor, values: Tensor) -> None:
    """Add `values[i]` to `grad_logits[i, column[i]]` in place, where that column is this rank's."""
    mine = (column >= 0) & (column < grad_logits.size(1))
    grad_logits.scatter_add_(
        1, column.clamp(0, grad_logits.size(1) - 1)[:, None], values.masked_fill(~mine, 0.0)[:, None]
    )
