"""Log-probs on CUDA: Triton kernels that read the logits of a chunk once, and write their gradient over them.

The same formulas as `logprobs.py`, which needs a dozen passes over fp32 copies of the logits: at a vocabulary of
150,000 those take several times as long as the products with the output layer.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS_AT_ONCE = 4096
_WARPS = 8


@triton.jit
def _reduce_rows(
    logits,  # [rows, columns]
    labels,  # [rows] column of the label, outside [0, columns) where it is another rank's
    largest,
    total,
    weighted,
    label_logit,  # fp32 [rows]: what it writes
    columns,
    temperature,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, block)
    top = -float("inf")
    sum_exp = 0.0
    sum_product = 0.0  # of exp(z - top) and z - top
    for start in range(0, columns, block):
        column = start + offsets
        inside = column < columns
        z = tl.load(logits + row * columns + column, mask=inside, other=-float("inf")).to(tl.float32) / temperature
        new_top = tl.maximum(top, tl.max(z, 0))
        moved = tl.where(start == 0, 0.0, top - new_top)  # the sums so far belong to the top so far
        scale = tl.exp(moved)
        sum_product = scale * (sum_product + sum_exp * moved)
        shifted = z - new_top
        exponential = tl.exp(shifted)
        sum_exp = sum_exp * scale + tl.sum(exponential, 0)
        sum_product += tl.sum(tl.where(inside, exponential * shifted, 0.0), 0)
        top = new_top
    label = tl.load(labels + row)
    mine = (label >= 0) & (label < columns)
    found = tl.load(logits + row * columns + label, mask=mine, other=0.0).to(tl.float32) / temperature
    tl.store(largest + row, top)
    tl.store(total + row, sum_exp)
    tl.store(weighted + row, sum_product)
    tl.store(label_logit + row, found)


@triton.jit
def _differentiate(
    logits,  # [rows, columns]: read, and overwritten by the gradient
    labels,
    log_z,
    entropy,
    grad_logprobs,
    grad_entropy,  # fp32 [rows]
    columns,
    temperature,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < columns
    place = logits + row * columns + column
    log_p = tl.load(place, mask=inside, other=0.0).to(tl.float32) / temperature - tl.load(log_z + row)
    by_logprob = tl.load(grad_logprobs + row)
    factor = by_logprob + tl.load(grad_entropy + row) * (log_p + tl.load(entropy + row))
    gradient = tl.where(column == tl.load(labels + row), by_logprob, 0.0) - tl.exp(log_p) * factor
    tl.store(place, (gradient / temperature).to(logits.dtype.element_ty), mask=inside)


def reduce_logits(logits: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Reduce ``[tokens, columns]`` logits, contiguous, in any precision, to four numbers per token, fp32 ``[tokens]``.

    With z the logits over the temperature: the largest z, the sums over the columns of exp(z - largest) and of
    exp(z - largest) (z - largest), and the z of the label, 0 where `labels` is outside the columns.

    Example:
        Logits 0 and 0 at temperature 1, label 1: 0, 2, 0, 0.
    """
    rows, columns = logits.shape
    results = torch.empty(4, rows, dtype=torch.float32, device=logits.device)
    if rows:
        _reduce_rows[(rows,)](
            logits, labels, *results, columns, float(temperature), block=_COLUMNS_AT_ONCE, num_warps=_WARPS
        )
    return results[0], results[1], results[2], results[3]


def differentiate_logits(
    logits: Tensor,
    labels: Tensor,
    log_z: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor,
    temperature: float,
) -> Tensor:
    """Write the gradient of log-probs and entropies over the logits ``[tokens, columns]``, and return them.

    Args:
        logits: Contiguous, as the product with the output layer left them.
        labels: Column of each label, outside the columns where it is another rank's, ``[tokens]``.
        log_z: Logarithm of the sum of exp(logits / temperature) over all ranks' columns, ``[tokens]``.
        entropy: Of the whole distribution, ``[tokens]``.
        grad_logprobs: Gradient of the loss by each log-prob, ``[tokens]``.
        grad_entropy: And by each entropy, ``[tokens]``.
        temperature: What divides the logits.
    """
    rows, columns = logits.shape
    if rows:
        _differentiate[(rows, triton.cdiv(columns, _COLUMNS_AT_ONCE))](
            logits,
            labels,
            log_z,
            entropy,
            grad_logprobs.contiguous(),
            grad_entropy.contiguous(),
            columns,
            float(temperature),
            block=_COLUMNS_AT_ONCE,
            num_warps=_WARPS,
        )
    return logits
