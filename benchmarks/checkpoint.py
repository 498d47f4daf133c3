"""B5: how long training is blocked by a save beside training, and by one that it waits for: ``checkpoint.py``.

The same run twice, each in a process of its own: once with ``async_save``, once without. Blocked is the time of
`trainer.save_checkpoint`. What a save beside training costs the steps that run meanwhile (they share the cores) stands
apart. Then the last checkpoint is verified and loaded, one after the other, as a run that resumes does.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from common import (
    SHAPES,
    StepLog,
    default_device,
    default_precision,
    facts,
    make_trainer,
    result_path,
    run_child,
    summary,
    timed,
    write_json,
    write_model,
)
from throughput import SameBatch, make_sequences

MOST_UNDISTURBED = 50  # steps between two saves


class Saves(pl.Callback):
    """Saves, takes steps until the save is complete, takes as many undisturbed ones, and saves again."""

    def __init__(self, directory: Path, count: int, warmup: int, device: torch.device) -> None:
        self.directory, self.count, self.warmup, self.device = directory, count, warmup, device
        self.blocked: list[float] = []  # seconds of each call
        self.complete: list[float] = []  # seconds until each was complete
        self.disturbed: list[int] = []  # steps that ran beside a save
        self._started = 0.0
        self._next = warmup
        self._written: list[float] = []

    def path(self, number: int) -> Path:
        """Where a save goes: two names in turn."""
        return self.directory / f"{number % 2}.ckpt"

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        step = trainer.global_step
        if len(self._written) < len(self.blocked):  # one is under way
            self.disturbed.append(step)
        elif len(self.complete) < len(self.blocked):
            self.complete.append(self._written[-1] - self._started)
            beside = sum(1 for found in self.disturbed if found > self._last)
            self._next = step + min(max(2, beside), MOST_UNDISTURBED)
        if step < self._next or len(self._written) < len(self.blocked):
            return
        if len(self.blocked) == self.count:
            trainer.should_stop = True
            return
        self._last, self._started = step, time.perf_counter()
        path = self.path(len(self.blocked))
        self.blocked.append(timed(lambda: trainer.save_checkpoint(path), self.device))
        strategy: Any = trainer.strategy
        note = lambda: self._written.append(time.perf_counter())  # noqa: E731
        strategy.checkpoints.keeper.when_saved(note)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure one way of saving in this process."""
    from megatron.core.optimizer import OptimizerConfig

    from lightning_megatron_rl.checkpoints.manifest import check_files, read_manifest
    from lightning_megatron_rl.modules.sft import SFTModule
    from lightning_megatron_rl.modules.training import TrainingSettings

    torch.set_num_threads(options.threads)
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    sequences = make_sequences(options.sequences, 64, 128, SHAPES[options.shape]["vocab_size"])
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        log, saves = StepLog(device), Saves(Path(scratch), options.saves, options.warmup, device)
        is_async = options.measure == "async"
        most = 10_000  # steps; the callback ends the run
        trainer = make_trainer(
            options.device,
            max_steps=most,
            callbacks=[log, saves],
            precision=options.precision,
            async_save=is_async,
        )
        module = SFTModule(
            str(write_model(Path(scratch) / "model", options.shape)),
            train=TrainingSettings(
                optimizer=OptimizerConfig(lr=1e-5, weight_decay=0.0), max_tokens_per_microbatch=4096
            ),
        )
        trainer.fit(module, SameBatch(sequences, most))
        path = saves.path(len(saves.blocked) - 1)
        manifest = read_manifest(path)
        strategy: Any = trainer.strategy
        verified = [timed(lambda: check_files(path, manifest, verify=True), device) for _ in range(options.loads)]
        strategy.verify_checkpoints = False
        loaded = [timed(lambda: strategy.load_checkpoint(path), device) for _ in range(options.loads)]
    disturbed = set(saves.disturbed)
    steps = dict(enumerate(log.seconds, start=1))
    still = [seconds for step, seconds in steps.items() if step > options.warmup and step not in disturbed]
    usual = statistics.median(still)
    return {
        "way": options.measure,
        "shape": options.shape,
        "parameters": sum(parameter.numel() for parameter in module.model.parameters()),
        "layout": module.strategy.layout.describe(trainer.world_size),
        "precision": options.precision,
        "threads": options.threads,
        "bytes": sum(record["bytes"] for record in manifest["files"].values()),
        "files": len(manifest["files"]),
        "blocked_s": summary(saves.blocked[1:]),  # the first one makes what later ones find
        "first_blocked_s": saves.blocked[0],
        "complete_s": summary(saves.complete[1:]),
        "step_s": summary(still),
        "steps_beside_a_save": len(disturbed),
        "slowed_s_per_save": sum(steps[step] - usual for step in disturbed) / len(saves.blocked),
        "verify_s": summary(verified),
        "load_s": summary(loaded),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    device = default_device()
    parser.add_argument("--device", choices=("cpu", "cuda"), default=device)
    parser.add_argument("--shape", default="0.6b" if device == "cuda" else "60m", help=f"out of {', '.join(SHAPES)}")
    parser.add_argument("--precision", default=default_precision(device))
    parser.add_argument("--saves", type=int, default=6, help="the first is not counted")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--loads", type=int, default=3, help="times that the last checkpoint is verified and loaded")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch, for the steps")
    parser.add_argument("--directory", type=Path, help="where checkpoints are written (default: the temporary folder)")
    parser.add_argument("--timeout", type=float, default=500.0, help="seconds per way")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", choices=("sync", "async"), help="one way in this process (used by itself)")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options)))
        return
    load = os.getloadavg()[0]  # of other processes: nothing of this runs yet
    names = ("device", "shape", "precision", "saves", "loads", "warmup", "sequences", "threads")
    passed = [f"--{name}={getattr(options, name)}" for name in names]
    passed += [f"--directory={options.directory}"] if options.directory else []
    ways = {
        way: run_child("checkpoint.py", [*passed, f"--measure={way}"], options.timeout) for way in ("sync", "async")
    }
    result = {**facts(options.device), "benchmark": "B5 checkpoint", "load_before": load, **ways, **compare(ways)}
    write_json(result_path("checkpoint", options.device, options.out), result)
    print(
        f"{ways['async']['bytes'] / 1e9:.2f} GB: blocked {ways['async']['blocked_s']['median']:.3f} s instead of"
        f" {ways['sync']['blocked_s']['median']:.3f} s ({result['blocked_share']:.1%}), steps meanwhile"
        f" {ways['async']['slowed_s_per_save']:.3f} s longer per save"
    )


def compare(ways: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return the figures of B5.

    Example:
        Blocked 0.1 s instead of 2 s is a share of 0.05; 3 GB in these 2 s are 1.5 GB/s.
    """
    sync, beside = ways["sync"], ways["async"]
    blocked = sync["blocked_s"]["median"]
    return {
        "blocked_share": beside["blocked_s"]["median"] / blocked,
        "blocked_and_slowed_share": (beside["blocked_s"]["median"] + beside["slowed_s_per_save"]) / blocked,
        "sync_gb_per_s": sync["bytes"] / 1e9 / blocked,
        "async_gb_per_s": beside["bytes"] / 1e9 / beside["complete_s"]["median"],
        "verify_share_of_load": beside["verify_s"]["median"] / beside["load_s"]["median"],
    }


if __name__ == "__main__":
    main()
