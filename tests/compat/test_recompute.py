"""Outputs that are freed after forward and filled again in backward, without Transformer Engine or a compiler."""

import inspect

import pytest
import torch

from lightning_megatron_rl.compat.recompute import install_recompute


@pytest.fixture
def checkpoints(monkeypatch):
    """Megatron's module, which forgets afterwards what was installed, and cannot compile anything."""
    from megatron.core.tensor_parallel import random

    monkeypatch.setattr(random, "_share_storage_ext", None)
    monkeypatch.setattr(random.CheckpointWithoutOutput.__init__, "__defaults__", (False,))
    monkeypatch.setattr(random, "load_inline", lambda **_: pytest.fail("compiles an extension"))
    return random


def test_a_freed_output_is_there_again_for_everybody_who_saved_it(checkpoints):
    """Saved whole and as a view; autograd sees no change of a saved tensor, and the gradient is (x^4)' = 4 x^3."""
    install_recompute(transformer_engine=False)
    start = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    output = start * start
    total = (output * output.t().t()).sum()
    output.untyped_storage().resize_(0)
    checkpoints._get_share_storage()(output, (start * start).detach())
    assert torch.equal(output, start * start)
    total.backward()
    assert torch.equal(start.grad, 4 * start.detach() ** 3)


def test_torch_layers_have_no_fp8(checkpoints):
    """Megatron's default, False, means on."""
    install_recompute(transformer_engine=False)
    assert not checkpoints.CheckpointWithoutOutput().fp8
    assert inspect.signature(checkpoints.CheckpointWithoutOutput).parameters["fp8"].default is None


def test_transformer_engine_keeps_megatrons_own(checkpoints):
    install_recompute(transformer_engine=True)
    assert checkpoints.CheckpointWithoutOutput().fp8
    assert checkpoints._share_storage_ext is None
