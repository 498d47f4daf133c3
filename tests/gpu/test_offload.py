"""Memory that each part of the trainer's state gives back to the device, as torch counts it, and takes again."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_megatron_rl.strategy.offload import PARTS, tensors_of
from tests.modules.runs import fit_grpo

pytestmark = pytest.mark.deadline(300)
BLOCK = 512  # bytes: what torch rounds a piece of memory up to


class Moves(pl.Callback):
    """Moves one part after the other away after the first step, then everything back."""

    def __init__(self) -> None:
        self.freed: dict[str, tuple[int, int, int]] = {}  # said to be moved, gone from the device, and pieces
        self.back = (0, 0)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        if self.freed:
            return
        whole = torch.cuda.memory_allocated()
        held = strategy.all_chunks, strategy.all_optimizers
        for part in strategy.offloads:
            pieces = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(part, *held)}
            before = torch.cuda.memory_allocated()
            report = strategy.offload([part])
            self.freed[part] = report.num_bytes, before - torch.cuda.memory_allocated(), len(pieces)
        strategy.reload()
        self.back = whole, torch.cuda.memory_allocated()


def offload_in_turn(model: Path, accelerator: str) -> tuple[dict[str, tuple[int, int, int]], tuple[int, int]]:
    moves = Moves()
    strategy = {"offload_while_sampling": list(PARTS)}
    trainer = {"accelerator": accelerator, "precision": "bf16-mixed"}
    fit_grpo(model, strategy, 1, callbacks=[moves], trainer=trainer)
    return moves.freed, moves.back


def test_every_part_frees_what_it_says(gpu_pool, qwen3_dir):
    freed, back = gpu_pool.run(offload_in_turn, qwen3_dir, "cuda", world_size=1, init_process_group=False)[0]
    assert tuple(freed) == PARTS
    for part, (said, gone, pieces) in freed.items():
        assert said > 0, part
        assert said <= gone <= said + pieces * BLOCK, part
    assert back[0] == back[1]
    parameters = freed["parameters"][0]
    assert freed["gradients"][0] == pytest.approx(2 * parameters, rel=0.02), "fp32 beside bf16"
    assert freed["optimizer"][0] == pytest.approx(6 * parameters, rel=0.02), "fp32: main, and two moments"
