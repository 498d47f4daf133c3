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


def sampled_logprobs() -> dict[str, tuple[float, float]]:
    """Largest error of vLLM's log-probs of drawn tokens, and the time they take, by its own kernel and wide blocks."""
    from vllm.v1.worker.gpu.sample import logprob

    from lightning_megatron_rl.compat.vllm_logprobs import widen_logprobs

    generator = torch.Generator(device="cuda").manual_seed(0)
    logits = 4 * torch.randn(64, 151_936, generator=generator, device="cuda")
    tokens = torch.randint(151_936, (64, 1), generator=generator, device="cuda")
    exact = logits.double().log_softmax(-1).gather(1, tokens)
    own, found = logprob._topk_log_softmax_kernel, {}
    try:
        for name in ("own", "wide"):
            values, times = logprob.compute_token_logprobs(logits, tokens), []
            for _ in range(9):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                for _ in range(10):
                    logprob.compute_token_logprobs(logits, tokens)
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end))
            found[name] = float((values.double() - exact).abs().max()), sorted(times)[4]
            widen_logprobs()
    finally:
        logprob._topk_log_softmax_kernel = own
    return found


@pytest.mark.smoke
def test_kernels_on_the_device(gpu_pool):
    errors = gpu_pool.run(compare_on_cuda, world_size=1, init_process_group=False)[0]
    assert (
        errors["torch.float32"] < 1e-4
    )  # a z of 126 has an error of 4e-6, which is one of p, times log p of about ten
    assert errors["torch.bfloat16"] < 2**-7
    assert errors["sum"] < 1e-5  # a product rounded to bf16 before it is added has 1e-3


def test_log_probs_of_drawn_tokens_in_wide_blocks(fresh_pool):
    """A log-prob of 16 to 32 is rounded by 1e-6, and so is the logit that it is made of. Both are as exact.

    Alone on an H200 wide blocks take a third of the time; other tests use the GPU meanwhile.
    """
    found = fresh_pool.run(sampled_logprobs, world_size=1, init_process_group=False)[0]
    assert max(found["own"][0], found["wide"][0]) < 4e-6
    assert found["wide"][1] < found["own"][1] / 1.5, found
