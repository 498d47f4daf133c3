"""The memory plan of a module as it is configured; on a CPU nothing is refused."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_megatron_rl.devices.memory import GIB
from lightning_megatron_rl.modules.reference import ReferenceSettings
from lightning_megatron_rl.rollout.vllm import VLLMEngine
from tests.modules.runs import ReplayEngine, fit_grpo


class Plans(pl.Callback):
    """Makes plans of the module that is about to train, with engines of its own."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        from lightning_megatron_rl.modules.start import make_plan

        memory = {"free": 80 * GIB, "total": 80 * GIB}
        engines = {"replayed": ReplayEngine(), "vllm": VLLMEngine(kv_cache_memory_gb=2.0), "share": VLLMEngine()}
        for name, engine in engines.items():
            plan = make_plan(pl_module, training=True, engine=engine, frozen_copies=pl_module.frozen_copies, **memory)
            self.found[name] = {part.name: part.size for part in (*plan.trainer, *plan.sampler)}
        self.found["parameters"] = sum(parameter.numel() for parameter in pl_module.model.parameters())


def plans(model: Path, world_size: int, strategy: dict[str, Any]) -> dict[str, Any]:
    callback = Plans()
    module = {"reference": ReferenceSettings(offload=False)}
    fit_grpo(model, strategy, world_size, steps=1, callbacks=[callback], loss={"kl_coef": 0.1}, module=module)
    return callback.found


@pytest.mark.parametrize(
    ("world_size", "strategy", "shards", "replicas"),
    [(1, {}, 1, 1), (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, 2, 1), (2, {}, 1, 2)],
    ids=["one", "tp2", "dp2"],
)
def test_plan_counts_what_the_module_holds(worker_pool, qwen3_dir, world_size, strategy, shards, replicas):
    found = worker_pool.run(plans, qwen3_dir, world_size, strategy, world_size=world_size, init_process_group=False)[0]
    here = found["replayed"]
    # norms are on every rank and counted as divided: less than 2 % of this model
    assert here["trainer: weights"] == pytest.approx(4 * found["parameters"], rel=0.02)  # fp32
    assert here["trainer: gradients"] == here["trainer: weights"] == here["trainer: reference"]
    assert here["trainer: optimizer state"] == 2 * here["trainer: weights"] / replicas
    assert not [name for name in here if name.startswith("sampler")]  # recorded samples take no memory
    assert found["vllm"]["sampler: key/value cache"] == 2 * GIB
    assert found["vllm"]["sampler: weights"] == here["trainer: weights"] * shards / 2  # whole, in 16 bits
    assert found["share"]["sampler: weights and cache"] == 40 * GIB
