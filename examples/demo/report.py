"""What the demo shows at its end: the table, the picture, and the export's own score through Transformers."""

import csv
import json
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml

PHASES = ("start", "rollout", "reward", "old_logp", "ref_logp", "update", "weight_sync")


@dataclass
class Results:
    """Everything the demo measures."""

    accuracy_before: float  # greedy, on held-out problems, after SFT: its Hugging Face export, by Transformers
    accuracy_after: float  # the same after GRPO, by vLLM
    ran_on: str  # devices of the trainer
    accuracy_export: float  # that of its Hugging Face export, by Transformers
    seconds: float
    peak_memory_gb: float
    steps: list[dict[str, float]]  # one row of metrics per logged step


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return the rows of a CSVLogger's file, empty cells left out."""
    with path.open() as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def describe_devices(config: Path) -> str:
    """Return what a run was trained on, by its config and this machine."""
    trainer = yaml.safe_load(config.read_text())["trainer"]
    devices = trainer["devices"]
    if trainer["accelerator"] == "cpu":
        return f"{devices} processes on a CPU"
    count = torch.cuda.device_count() if devices in ("auto", -1) else devices
    return f"{count} x {torch.cuda.get_device_name(0)}"


def last_value(rows: list[dict[str, float]], name: str) -> float:
    """Return the last logged value of a metric."""
    return [row[name] for row in rows if name in row][-1]


def column(rows: list[dict[str, float]], name: str) -> tuple[list[float], list[float]]:
    """Return steps and values of a metric."""
    found = [(row["step"], row[name]) for row in rows if name in row]
    return [step for step, _ in found], [value for _, value in found]


@torch.no_grad()
def hf_accuracy(directory: Path, size: int = 500) -> float:
    """Return the greedy accuracy of an exported model on the held-out problems, by Transformers alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from lightning_megatron_rl.data.arithmetic import ArithmeticRows

    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    rows = ArithmeticRows(split="val", size=size, lowest_digit_first=True)()
    inputs = tokenizer([row["prompt"] for row in rows], padding=True, return_tensors="pt")
    output = model.generate(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], do_sample=False, max_new_tokens=6
    )
    texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(text.strip() == row["answer"] for text, row in zip(texts, rows, strict=True)) / size


def plot(results: Results, path: Path) -> None:
    """Draw reward, accuracy, KL and mismatch over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, ((reward, accuracy), (kl, mismatch)) = plt.subplots(2, 2, figsize=(10, 6.4), sharex=True)
    reward.plot(*column(results.steps, "reward/mean"), color="tab:blue")
    reward.set(title="mean reward of training rollouts", ylim=(0, 1.02))
    steps, values = column(results.steps, "val/arithmetic/mean_at_1")
    accuracy.plot([0, *steps], [results.accuracy_before, *values], marker="o", color="tab:green")
    accuracy.set(title="accuracy on held-out problems (greedy)", ylim=(0, 1.02))
    kl.plot(*column(results.steps, "policy/kl_ref"), color="tab:purple")
    kl.set(title="KL to the reference policy (k3)", xlabel="rollouts")
    mismatch.plot(*column(results.steps, "mismatch/abs_logp_diff"), color="tab:red")
    mismatch.set(title="|log-prob trainer − log-prob sampler|", xlabel="rollouts", yscale="log")
    for axes in (reward, accuracy, kl, mismatch):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"GRPO on {results.ran_on}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def print_table(results: Results, out: Path) -> None:
    """Print results and the share of each phase, and keep them as text and JSON."""
    from rich.console import Console
    from rich.table import Table

    steps = results.steps
    outcome = Table(title=f"demo: GRPO on {results.ran_on}", title_justify="left", show_header=False)
    rows = [
        ("accuracy after SFT (500 held-out problems)", f"{results.accuracy_before:.3f}"),
        ("accuracy after GRPO", f"{results.accuracy_after:.3f}"),
        ("accuracy of the Hugging Face export (Transformers)", f"{results.accuracy_export:.3f}"),
        ("rollouts", f"{len(column(steps, 'reward/mean')[0])}"),
        ("trainer/sampler |log-prob difference|, worst step", f"{max(column(steps, 'mismatch/abs_logp_diff')[1]):.1e}"),
    ]
    for row in rows:
        outcome.add_row(*row)
    phases = Table(title="where the time of GRPO went", title_justify="left", min_width=45)
    for name, justify in (("phase", "left"), ("seconds", "right"), ("share", "right")):
        phases.add_column(name, justify=justify)  # type: ignore[arg-type]
    totals = {phase: sum(column(steps, f"time/{phase}_s")[1]) for phase in PHASES}
    whole = totals["start"] + sum(column(steps, "time/step_s")[1])
    totals["other"] = whole - sum(totals.values())
    for phase, seconds in totals.items():
        phases.add_row(phase, f"{seconds:.1f}", f"{seconds / whole:.0%}")
    cost = f"whole demo: {results.seconds:.0f} s, peak memory of all processes {results.peak_memory_gb:.1f} GB"
    with (out / "table.txt").open("w") as file:
        for console in (Console(), Console(file=file, width=100)):
            console.print(outcome, phases, cost)
            console.print(f"checkpoints, exports, samples and curve.png are in {out}")
    summary = {
        "accuracy_before": results.accuracy_before,
        "accuracy_after": results.accuracy_after,
        "accuracy_export": results.accuracy_export,
        "ran_on": results.ran_on,
        "rollouts": len(column(steps, "reward/mean")[0]),
        "worst_abs_logp_diff": max(column(steps, "mismatch/abs_logp_diff")[1]),
        "seconds": results.seconds,
        "peak_memory_gb": results.peak_memory_gb,
        "phase_seconds": totals,
    }
    (out / "results.json").write_text(json.dumps(summary, indent=2) + "\n")
