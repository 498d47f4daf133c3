"""Gradients of a training step in any layout, as a gloo worker of a pool sees them."""

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lightning_megatron_rl.data.packing import TokenSequence
from lightning_megatron_rl.models.layers.moe import MoESettings


class Gradients(pl.Callback):
    """Keeps the gradients of a step, whole and by their Hugging Face names."""

    def __init__(self) -> None:
        self.held: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        from lightning_megatron_rl.verify.gradients import export_gradients

        self.held = {name: tensor.clone() for name, tensor in export_gradients(pl_module)}


def gradients_of(
    models: dict[str, str], layout: dict[str, Any], sequences: list[TokenSequence]
) -> dict[str, tuple[float, float, dict[str, Tensor]]]:
    """Loss, gradient norm and gradients of the first step of each of several models."""
    from tests.training import fit_sft

    results = {}
    world_size = int(os.environ["WORLD_SIZE"])
    for name, directory in models.items():
        experts = any(word in name for word in ("moe", "mixtral", "deepseek", "gpt_oss"))
        callback = Gradients()
        run = fit_sft(
            Path(directory),
            layout,
            world_size,
            steps=1,
            batch_size=len(sequences),
            sequences=sequences,
            callbacks=[callback],
            module={"moe": MoESettings(aux_loss_coeff=0.0)} if experts else {},
        )
        results[name] = run.steps[0]["policy/loss"], run.steps[0]["policy/grad_norm"], callback.held
    return results
