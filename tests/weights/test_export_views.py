"""Hugging Face tensors as rows of Megatron's parameters."""

from pathlib import Path

import pytest
import torch

from lightning_megatron_rl.weights.export_views import RowBlocks, find_blocks
from lightning_megatron_rl.weights.source import WeightViews


def test_rows_as_blocks():
    assert find_blocks(torch.tensor([3, 4, 5])) == RowBlocks(start=3, size=3, step=3, count=1)
    assert find_blocks(torch.tensor([4, 5, 12, 13])) == RowBlocks(start=4, size=2, step=8, count=2)
    assert find_blocks(torch.tensor([7])) == RowBlocks(start=7, size=1, step=1, count=1)
    assert find_blocks(torch.tensor([0, 2, 4])) == RowBlocks(start=0, size=1, step=2, count=3)


@pytest.mark.parametrize("rows", [[0, 1, 5], [0, 1, 4, 5, 9, 10], [2, 1, 0, 5]])
def test_irregular_rows_are_none(rows):
    assert find_blocks(torch.tensor(rows)) is None


def test_blocks_are_taken_from_a_parameter():
    parameter = torch.arange(48.0).view(16, 3)
    blocks = RowBlocks(start=4, size=2, step=8, count=2)
    assert torch.equal(blocks.view(parameter).reshape(4, 3), parameter[[4, 5, 12, 13]])
    one = RowBlocks(start=2, size=5, step=5, count=1).view(parameter).reshape(5, 3)
    assert one.data_ptr() == parameter[2].data_ptr()  # no copy


def push_and_export(model: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int, bool]:
    """After an update: what is pushed, what is exported, how many tensors were copied, and whether it was planned."""
    from megatron.core.optimizer import OptimizerConfig

    from lightning_megatron_rl.modules.sft import SFTModule
    from lightning_megatron_rl.modules.training import TrainingSettings
    from tests.training import SequenceDataModule, frozen_sequences, make_trainer

    policy = SFTModule(
        str(model), train=TrainingSettings(optimizer=OptimizerConfig(lr=1e-2), max_tokens_per_microbatch=64)
    )
    trainer = make_trainer({}, 1, max_steps=1, precision="bf16-mixed")
    trainer.fit(policy, SequenceDataModule(frozen_sequences(4), 4))
    first = policy.weights_to_push()
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.25)  # the plan is of places, not of values
    pushed = policy.weights_to_push()
    exported = {name: tensor.clone() for name, tensor in policy.export_weights()}
    places = {parameter.untyped_storage().data_ptr() for parameter in policy.model.parameters()}
    assert isinstance(pushed.whole, WeightViews)
    assert pushed is first
    assert pushed.whole.stays
    assert {found.view.untyped_storage().data_ptr() for found in pushed.whole.views} <= places
    policy.teardown("fit")
    assert policy.weights_to_push() is not first  # a module that is kept after its run holds no views
    copied = sum(tensor.untyped_storage().data_ptr() not in places for _, tensor in pushed.tensors())
    return dict(pushed.tensors()), exported, copied, isinstance(pushed.whole, WeightViews)


@pytest.mark.parametrize("family", ["qwen3", "qwen2_tied", "qwen3_moe"])
def test_pushed_weights_are_the_exported_ones(worker_pool, tmp_path, family):
    from tests.tiny_models import save_tiny_model

    directory = save_tiny_model(tmp_path, family)
    pushed, exported, copied, planned = worker_pool.run(
        push_and_export, directory, world_size=1, init_process_group=False
    )[0]
    assert planned
    assert pushed.keys() == exported.keys()
    for name, tensor in exported.items():
        assert torch.equal(pushed[name].to(tensor.dtype), tensor), name
    fused = sum(".self_attn." in name and name.split(".")[-2] in ("q_proj", "k_proj", "v_proj") for name in pushed)
    assert copied <= fused  # queries, keys and values of several groups lie apart; everything else is read in place
