"""B2: tokens per second and MFU of updates and log-probs: ``python benchmarks/throughput.py --shapes 0.6b,4b``.

Packed micro-batches of sequences with mixed lengths, random weights. An update is forward, backward and optimizer
step; log-probs are one forward pass with entropy. MFU counts the model's operations (three forward passes per update,
none for recompute) against the data sheet and a measured matrix product. Each shape runs in a process of its own, or in
one per GPU. With --profile one more update and pass run under torch's profiler, after the measured ones.
"""

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from common import (
    SHAPES,
    StepLog,
    add_dispatcher_argument,
    add_model_arguments,
    default_device,
    default_precision,
    dispatcher_arguments,
    facts,
    how_trained,
    make_optimizer,
    make_trainer,
    measure_peaks,
    model_arguments,
    model_config,
    model_directory,
    own_device,
    prepare,
    result_path,
    run_child,
    summary,
    timed,
    write_json,
    write_model,
)
from lightning.pytorch.utilities import rank_zero_only
from profiles import Profile


def make_sequences(count: int, shortest: int, longest: int, vocab_size: int) -> list[Any]:
    """Return sequences of mixed lengths, all tokens but the first trained on."""
    from lightning_megatron_rl.data.packing import TokenSequence

    generator = torch.Generator().manual_seed(0)
    sequences = []
    for length in torch.randint(shortest, longest + 1, (count,), generator=generator).tolist():
        token_ids = torch.randint(3, vocab_size, (length,), generator=generator)
        sequences.append(TokenSequence(token_ids, torch.arange(length) > 0))
    return sequences


class SameBatch(pl.LightningDataModule):
    """The same global batch in each step; each replica gets its part."""

    def __init__(self, sequences: list[Any], steps: int) -> None:
        super().__init__()
        self.sequences, self.steps = sequences, steps
        self.batch_size, self.max_length = len(sequences), max(len(sequence) for sequence in sequences)

    def train_dataloader(self) -> Any:
        shard = self.trainer.distributed_sampler_kwargs
        mine = self.sequences[shard["rank"] :: shard["num_replicas"]]
        return torch.utils.data.DataLoader([mine] * self.steps, batch_size=None, shuffle=False)


class ScoreTimes(pl.Callback):
    """Times log-prob passes over the same batch when the updates are done."""

    def __init__(self, sequences: list[Any], repeats: int, warmup: int, device: torch.device) -> None:
        self.sequences, self.repeats, self.warmup, self.device = sequences, repeats, warmup, device
        self.seconds: list[float] = []
        self.peak_bytes = 0

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if self.device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device)
        mine = self.mine(trainer)
        times = [timed(lambda: pl_module.score(mine), self.device) for _ in range(self.warmup + self.repeats)]
        self.seconds = times[self.warmup :]

    def mine(self, trainer: pl.Trainer) -> list[Any]:
        """This replica's sequences."""
        shard = trainer.distributed_sampler_kwargs
        return self.sequences[shard["rank"] :: shard["num_replicas"]]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure one shape in this process."""
    from megatron.core.utils import get_model_config

    from lightning_megatron_rl.models.flops import sequence_flops
    from lightning_megatron_rl.models.hf.files import num_weights
    from lightning_megatron_rl.modules.sft import SFTModule
    from lightning_megatron_rl.modules.start import make_plan
    from lightning_megatron_rl.modules.training import TrainingSettings

    device = own_device(options.device)
    prepare(options.device, options.measure, options.layer_backend)
    peaks = measure_peaks(device)
    free, total = torch.cuda.mem_get_info() if options.device == "cuda" else (0, 0)
    sequences = make_sequences(
        options.sequences, options.shortest, options.longest, SHAPES[options.measure]["vocab_size"]
    )
    log = StepLog(device)
    scores = ScoreTimes(sequences, options.steps, 1, device)
    steps = options.warmup + options.steps
    profile = [Profile(steps, options.profile)] if options.profile else []
    trainer = make_trainer(
        options.device,
        devices=options.devices,
        max_steps=steps + len(profile),
        callbacks=[log, *profile, scores],
        precision=options.precision,
        use_distributed_optimizer=options.precision != "bf16-true",
        tensor_model_parallel_size=options.tensor_parallel,
        pipeline_model_parallel_size=options.pipeline_parallel,
        context_parallel_size=options.context_parallel,
        sequence_parallel=options.tensor_parallel > 1,
        expert_model_parallel_size=options.expert_parallel,
        expert_tensor_parallel_size=1 if options.expert_parallel > 1 else None,
    )
    with tempfile.TemporaryDirectory() as directory:
        module = SFTModule(
            str(write_model(model_directory(options.model, Path(directory)), options.measure, options.longest)),
            train=TrainingSettings(
                optimizer=make_optimizer(1e-5, options.moments),
                max_tokens_per_microbatch="auto" if options.auto else options.max_tokens,
                recompute="auto" if options.auto else "none",
                layer_backend=options.layer_backend,
                logprob_chunk_size=options.logprob_chunk,
                model_config=model_config(options),
            ),
        )
        if options.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()  # of drawing the weights
        trainer.fit(module, SameBatch(sequences, steps + len(profile)))
        parameters = num_weights(Path(module.hf_model.path))
        for written in profile:
            written.record("log-probs", partial(module.score, scores.mine(trainer)))
        plan = make_plan(module, training=True, engine=None, frozen_copies=0, free=free, total=total)
    linear, quadratic = sequence_flops(get_model_config(module.model[0]), module.hf_model.config.vocab_size)
    lengths = [len(sequence) for sequence in sequences]
    forward = sum(linear * length + quadratic * length**2 for length in lengths)
    world = trainer.world_size
    update, score = log.seconds[options.warmup : steps], scores.seconds

    def rates(seconds: list[float], passes: int) -> dict[str, Any]:
        flops = [passes * forward / value / world for value in seconds]
        return {
            "seconds": summary(seconds),
            "tokens_per_s_per_gpu": summary([sum(lengths) / value / world for value in seconds]),
            "mfu_measured": summary([value / peaks["measured_flops"] for value in flops]),
            "mfu_spec": summary([value / peaks["spec_flops"] for value in flops]) if peaks["spec_flops"] else None,
        }

    return {
        "shape": options.measure,
        "parameters": parameters,
        "layout": module.strategy.layout.describe(world),
        "precision": options.precision,
        **how_trained(module, options),
        "moments": options.moments,
        "tokens_per_update": sum(lengths),
        "lengths": {"shortest": min(lengths), "longest": max(lengths), "sequences": len(lengths)},
        "logprob_chunk_size": options.logprob_chunk,
        "update": rates(update, 3),
        "logprobs": rates(score, 1),
        "peak_memory_gib": scores.peak_bytes / 2**30 if options.device == "cuda" else None,
        "planned_memory_gib": plan.needed / 2**30,
        "plan": plan.describe().splitlines(),
        "losses": [step["policy/loss"] for step in log.steps],
        "peaks": peaks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    device = default_device()
    on_cuda = device == "cuda"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=device)
    parser.add_argument("--shapes", default="0.6b" if on_cuda else "tiny", help=f"out of {', '.join(SHAPES)}")
    parser.add_argument("--precision", default=default_precision(device))
    parser.add_argument("--layer-backend", default="auto")
    add_model_arguments(parser)
    add_dispatcher_argument(parser)
    parser.add_argument("--devices", type=int, default=1, help="processes, one GPU each")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--pipeline-parallel", type=int, default=1)
    parser.add_argument("--context-parallel", type=int, default=1, help="ranks that share each sequence")
    parser.add_argument("--expert-parallel", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=256 if on_cuda else 64)
    parser.add_argument("--shortest", type=int, default=128 if on_cuda else 16)
    parser.add_argument("--longest", type=int, default=1024 if on_cuda else 128)
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=16_384 if on_cuda else 2048,
        help="per micro-batch, of all ranks that share it: at least --longest",
    )
    parser.add_argument(
        "--logprob-chunk",
        type=int,
        default=2048,
        help="tokens whose logits exist at one time; with no more in a micro-batch they are kept for backward",
    )
    parser.add_argument("--auto", action="store_true", help="the planner chooses --max-tokens and --recompute")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds per shape")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--profile", type=Path, help="file for tables of torch's profiler, of rank 0; one shape")
    parser.add_argument("--measure", help="measure one shape in this process (used by itself)")
    options = parser.parse_args()
    if options.measure:
        result = measure(options)
        if rank_zero_only.rank == 0:
            print(json.dumps(result))
        return
    names = (
        "device",
        "precision",
        "layer-backend",
        "steps",
        "warmup",
        "sequences",
        "shortest",
        "longest",
        "max-tokens",
        "logprob-chunk",
        "devices",
        "tensor-parallel",
        "pipeline-parallel",
        "context-parallel",
        "expert-parallel",
    )
    passed = [f"--{name}={getattr(options, name.replace('-', '_'))}" for name in names]
    passed += [f"--profile={options.profile.absolute()}"] if options.profile else []
    passed += [*model_arguments(options), *dispatcher_arguments(options), *(["--auto"] if options.auto else [])]
    rows = []
    for shape in options.shapes.split(","):
        rows.append(run_child("throughput.py", [*passed, f"--measure={shape}"], options.timeout))
        print(table_row(rows[-1]), flush=True)
    path = result_path("throughput", options.device, options.out)
    write_json(path, {**facts(options.device), "benchmark": "B2 throughput", "rows": rows})
    plot(rows, path.with_suffix(".png"))


def table_row(row: dict[str, Any]) -> str:
    """Return a measured shape as one line."""
    update, logprobs = row["update"], row["logprobs"]
    memory = row["peak_memory_gib"]
    return (
        f"{row['shape']:8s} update {update['tokens_per_s_per_gpu']['median']:9.0f} tok/s"
        f" MFU {update['mfu_measured']['median']:.3f}"
        f" | log-probs {logprobs['tokens_per_s_per_gpu']['median']:9.0f} tok/s"
        f" MFU {logprobs['mfu_measured']['median']:.3f} | peak {'-' if memory is None else f'{memory:.1f}'} GiB"
        f" (planned {row['planned_memory_gib']:.1f}) | loss {row['losses'][0]:.3f} -> {row['losses'][-1]:.3f}"
    )


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw tokens per second of each shape."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.4))
    for offset, name, color in ((-0.2, "update", "tab:blue"), (0.2, "logprobs", "tab:orange")):
        values = [row[name]["tokens_per_s_per_gpu"] for row in rows]
        medians = [value["median"] for value in values]
        errors = [[v["median"] - v["min"] for v in values], [v["max"] - v["median"] for v in values]]
        places = [index + offset for index in range(len(rows))]
        axes.bar(places, medians, width=0.4, yerr=errors, label=name, color=color)
    axes.set_xticks(range(len(rows)), [row["shape"] for row in rows])
    axes.set(ylabel="tokens / s / device", title="B2: packed sequences of mixed lengths")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
