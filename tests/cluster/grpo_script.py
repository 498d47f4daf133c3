"""A GRPO run as a user writes it, with any engine, for every launcher; `python -m tests.cluster.grpo_script --help`."""

import argparse
import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch.optim import Optimizer

from lightning_megatron_rl.sample import Sample
from tests.training import Recorder

KEPT = ("policy/loss", "policy/grad_norm", "reward/mean", "mismatch/abs_logp_diff")


class Tokens(pl.Callback):
    """Keeps the tokens that this rank's replica trained on, by step."""

    def __init__(self) -> None:
        self.steps: list[list[list[int]]] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: Optimizer) -> None:
        self.steps.append([sample.response_ids for sample in module.last_rollout.samples])


def length(samples: list[Sample]) -> list[float]:
    return [float(sum(sample.response_ids) % 7) for sample in samples]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--urls", nargs="*", default=None)
    parser.add_argument("--ray-engines", type=int, default=0)
    parser.add_argument("--staleness", type=int, default=0)
    options = parser.parse_args()

    from megatron.core.optimizer import OptimizerConfig

    from lightning_megatron_rl.data.prompts import PromptDataModule
    from lightning_megatron_rl.modules.grpo import GRPOModule
    from lightning_megatron_rl.modules.grpo_config import GRPOLossConfig
    from lightning_megatron_rl.modules.streaming import StreamingSettings
    from lightning_megatron_rl.modules.training import TrainingSettings
    from lightning_megatron_rl.rollout.protocol import RolloutEngine, SamplingParams
    from lightning_megatron_rl.rollout.servers.engine import VLLMServers
    from lightning_megatron_rl.rollout.servers.ray_engines import RayEngines
    from lightning_megatron_rl.rollout.vllm.engine import VLLMEngine

    pl.seed_everything(5)
    engine: RolloutEngine
    if options.ray_engines:
        engine = RayEngines(options.ray_engines, device="cpu", max_model_len=64, kv_cache_memory_gb=0.25, num_threads=1)
    elif options.urls is None:
        engine = VLLMEngine(max_model_len=64, kv_cache_memory_gb=0.25, num_threads=1)
    else:
        engine = VLLMServers(options.urls, max_model_len=64)
    recorder, tokens = Recorder(), Tokens()
    trainer = pl.Trainer(
        strategy="megatron",
        accelerator="cpu",
        devices=options.devices,
        num_nodes=options.num_nodes,
        max_steps=options.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[recorder, tokens],
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )
    module = GRPOModule(
        options.model,
        rewards=[length],
        num_generations=4,
        engine=engine,
        sampling=SamplingParams(max_tokens=24),
        streaming=StreamingSettings(max_staleness=options.staleness) if options.staleness else None,
        loss=GRPOLossConfig(correction="tis"),
        train=TrainingSettings(optimizer=OptimizerConfig(lr=1e-3, adam_eps=1e-3), max_tokens_per_microbatch=256),
    )
    trainer.fit(module, PromptDataModule(options.rows, options.model, batch_size=4))
    module.close_engine()
    steps = [{name: step[name] for name in KEPT} for step in recorder.steps]
    result = {"steps": steps, "tokens": tokens.steps, "restarts": recorder.steps[-1]["perf/engine_restarts"]}
    result["links"] = [step.get("perf/sync_link_frac") for step in recorder.steps]
    (options.out / f"{trainer.global_rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
