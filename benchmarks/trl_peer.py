"""TRL's side of B1, B3 and B4: its GRPOTrainer with the same model, prompts, lengths, dtypes and optimizer.

Used by weight_sync.py, grpo_step.py and long_tail.py; prints one line of JSON. On CUDA vLLM runs colocated, in TRL's
fastest mode for a model that fits beside it (no sleep); on a CPU TRL generates with Transformers: no comparison, only a
dry run. With --devices it runs data-parallel under torchrun, each process with a vLLM of its own.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import SHAPES, TokenPrompts, default_device, summary, synchronize, timed, token_reward, write_model
from ours import add_arguments
from response_lengths import LongTail, force_lengths
from work_done import TRANSFORMERS_PROJECTION, ComputeDtype, optimizer_work

from lightning_megatron_rl.parallel.rendezvous import LOOPBACK
from lightning_megatron_rl.verify.pool import free_port

Rewarded = tuple[set[tuple[int, ...]], int, int]  # of a step, in one process: prompts, samples, tokens of responses


class Phase:
    """Calls a function and keeps the seconds of each step."""

    def __init__(self, function: Callable[..., Any], device: torch.device) -> None:
        self.function, self.device = function, device
        self.seconds = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        synchronize(self.device)
        started = time.perf_counter()
        result = self.function(*args, **kwargs)
        synchronize(self.device)
        self.seconds += time.perf_counter() - started
        return result

    def take(self) -> float:
        """Return the seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run and return times, losses and the work that was done."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    on_cuda = options.device == "cuda"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_cuda else torch.device("cpu")
    samples = options.prompts * options.generations
    steps = options.warmup + options.steps
    vocab_size = SHAPES[options.shape]["vocab_size"]
    if on_cuda:
        torch.cuda.set_device(device)  # the model is drawn there
    directory = write_model(Path(tempfile.mkdtemp()) / "model", options.shape)
    if on_cuda:
        torch.cuda.empty_cache()
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    rows = TokenPrompts(options.prompts * steps, options.prompt_tokens, vocab_size)()
    rewarded: list[Rewarded] = []

    def reward(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        if prompts:
            distinct = {tuple(tokenizer(prompt)["input_ids"]) for prompt in prompts}
            rewarded.append((distinct, len(completion_ids), sum(len(ids) for ids in completion_ids)))
        return [token_reward(ids) for ids in completion_ids]

    fraction = None
    if on_cuda:  # weights, the same cache as ours, and what vLLM profiles for its own activations
        total = torch.cuda.get_device_properties(0).total_memory
        weights = 2 * sum(p.numel() for p in _load(directory).parameters())
        fraction = (weights + options.cache_gb * 2**30 + 4 * 2**30) / total
    config = GRPOConfig(
        **settings(options),
        per_device_train_batch_size=options.trl_batch,
        gradient_accumulation_steps=samples // options.trl_batch // options.devices,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        beta=0.0,
        num_iterations=1,
        shuffle_dataset=False,
        use_vllm=on_cuda,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=fraction or 0.3,
        vllm_max_model_length=options.prompt_tokens + options.response_tokens + 1,
        generation_kwargs={"ignore_eos": True} if on_cuda else {"min_new_tokens": options.response_tokens},
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=2.0,
        dataloader_num_workers=0,
    )
    times: list[dict[str, float]] = []
    phases: dict[str, Phase] = {}

    class Clock(TrainerCallback):
        """Times whole steps: TRL samples inside the first micro-batch of a step."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            synchronize(device)
            self.started = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            synchronize(device)
            row = {name: phase.take() for name, phase in phases.items()}
            times.append({"step": time.perf_counter() - self.started, **row})

    trainer = GRPOTrainer(
        model=str(directory),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    sync = None
    if on_cuda:
        engine = trainer.vllm_generation
        if options.long_tail:
            force_lengths(engine.llm, LongTail(options.response_tokens))
        if options.syncs:
            for _ in range(3):
                engine.sync_weights()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            seconds = [timed(engine.sync_weights, device) for _ in range(options.syncs)]
            count = 2 * sum(parameter.numel() for parameter in trainer.model.parameters())
            extra = torch.cuda.max_memory_allocated() - before
            sync = {"seconds": summary(seconds), "bytes": count, "extra_bytes": extra}
        phases["weight_sync"] = engine.sync_weights = Phase(engine.sync_weights, device)
        phases["rollout"] = engine.generate = Phase(engine.generate, device)
    compute = ComputeDtype(trainer.model, TRANSFORMERS_PROJECTION)
    trainer.train()
    kept = times[options.warmup :]
    rest = [row["step"] - sum(row[name] for name in phases) for row in kept]
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return {
        "who": "TRL GRPOTrainer",
        "devices": options.devices,
        "shape": options.shape,
        "step_s": summary([row["step"] for row in kept]),
        "seconds": [row["step"] for row in times],
        "phases": {
            **{name: summary([row[name] for row in kept]) for name in phases},
            "everything else": summary(rest),
        },
        "losses": losses,
        "rewards": [row["reward"] for row in trainer.state.log_history if "reward" in row],
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30 if on_cuda else None,
        "sync": sync,
        "work": {
            **work_of_all(rewarded),
            "prompt_tokens": options.prompt_tokens,
            "optimizer_steps": trainer.state.global_step,
            "compute_dtype": compute.name(),
            **optimizer_work([getattr(trainer.optimizer, "optimizer", trainer.optimizer)]),  # Accelerate wraps it
        },
    }


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return what TRL's trainers are both told, the synchronous one and the asynchronous one."""
    on_cuda = options.device == "cuda"
    return {
        "output_dir": tempfile.mkdtemp(),
        "num_generations": options.generations,
        "max_completion_length": options.response_tokens,
        "max_steps": options.warmup + options.steps,
        "learning_rate": 1e-6,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused" if on_cuda else "adamw_torch",
        "bf16": options.precision == "bf16-mixed",
        "gradient_checkpointing": False,
        "temperature": 1.0,
        "use_cpu": not on_cuda,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 0,
    }


def work_of_all(rewarded: list[Rewarded]) -> dict[str, Any]:
    """Return what all processes have done in each step, as our own side tells it."""
    every: list[list[Rewarded]] = [rewarded]
    if torch.distributed.is_initialized():
        every = [[] for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather_object(every, rewarded)
    digest = hashlib.sha256()
    samples, tokens = [], []
    for parts in zip(*every, strict=True):  # of a step
        digest.update(repr(sorted(set().union(*(prompts for prompts, _, _ in parts)))).encode())
        samples.append(sum(count for _, count, _ in parts))
        tokens.append(sum(count for _, _, count in parts))
    return {
        "samples_per_step": samples,
        "response_tokens_per_step": tokens,
        "prompts_sha256": digest.hexdigest(),
    }


def _load(directory: Path) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, default_device())
    parser.add_argument("--long-tail", action="store_true", help="lognormal lengths, up to --response-tokens")
    options = parser.parse_args()
    if options.prompts % options.devices:
        parser.error(f"--prompts {options.prompts} over --devices {options.devices}: each has as many")
    if options.devices > 1 and "LOCAL_RANK" not in os.environ:
        # by loopback, also on a host that does not know its own name
        address = ["--master-addr", LOOPBACK, "--master-port", str(free_port())]
        torchrun = ["-m", "torch.distributed.run", *address, "--nproc-per-node", str(options.devices)]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        sys.exit(subprocess.run([sys.executable, *torchrun, *sys.argv], env=environment, check=False).returncode)
    result = measure(options)
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        print(json.dumps(result), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # torchrun ends the others with the first
    os._exit(0)  # how long vLLM takes to shut down in TRL's process is not what is measured


if __name__ == "__main__":
    main()
