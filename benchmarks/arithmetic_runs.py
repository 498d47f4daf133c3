"""Runs on the demo's sums that benchmarks share: one warm start, and many processes side by side on one machine."""

import argparse
import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

sys.path.insert(0, str(Path(__file__).parent))
from gpus import visible

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CONFIGS = ROOT / "configs"
sys.path.insert(0, str(ROOT / "examples" / "demo"))

LEARNING_RATE = 3.0e-4  # at its highest, whatever the demo takes for its shorter schedule
WARM_START_STEPS = 200  # of SFT, likewise
VAL_EVERY = 5  # rollouts between two looks at the held-out problems
ACCURACY = "val/arithmetic/mean_at_1"  # greedy, 500 held-out problems
FIRST_PORT = 20_000  # of the runs' rendezvous: below the ports that the kernel gives out to whoever asks for a free one


@dataclass
class Job:
    """One run in a process of its own; it is done when `result` exists."""

    name: str
    command: list[str]
    result: Path
    finish: Callable[[float], None] | None = None  # writes `result` after so many seconds, if the process does not


def default_device() -> str:
    """Return "cuda" where there is a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def run_jobs(jobs: Sequence[Job], parallel: int, deadline_s: float) -> list[str]:
    """Run those that are not done, `parallel` at a time, until the deadline; return the names of what is left.

    Each process has one CPU thread and writes its output beside its result; those that outlast the deadline are killed
    with all that they have started, and start from their beginning next time.
    """
    end = time.monotonic() + deadline_s
    waiting = [job for job in jobs if not job.result.exists()]
    first_port = FIRST_PORT + os.getpid() % 100 * 100  # two benchmarks at a time do not share them
    with ThreadPoolExecutor(max(parallel, 1)) as pool:
        list(pool.map(lambda pair: _run(*pair, first_port, end), enumerate(waiting)))
    return [job.name for job in jobs if not job.result.exists()]


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that every benchmark of such runs has."""
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "learning", help="directory of all runs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--sft-steps", type=int, default=WARM_START_STEPS, help="of the warm start")
    parser.add_argument("--deadline", type=float, default=24 * 3600, help="seconds until unfinished runs are killed")


def run_missing(jobs: Sequence[Job], environment: Path, device: str, options: argparse.Namespace) -> None:
    """Run what is not done, beside a description of the machine; exit if the deadline leaves some of it."""
    from lightning_megatron_rl.verify.report import describe_environment

    if any(not job.result.exists() for job in jobs):
        write_json(environment, describe_environment(device))
    left = run_jobs(jobs, options.jobs, options.deadline)
    if left:
        sys.exit(f"not done: {', '.join(left)} (logs in {environment.parent}); run again")


def _run(number: int, job: Job, first_port: int, end: float) -> None:
    remaining = end - time.monotonic()
    if remaining <= 0:
        return
    job.result.parent.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        # the communicators of one rank: with NCCL's defaults a run takes 9 GiB of the GPU, so it takes 1
        "NCCL_MAX_NCHANNELS": "1",
        "NCCL_MAX_CTAS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "MASTER_PORT": str(first_port + number),
    }
    if gpus := visible():
        environment["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
    started = time.monotonic()
    with job.result.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *job.command],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(remaining)
        except subprocess.TimeoutExpired:
            code = None
        finally:  # the sampler of a killed run ends with its parent
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    seconds = time.monotonic() - started
    if code == 0 and job.finish is not None:
        job.finish(seconds)
    print(f"{job.name}: {'deadline' if code is None else f'exit code {code}'} after {seconds:.0f} s", flush=True)


# ---- the warm start ------------------------------------------------------------------------------------------------


def warm_start(out: Path, device: str, *, steps: int, deadline_s: float = 600) -> Path:
    """Return the model that every run starts from: the demo's SFT stage, shorter, on one process, made once.

    Raises:
        RuntimeError: it could not be made; names the log.
    """
    from build_model import build_model  # the demo's

    final = out / "sft" / "hf" / "last"
    done = out / "sft" / "done.json"
    if done.exists():
        return final
    build_model(out / "model")
    trainer: dict[str, Any] = {
        "accelerator": device,
        "precision": "32-true",  # on a GPU the command line's default is bf16-mixed
        "max_steps": steps,
        "val_check_interval": steps,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "logger": csv_logger(out, "sft"),
        "callbacks": [{"class_path": "HFExport", "init_args": {"dirpath": str(out / "sft" / "hf")}}],
    }
    changes = {
        "trainer": trainer,
        "model": {"init_args": {"model": str(out / "model"), "train": {"layer_backend": "torch"}}},
        "data": {"init_args": {"tokenizer": str(out / "model")}},
    }
    command = cli_command(CONFIGS / "demo" / "sft.yaml", [], write_overlay(out / "sft.yaml", changes))
    job = Job("warm start", command, done, lambda seconds: write_json(done, {"seconds": seconds}))
    if run_jobs([job], 1, deadline_s):
        raise RuntimeError(f"the warm start could not be made: see {done.with_suffix('.log')}")
    return final


# ---- this project's runs -------------------------------------------------------------------------------------------


def own_job(
    name: str,
    out: Path,
    model: Path,
    *,
    base: Path = CONFIGS / "demo" / "grpo.yaml",
    overlays: Sequence[Path] = (),
    last: Sequence[Path] = (),
    seed: int = 0,
    rollouts: int = 150,
    device: str = "cpu",
    stop_at: float | None = None,
    lr: float = LEARNING_RATE,
) -> Job:
    """Return a run of the command line: the demo's config, overlays, and what the benchmarks change.

    Args:
        name: Of the run and its directory.
        out: Directory of all runs.
        model: The warm start.
        base: The config.
        overlays: Configs on top of it.
        last: Configs on top of what the benchmarks change.
        seed: Of the order of prompts and of sampling.
        rollouts: The learning rate's schedule ends there.
        device: "cpu" or "cuda"; fp32 on both.
        stop_at: End at this held-out accuracy.
        lr: The learning rate at its highest.
    """
    directory = out / name
    callbacks: list[dict[str, Any]] = []
    if stop_at is not None:
        stopping = {"monitor": ACCURACY, "mode": "max", "patience": rollouts, "stopping_threshold": stop_at}
        callbacks.append({"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": stopping})
    changes = {
        "seed_everything": seed,
        "trainer": {
            "accelerator": device,
            "precision": "32-true",
            "max_steps": rollouts,
            "val_check_interval": min(VAL_EVERY, rollouts),
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "logger": csv_logger(out, name),
            "callbacks": callbacks,
        },
        "model": {
            "init_args": {
                "model": str(model),
                "engine": {
                    "class_path": "VLLMEngine",
                    "init_args": {
                        "max_model_len": 64,
                        "max_num_seqs": 1024,
                        "kv_cache_memory_gb": 0.25,
                        "enforce_eager": True,
                        "num_threads": 1,
                    },
                },
                "train": {
                    "layer_backend": "torch",
                    "optimizer": {"lr": lr},
                    "lr_scheduler": {
                        "class_path": "torch.optim.lr_scheduler.OneCycleLR",
                        "init_args": {
                            "max_lr": lr,
                            "total_steps": rollouts,
                            "pct_start": 0.15,
                            "cycle_momentum": False,
                        },
                    },
                },
            }
        },
        "data": {"init_args": {"tokenizer": str(model), "seed": seed}},
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "metrics.csv").unlink(missing_ok=True)  # of a run that was not finished, which this one replaces
    command = cli_command(base, [*overlays, write_overlay(directory / "overlay.yaml", changes)], *last)
    result = directory / "curves.json"
    return Job(name, command, result, lambda seconds: write_json(result, read_run(directory / "metrics.csv", seconds)))


def reference_job(
    name: str, out: Path, model: Path, *, seed: int, rollouts: int, device: str, **settings: float
) -> Job:
    """Return a run of `reference_grpo.py`; `settings` are its `Settings` by name."""
    result = out / name / "curves.json"
    arguments = {"model": model, "out": result, "device": device, "seed": seed, "rollouts": rollouts}
    arguments |= {"val-every": min(VAL_EVERY, rollouts), **settings}
    script = str(Path(__file__).with_name("reference_grpo.py"))
    return Job(name, [script, *(text for key, value in arguments.items() for text in (f"--{key}", str(value)))], result)


def cli_command(base: Path, overlays: Sequence[Path], *last: Path) -> list[str]:
    """Return the arguments of `python` that fit a config on one process; later overlays have the last word."""
    arguments = ["-m", "lightning_megatron_rl", "fit"]
    for config in (base, CONFIGS / "layouts" / "tp1.yaml", *overlays, *last):
        arguments += ["--config", str(config)]
    return arguments


def csv_logger(out: Path, name: str) -> dict[str, Any]:
    """Return the config of a logger that writes `out`/`name`/metrics.csv."""
    return {
        "class_path": "lightning.pytorch.loggers.CSVLogger",
        "init_args": {"save_dir": str(out), "name": name, "version": ""},
    }


def write_overlay(path: Path, changes: dict[str, Any]) -> Path:
    """Write a config."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(changes, sort_keys=False))
    return path


def read_run(path: Path, seconds: float) -> dict[str, Any]:
    """Return the curves of a run from its logger's file, as `reference_grpo.train` returns its own."""
    with path.open() as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]

    def column(name: str) -> list[list[float]]:
        return [[int(row["step"]), row[name]] for row in rows if name in row]

    return {
        # logged in fp32, whose 0.9 is below 0.9
        "accuracy": [[step, round(value, 6)] for step, value in column(ACCURACY)],
        "reward": column("reward/mean"),
        "kl_ref": column("policy/kl_ref"),
        "grad_norm": column("policy/grad_norm"),
        "refill_groups": column("rollout/refill_groups"),
        "abs_logp_diff": column("mismatch/abs_logp_diff"),
        "step_s": column("time/step_s"),
        "staleness_mean": column("rollout/staleness_mean"),
        "staleness_max": column("rollout/staleness_max"),
        "seconds": seconds,
    }


def write_json(path: Path, value: Any) -> None:
    """Write a file as a whole, so that a run that is interrupted leaves none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    text = json.dumps(value, indent=2)
    # a curve's point becomes one line; no string holds a newline
    text = re.sub(r"\[\n +([^\s\[\]{}]+),\n +([^\s\[\]{}]+)\n +\]", r"[\1, \2]", text)
    partial.write_text(text + "\n")
    partial.replace(path)


def first_reaching(curve: Sequence[Sequence[float]], threshold: float) -> int | None:
    """Return the first rollout count of a curve whose value is at least `threshold`, None if there is none.

    Example:
        ``first_reaching([[0, 0.3], [5, 0.9]], 0.85) == 5``
    """
    return next((int(count) for count, value in curve if value >= threshold), None)
