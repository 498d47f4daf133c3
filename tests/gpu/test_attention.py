"""Attention of torch's layers on the device: by flash kernels, also where the sequence is split."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_megatron_rl.devices.measure import import_engine
from lightning_megatron_rl.models.layers.packed_attention import (
    Softmax,
    packed_attention,
    packed_zigzag_attention,
    zigzag_positions,
)
from tests.models.test_packed_attention import boundaries, masked_attention

LENGTHS = [64, 16, 96]
HEADS, GROUPS, CHANNELS = 4, 2, 64
BF16_RELATIVE = 2e-2  # operands and weights of 8 bits, in sums of up to 96


def problem() -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((HEADS, CHANNELS), (GROUPS, CHANNELS), (GROUPS, CHANNELS))
    tensors = [torch.randn(sum(LENGTHS), *shape, generator=generator).bfloat16().float() for shape in shapes]
    return tensors, torch.randn(sum(LENGTHS), HEADS, CHANNELS, generator=generator).bfloat16().float()


def attend_by_flash(cp_size: int) -> list[Tensor]:
    """Output and gradients of all ranks together, with no other kernel allowed than flash attention."""
    import_engine()  # as in a run: after torch's cuDNN, Transformer Engine would take its parts from elsewhere
    tensors, out_grad = problem()
    tensors = [tensor.cuda().bfloat16().requires_grad_() for tensor in tensors]
    query, key, value = tensors
    softmax, ends = Softmax(scale=CHANNELS**-0.5), boundaries(LENGTHS)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        if cp_size == 1:
            out = packed_attention(query, key, value, ends.cuda(), softmax)
        else:
            held = [
                torch.cat(
                    [
                        start + zigzag_positions(length, cp_size, rank)
                        for start, length in zip(ends.tolist(), LENGTHS, strict=False)
                    ]
                )
                for rank in range(cp_size)
            ]
            keys, values = (torch.stack([tensor[tokens] for tokens in held]) for tensor in (key, value))
            parts = [
                packed_zigzag_attention(query[tokens], keys, values, ends, rank, softmax)
                for rank, tokens in enumerate(held)
            ]
            out = torch.cat(parts)[torch.cat(held).argsort()]
        gradients = torch.autograd.grad(out, tensors, out_grad.cuda().bfloat16())
    return [tensor.detach().float().cpu() for tensor in (out, *gradients)]


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_flash_kernels_attend(gpu_pool, cp_size):
    found = gpu_pool.run(attend_by_flash, cp_size, world_size=1, init_process_group=False)[0]
    tensors, out_grad = problem()
    tensors = [tensor.requires_grad_() for tensor in tensors]
    expected = masked_attention(*tensors, LENGTHS, Softmax(scale=CHANNELS**-0.5))
    for mine, theirs in zip(found, (expected, *torch.autograd.grad(expected, tensors, out_grad)), strict=True):
        assert (mine - theirs).norm() / theirs.norm() < BF16_RELATIVE
