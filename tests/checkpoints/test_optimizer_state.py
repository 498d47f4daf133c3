"""A range of a tensor's elements is the boxes it is cut into; optimizer state goes to and fro in every precision."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron_rl.checkpoints.optimizer_state import boxes
from tests.training import fit_sft, frozen_sequences


def test_boxes_by_hand():
    assert list(boxes((3, 4), 2, 9)) == [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    assert list(boxes((3, 4), 4, 12)) == [((1, 0), (2, 4))]
    assert list(boxes((3, 4), 5, 7)) == [((1, 1), (1, 2))]
    assert list(boxes((), 0, 1)) == [((), ())]
    assert list(boxes((5,), 1, 4)) == [((1,), (3,))]
    assert list(boxes((3, 4), 6, 6)) == []


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (1, 5), (5, 1), (2, 3, 4), (3, 1, 2, 2)], ids=str)
def test_boxes_are_the_range_in_its_order(shape):
    """Of every range: laid end to end they are its elements, and there are few of them."""
    numel = math.prod(shape)
    tensor = torch.arange(numel).view(shape)
    for start in range(numel + 1):
        for stop in range(start, numel + 1):
            found = list(boxes(shape, start, stop))
            parts = [tensor[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].flatten() for box in found]
            assert [int(element) for part in parts for element in part] == list(range(start, stop))
            assert len(found) <= max(1, 2 * len(shape) - 1)


def fit(model: Path, world_size: int, steps: int, **options: Any) -> Any:
    strategy, precision = options.pop("strategy"), options.pop("precision")
    directory = options.pop("directory", None)
    trainer: dict[str, Any] = {"precision": precision, "enable_checkpointing": directory is not None}
    keepers = [ModelCheckpoint(directory, "{step}", every_n_train_steps=1, save_top_k=-1)] if directory else []
    one_batch = frozen_sequences(4)  # the loader is not asked where it was
    return fit_sft(
        model, strategy, world_size, steps=steps, callbacks=keepers, trainer=trainer, sequences=one_batch, **options
    )


@pytest.mark.parametrize(
    ("precision", "before", "after"),
    [("bf16-mixed", True, True), ("bf16-mixed", True, False), ("bf16-true", False, False)],
    ids=["sharded", "to_plain", "bf16_moments"],
)
def test_sixteen_bits_resume(worker_pool, qwen3_dir, tmp_path, precision, before, after):
    """Full-precision copies and moments: bitwise with the same kind of optimizer, and near it with the other."""
    options = {"precision": precision, "world_size": 2, "init_process_group": False}
    first, second = ({"use_distributed_optimizer": sharded} for sharded in (before, after))
    whole = worker_pool.run(fit, qwen3_dir, 2, 2, strategy=first, directory=tmp_path, **options)[0]
    path = str(tmp_path / "step=1.ckpt")
    resumed = worker_pool.run(fit, qwen3_dir, 2, 2, strategy=second, ckpt_path=path, **options)[0]
    for name, weight in whole.weights.items():
        if before == after:
            assert torch.equal(resumed.weights[name], weight), name
        else:  # reduced in another order, then rounded to 8 bits: a unit in the last place here and there
            torch.testing.assert_close(resumed.weights[name], weight, rtol=2**-7, atol=1e-5)
