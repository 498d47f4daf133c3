"""A real run: SFT warm start, then GRPO on sums and differences of long numbers: ``python benchmarks/real_run.py``.

A Qwen3 of 100 million parameters from its config, with the demo's character tokenizer; nothing is downloaded. SFT
stops at a held-out loss at which answers still vary between right and wrong; GRPO does the rest with a verifiable
reward. All phases run on the same device. With --stage sft, then --stage grpo, the two parts run one by one, in the
same --work and perhaps on other devices. Leaves accuracy on held-out problems before and after, the mismatch of
trainer and sampler, and seconds per phase as JSON with a picture. On a CPU everything is smaller: a dry run.
"""

import argparse
import hashlib
import json
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import ROOT, default_device, default_precision, facts, result_path, write_json
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only

sys.path.insert(0, str(ROOT / "examples" / "demo"))
from build_model import build_model
from report import column, last_value, read_metrics

PHASES = ("weight_sync", "rollout", "reward", "old_logp", "ref_logp", "update")
SIZES = {  # 100 million parameters on a GPU; on a CPU the demo's
    "cuda": {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 14}
    | {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 128},
    "cpu": {},
}
ACCURACY = "val/arithmetic/mean_at_1"
WARM_START = "sft.json"  # in the working directory: what the first stage did


def make_trainer(options: argparse.Namespace, **settings: Any) -> Trainer:
    """Return a Trainer of this run."""
    from lightning_megatron_rl.strategy.megatron import MegatronStrategy

    strategy = MegatronStrategy(
        tensor_model_parallel_size=options.tensor_parallel,
        expert_model_parallel_size=options.expert_parallel,
        sequence_parallel=options.tensor_parallel > 1,
    )
    return Trainer(
        accelerator=options.device,
        devices=options.devices,
        strategy=strategy,
        precision=default_precision(options.device),  # type: ignore[arg-type]
        gradient_clip_val=1.0,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        inference_mode=False,
        **settings,
    )


def build(directory: Path, options: argparse.Namespace) -> None:
    """Write the model that training starts from: dense, or with experts a quarter as wide, of which a token takes two.

    With eight experts it has about twice the parameters of the dense one, and half as many at work.
    """
    build_model(directory, **SIZES[options.device])
    if not options.experts:
        return
    from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    dense = AutoConfig.from_pretrained(directory).to_dict()
    sizes = {
        name: dense[name]
        for name in Qwen3MoeConfig().to_dict()
        if name in dense and name not in ("model_type", "architectures")
    }
    experts = {"num_experts": options.experts, "num_experts_per_tok": 2, "norm_topk_prob": True}
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**sizes, **experts, moe_intermediate_size=dense["intermediate_size"] // 4)
    Qwen3MoeForCausalLM(config).save_pretrained(directory)


def rows(split: Any, options: argparse.Namespace) -> Any:
    """Return the problems of a split."""
    from lightning_megatron_rl.data.arithmetic import ArithmeticRows

    size = options.problems if split == "train" else options.held_out
    return ArithmeticRows(split, size, num_digits=options.digits, subtraction=True, lowest_digit_first=True)


def warm_start(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Train by SFT until the held-out loss is below the threshold; write the model to ``work/warm``."""
    from megatron.core.optimizer import OptimizerConfig

    from lightning_megatron_rl.data.sft import SFTDataModule
    from lightning_megatron_rl.models.hf.files import num_weights
    from lightning_megatron_rl.modules.sft import SFTModule
    from lightning_megatron_rl.modules.training import TrainingSettings

    if not (work / "model").exists():  # of several processes the first has made it before it starts the others
        build(work / "model", options)
    module = SFTModule(
        str(work / "model"),
        train=TrainingSettings(
            optimizer=OptimizerConfig(lr=options.sft_lr, weight_decay=0.1, adam_beta2=0.98),
            lr_scheduler=partial(torch.optim.lr_scheduler.LinearLR, start_factor=0.05, total_iters=30),
            max_tokens_per_microbatch=32_768 if options.device == "cuda" else 8192,
        ),
    )
    data = SFTDataModule(
        train=rows("train", options),
        val={"arithmetic": rows("val", options)},
        tokenizer=str(work / "model"),
        completion_column="answer",
        batch_size=options.sft_batch,
        val_batch_size=options.held_out,
        max_length=48,
    )
    stop = EarlyStopping("val/loss", stopping_threshold=options.sft_loss, patience=10**6, check_finite=True)
    logger = CSVLogger(work, name="sft", version="")
    started = time.perf_counter()
    trainer = make_trainer(
        options, max_steps=options.sft_steps, val_check_interval=options.sft_check, callbacks=[stop], logger=logger
    )
    trainer.fit(module, data)
    module.save_pretrained(work / "warm")
    digest = hashlib.sha256()
    for part in sorted((work / "warm").glob("*.safetensors")):
        digest.update(part.read_bytes())
    losses = column(read_metrics(Path(logger.log_dir) / "metrics.csv"), "val/loss")
    return {
        "steps": trainer.global_step,
        "seconds": time.perf_counter() - started,
        "val_loss": losses[1][-1] if losses[1] else None,
        "parameters": num_weights(work / "warm"),  # of the whole model, of which a rank has a part
        "sha256": digest.hexdigest(),  # of what GRPO starts from: runs with the same are comparable
    }


def reinforce(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Train by GRPO from ``work/warm``; return accuracies and every logged step."""
    from megatron.core.optimizer import OptimizerConfig

    from lightning_megatron_rl.data.prompts import PromptDataModule
    from lightning_megatron_rl.modules.grpo import GRPOModule
    from lightning_megatron_rl.modules.grpo_config import GRPOLossConfig
    from lightning_megatron_rl.modules.streaming import StreamingSettings
    from lightning_megatron_rl.modules.training import TrainingSettings
    from lightning_megatron_rl.rewards import ExactMatch
    from lightning_megatron_rl.rollout.protocol import SamplingParams
    from lightning_megatron_rl.rollout.vllm.engine import VLLMEngine

    module = GRPOModule(
        str(work / "warm"),
        rewards=[ExactMatch()],
        num_generations=8,
        updates_per_rollout=2,
        sampling=SamplingParams(temperature=1.0, max_tokens=options.digits + 3),
        loss=GRPOLossConfig(clip_high=0.28, kl_coef=0.001),
        engine=VLLMEngine(
            max_model_len=64,
            max_num_seqs=1024,
            kv_cache_memory_gb=4.0 if options.device == "cuda" else 0.25,
            devices=[options.devices] if options.separate and options.device == "cuda" else None,
        ),
        streaming=StreamingSettings(options.bound, placement="separate" if options.separate else "auto"),
        train=TrainingSettings(
            optimizer=OptimizerConfig(lr=options.grpo_lr, weight_decay=0.0, adam_beta2=0.98),
            lr_scheduler=partial(
                torch.optim.lr_scheduler.OneCycleLR,
                max_lr=options.grpo_lr,
                total_steps=options.rollouts + 1,
                pct_start=0.1,
                cycle_momentum=False,
            ),
            max_tokens_per_microbatch=32_768 if options.device == "cuda" else 8192,
        ),
    )
    data = PromptDataModule(
        train=rows("train", options),
        val={"arithmetic": rows("val", options)},
        tokenizer=str(work / "warm"),
        batch_size=options.prompts,
        val_batch_size=options.held_out,
        max_prompt_length=32,
    )
    (before,) = make_trainer(options, logger=False).validate(module, data, verbose=False)
    logger = CSVLogger(work, name=f"grpo_{options.bound}", version="")
    started = time.perf_counter()
    trainer = make_trainer(
        options,
        max_steps=options.rollouts,
        val_check_interval=options.check,
        logger=logger,
        max_time=None if options.max_minutes is None else timedelta(minutes=options.max_minutes),
    )
    trainer.fit(module, data)
    seconds = time.perf_counter() - started
    (after,) = make_trainer(options, logger=False).validate(module, data, verbose=False)
    module.close_engine()
    return {
        "before": before[ACCURACY],
        "after": after[ACCURACY],
        "seconds": seconds,
        "layout": trainer.strategy.layout.describe(trainer.world_size) + stream(options),
        "steps": read_metrics(Path(logger.log_dir) / "metrics.csv"),
    }


def stream(options: argparse.Namespace) -> str:
    """Return how rollouts were sampled, to stand behind the layout, if they were sampled ahead."""
    place = ", sampler beside it" if options.separate else ""
    return f", staleness at most {options.bound}{place}" if options.bound else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    device = default_device()
    on_cuda = device == "cuda"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=device)
    parser.add_argument("--devices", type=int, default=1, help="processes, one GPU each")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--experts", type=int, default=0, help="of each layer; 0 for a dense model")
    parser.add_argument("--expert-parallel", type=int, default=1)
    parser.add_argument("--digits", type=int, default=5 if on_cuda else 2, help="of an operand, at most")
    parser.add_argument("--problems", type=int, default=60_000 if on_cuda else 3500)
    parser.add_argument("--held-out", type=int, default=1000 if on_cuda else 500)
    parser.add_argument("--sft-steps", type=int, default=2000 if on_cuda else 300, help="at most")
    parser.add_argument("--sft-batch", type=int, default=512 if on_cuda else 256)
    parser.add_argument("--sft-lr", type=float, default=3e-4 if on_cuda else 2e-3)
    parser.add_argument(
        "--sft-loss", type=float, default=0.35 if on_cuda else 0.15, help="held-out loss at which SFT stops"
    )
    parser.add_argument("--sft-check", type=int, default=20)
    parser.add_argument("--rollouts", type=int, default=200 if on_cuda else 40)
    parser.add_argument("--prompts", type=int, default=128, help="per rollout; 8 samples each")
    parser.add_argument("--grpo-lr", type=float, default=5e-5 if on_cuda else 3e-4)
    parser.add_argument("--bound", type=int, default=0, help="of staleness; above 0 rollouts are sampled ahead")
    parser.add_argument("--separate", action="store_true", help="beside training, on the GPU behind the trainer's")
    parser.add_argument("--check", type=int, default=25 if on_cuda else 10, help="rollouts between validations")
    parser.add_argument("--max-minutes", type=float, help="of GRPO")
    parser.add_argument("--stage", choices=("both", "sft", "grpo"), default="both")
    parser.add_argument("--work", type=Path, help="directory of models and logs; needed by several processes or stages")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if (options.devices > 1 or options.stage != "both") and options.work is None:
        parser.error(
            f"--devices={options.devices} --stage={options.stage}: processes and stages share a directory: name one"
            " with --work"
        )
    if options.separate and not options.bound:
        parser.error("--separate without --bound: a sampler beside training samples ahead; give --bound 1 or more")
    if options.stage == "grpo" and not (options.work / WARM_START).exists():
        parser.error(f"--stage=grpo starts from what --stage=sft leaves: there is no {options.work / WARM_START}")
    started = time.perf_counter()
    seed_everything(1234, verbose=False)
    with tempfile.TemporaryDirectory() as directory:
        work = options.work or Path(directory)
        if options.stage != "grpo":
            sft = warm_start(options, work)
            print(f"SFT: {sft['steps']} steps, {sft['seconds']:.0f} s, val/loss {sft['val_loss']}", flush=True)
            if rank_zero_only.rank == 0:
                write_json(work / WARM_START, sft)
        if options.stage == "sft":
            return
        run = reinforce(options, work)
        if rank_zero_only.rank != 0:
            return
        sft = json.loads((work / WARM_START).read_text())
    steps = run["steps"]
    mismatch = column(steps, "mismatch/abs_logp_diff")[1]
    result = {
        **facts(options.device),
        "benchmark": "real run",
        "task": f"sums and differences of numbers of up to {options.digits} digits, lowest digit first",
        "parameters": sft["parameters"],
        "experts": options.experts,
        "layout": run["layout"],
        "samples_per_rollout": options.prompts * 8,
        "sft": sft,
        "rollouts": len(mismatch),
        "accuracy_before": run["before"],
        "accuracy_after": run["after"],
        "held_out_problems": options.held_out,
        "mismatch_mean": statistics.mean(mismatch),
        "mismatch_worst": max(mismatch),
        "grpo_seconds": run["seconds"],
        "total_seconds": time.perf_counter() - started,
        "phase_seconds": {name: sum(column(steps, f"time/{name}_s")[1]) for name in PHASES},
        "step_s_median": statistics.median(column(steps, "time/step_s")[1]),
        "peak_memory_gib": last_value(steps, "perf/peak_mem_gb") * 1e9 / 2**30,
        "curves": {
            name: column(steps, name) for name in ("reward/mean", ACCURACY, "policy/kl_ref", "mismatch/abs_logp_diff")
        },
    }
    path = result_path("real_run", options.device, options.out)
    write_json(path, result)
    plot(result, path.with_suffix(".png"))
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in result["phase_seconds"].items())
    print(f"accuracy {run['before']:.3f} -> {run['after']:.3f} in {result['rollouts']} rollouts; {phases}")
    print(f"mismatch mean {result['mismatch_mean']:.5f}, worst {result['mismatch_worst']:.5f}")
    print(f"total {result['total_seconds']:.0f} s")


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw reward, accuracy, KL and mismatch over the rollouts."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curves = result["curves"]
    figure, ((reward, accuracy), (kl, mismatch)) = plt.subplots(2, 2, figsize=(10, 6), sharex=True)
    reward.plot(*curves["reward/mean"])
    reward.set(title="mean reward of training rollouts", ylim=(0, 1.02))
    steps, values = curves[ACCURACY]
    accuracy.plot([0, *steps], [result["accuracy_before"], *values], marker="o", color="tab:green")
    accuracy.set(title=f"accuracy on {result['held_out_problems']} held-out problems (greedy)", ylim=(0, 1.02))
    kl.plot(*curves["policy/kl_ref"], color="tab:purple")
    kl.set(title="KL to the reference policy (k3)", xlabel="rollouts")
    mismatch.plot(*curves["mismatch/abs_logp_diff"], color="tab:red")
    mismatch.set(title="|log-prob trainer − log-prob sampler|", xlabel="rollouts", yscale="log")
    for axes in (reward, accuracy, kl, mismatch):
        axes.grid(alpha=0.3)
    figure.suptitle(
        f"{result['parameters'] / 1e6:.0f} M parameters on {result['device']}: {result['task']}", fontsize=10
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
