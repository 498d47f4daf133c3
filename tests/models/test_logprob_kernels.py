"""The kernels for CUDA, run by Triton's interpreter on a CPU: the numbers of the plain operations and of fp64."""

import pytest
import torch
from torch import Tensor

from tests.interpreted import run_interpreted

ROWS, COLUMNS = 5, 5000  # more than a block of columns, and no multiple of one


def problem(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, labels (two of them another rank's) and gradients of log-probs and entropies."""
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(ROWS, COLUMNS, generator=generator) * 4).to(dtype)
    logits[4] += 60  # over 0.6, exponentials of what is not shifted by the largest would overflow
    return logits, torch.tensor([0, COLUMNS - 1, -3, COLUMNS + 7, 4100]), torch.randn(2, ROWS, generator=generator)


def expected(logits: Tensor, labels: Tensor, grads: Tensor, temperature: float) -> dict[str, Tensor]:
    """In fp64, the gradient by autograd."""
    logits = logits.double().requires_grad_()
    z = logits / temperature
    largest = z.amax(1, keepdim=True)
    exponentials = (z - largest).exp()
    log_p = z.log_softmax(1)
    mine = (labels >= 0) & (labels < logits.shape[1])
    chosen = z.gather(1, labels.clamp(0, logits.shape[1] - 1)[:, None])[:, 0] * mine
    entropy = -(log_p.exp() * log_p).sum(1)
    log_z = z.logsumexp(1)
    ((chosen - log_z) @ grads[0].double() + entropy @ grads[1].double()).backward()
    assert logits.grad is not None
    numbers = (largest[:, 0], exponentials.sum(1), (exponentials * (z - largest)).sum(1), chosen)
    named = dict(zip(("largest", "total", "weighted", "label"), numbers, strict=True))
    return {**named, "log_z": log_z, "entropy": entropy, "gradient": logits.grad}


def compare() -> None:
    """Run with TRITON_INTERPRET=1, which Triton reads where kernels are defined."""
    from lightning_megatron_rl.models.layers import logprob_kernels, logprobs

    for dtype, temperature in ((torch.float32, 1.0), (torch.float32, 0.6), (torch.bfloat16, 0.6)):
        logits, labels, grads = problem(dtype)
        wanted = {name: value.detach() for name, value in expected(logits, labels, grads, temperature).items()}
        arguments = (labels, wanted["log_z"].float(), wanted["entropy"].float(), *grads, temperature)
        for functions in (
            (logprob_kernels.reduce_logits, logprob_kernels.differentiate_logits),
            (logprobs._reduce_logits, logprobs._differentiate_logits),
        ):
            reduce_logits, differentiate_logits = functions
            numbers = reduce_logits(logits.clone(), labels, temperature)
            for name, number in zip(("largest", "total", "weighted", "label"), numbers, strict=True):
                # sums of 5000 numbers in fp32; `weighted` has terms of both signs of its logarithm
                torch.testing.assert_close(number.double(), wanted[name], rtol=1e-5, atol=1e-5, msg=name)
            gradient = differentiate_logits(logits.clone(), *arguments)
            assert gradient.dtype == dtype
            # elements where terms cancel have large relative errors, so rows are compared: to bf16 the interpreter cuts
            # off 2^-8 at most, and in fp32 a z of 126 has an error of 4e-6, which is one of p, times log p of about ten
            error = (gradient.double() - wanted["gradient"]).norm(dim=1) / wanted["gradient"].norm(dim=1)
            assert error.max() < (2**-7 if dtype == torch.bfloat16 else 1e-4)
    empty = logprob_kernels.reduce_logits(torch.empty(0, 7), torch.empty(0, dtype=torch.int64), 1.0)
    assert [number.shape for number in empty] == [torch.Size([0])] * 4


@pytest.mark.deadline(120)
@pytest.mark.slow
def test_kernels_compute_what_the_plain_operations_do():
    run_interpreted(__name__, "compare")
