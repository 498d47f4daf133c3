"""The kernels of log-probs on the device itself, and sums of products in fp32."""

import pytest
import torch

from lightning_megatron_rl.models.layers import logprobs
from tests.models.test_logprob_kernels import expected, problem


def compare_on_cuda() -> dict[str, float]:
    """Largest relative error of rows of the gradient, by precision, and of a sum of 16-bit products."""
    from lightning_megatron_rl.models.layers import logprob_kernels

    errors = {}
    for dtype in (torch.float32, torch.bfloat16):
        logits, labels, grads = (tensor.cuda() for tensor in problem(dtype))
        wanted = {name: value.detach() for name, value in expected(logits, labels, grads, 0.6).items()}
        numbers = logprob_kernels.reduce_logits(logits, labels, 0.6)
        for name, number in zip(("largest", "total", "weighted", "label"), numbers, strict=True):
            torch.testing.assert_close(number.double(), wanted[name], rtol=1e-5, atol=1e-5, msg=name)
        arguments = (labels, wanted["log_z"].float(), wanted["entropy"].float(), *grads, 0.6)
        gradient = logprob_kernels.differentiate_logits(logits, *arguments).double()
        difference = (gradient - wanted["gradient"]).norm(dim=1) / wanted["gradient"].norm(dim=1)
        errors[str(dtype)] = float(difference.max())
    generator = torch.Generator(device="cuda").manual_seed(0)
    left, right = (torch.randn(64, size, generator=generator, device="cuda").bfloat16() for size in (48, 32))
    total = torch.randn(48, 32, generator=generator, device="cuda")
    exact = total.double() + left.double().T @ right.double()
    logprobs._add_product(total, left.T, right)
    errors["sum"] = float((total.double() - exact).norm() / exact.norm())
    return errors


@pytest.mark.smoke
def test_kernels_on_the_device(gpu_pool):
    errors = gpu_pool.run(compare_on_cuda, world_size=1, init_process_group=False)[0]
    assert (
        errors["torch.float32"] < 1e-4
    )  # a z of 126 has an error of 4e-6, which is one of p, times log p of about ten
    assert errors["torch.bfloat16"] < 2**-7
    assert errors["sum"] < 1e-5  # a product rounded to bf16 before it is added has 1e-3
