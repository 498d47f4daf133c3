"""The picture of docs/timeline.md: ``python benchmarks/timeline.py``.

Two GRPO runs of the tiny model on a CPU with a bound of 2, trainer and sampler with a thread each: the sampler works
between the trainer's steps ("shared") or all the time ("separate"). `Timeline` writes what they did, from which the
picture is drawn; with ``--draw FILE ...`` that of other timelines is drawn, and nothing is run.
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from common import (
    RESULTS,
    ROOT,
    SHAPES,
    StepLog,
    TokenPrompts,
    facts,
    make_optimizer,
    make_trainer,
    own_device,
    run_child,
    token_reward,
    write_json,
    write_model,
)

PROMPTS, GENERATIONS, PROMPT_TOKENS, TOKENS, STALENESS = 4, 4, 16, 512, 2
COLOURS = {
    "rollout": "#d9d9d9", "old_logp": "#9ecae1", "update": "#3182bd", "weight_sync": "#e6550d",
    "sampling": "#74c476", "validation": "#756bb1", "checkpoint save": "#fd8d3c",
}  # fmt: skip
SHOWN = {"rollout": "trainer waits", "sampling": "sampling", "old_logp": "log-probs", "update": "update"}
SHOWN |= {"weight_sync": "weights to the sampler"}
LEAST_STEPS = 3


def run(placement: str, path: Path, steps: int, work: Path) -> dict[str, Any]:
    """Train with one placement and write its timeline; return the time of its steps and what was lost of it."""
    from lightning_megatron_rl.callbacks.timeline import Timeline
    from lightning_megatron_rl.data.prompts import PromptDataModule
    from lightning_megatron_rl.modules.grpo import GRPOModule
    from lightning_megatron_rl.modules.grpo_config import GRPOLossConfig
    from lightning_megatron_rl.modules.streaming import StreamingSettings
    from lightning_megatron_rl.modules.training import TrainingSettings
    from lightning_megatron_rl.rollout.protocol import SamplingParams
    from lightning_megatron_rl.rollout.vllm.engine import VLLMEngine

    model = str(write_model(work / "model", "tiny"))
    module = GRPOModule(
        model,
        rewards=[lambda samples: [token_reward(sample.response_ids) for sample in samples]],
        num_generations=GENERATIONS,
        engine=VLLMEngine(
            max_model_len=PROMPT_TOKENS + TOKENS + 1, kv_cache_memory_gb=0.25, num_threads=1, device="cpu"
        ),
        sampling=SamplingParams(max_tokens=TOKENS),  # random weights end a response with one token in 512
        streaming=StreamingSettings(max_staleness=STALENESS, placement=placement),  # type: ignore[arg-type]
        loss=GRPOLossConfig(correction="tis"),
        train=TrainingSettings(optimizer=make_optimizer(1e-6, "fp32"), max_tokens_per_microbatch=2048),
    )
    data = PromptDataModule(
        TokenPrompts(PROMPTS * steps, PROMPT_TOKENS, SHAPES["tiny"]["vocab_size"]),
        tokenizer=model,
        batch_size=PROMPTS,
        answer_column=None,
        add_special_tokens=False,
        shuffle=False,
    )
    log = StepLog(own_device("cpu"))
    trainer = make_trainer("cpu", max_steps=steps, callbacks=[Timeline(str(path)), log], precision="32-true")
    trainer.fit(module, data)
    module.close_engine()
    # the first step fills the stream, the last ones empty it; steps that wait and steps that do not are means over time
    kept = log.steps[1 : steps - STALENESS]
    seconds = [step["time/step_s"] for step in kept]
    names = ("perf/trainer_idle_frac", "perf/sampler_idle_frac", "perf/sampler_tokens_per_s")
    total = sum(seconds)
    means = {name: sum(step[name] * step["time/step_s"] for step in kept) / total for name in names}
    return {"steps": len(kept), "time/step_s": statistics.mean(seconds), **means}


def draw(timelines: dict[str, Path], path: Path, seconds: float | None = None) -> None:
    """Draw timelines, one below the other, from the beginning of their second steps on.

    Args:
        timelines: Files of `Timeline`, by the titles of their panels.
        path: Of the picture.
        seconds: That are shown; None: what all of them have.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    read = {title: json.loads(file.read_text())["traceEvents"] for title, file in timelines.items()}
    starts = {title: _second_step(events) for title, events in read.items()}
    lasts = [max(event["ts"] + event.get("dur", 0) for event in events) - starts[t] for t, events in read.items()]
    width = seconds or min(lasts) / 1e6
    figure, panels = plt.subplots(len(read), 1, figsize=(9, 2.3 * len(read)), sharex=True, squeeze=False)
    for axes, (title, events) in zip(panels[:, 0], read.items(), strict=True):
        _draw_one(axes, events, starts[title], width)
        axes.set_title(title, loc="left", fontsize=9)
    panels[-1, 0].set_xlabel("seconds")
    handles: list[Any] = [Patch(color=COLOURS[name], label=label) for name, label in SHOWN.items()]
    figure.legend(handles=handles, loc="lower center", ncols=len(handles), fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _second_step(events: list[dict[str, Any]]) -> float:
    """The first one has the start of the sampler."""
    return min(event["ts"] for event in events if event["name"] == "step 2")


def _draw_one(axes: Any, events: list[dict[str, Any]], start: float, width: float) -> None:
    """Draw the rows of the first trainer and sampler, its groups, and lines between steps."""
    processes = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    rows = {processes["trainer rank 0"]: 2, processes["sampler of rank 0"]: 1}
    for event in events:
        at = (event["ts"] - start) / 1e6
        if event["ph"] != "X" or event["pid"] not in rows or event["tid"] != 1:
            continue
        name = event["name"]
        # the sampler's row has the same weights arrive
        colour = COLOURS["weight_sync"] if name == "update" and rows[event["pid"]] == 1 else COLOURS.get(name)
        if colour is not None:
            axes.broken_barh([(at, event["dur"] / 1e6)], (rows[event["pid"]] - 0.4, 0.8), facecolors=colour)
    for event in events:
        if event["name"].startswith("step ") and event["pid"] == processes["trainer rank 0"]:
            axes.axvline((event["ts"] - start) / 1e6, color="black", linewidth=0.5)
    counts = [event for event in events if event["ph"] == "C" and event["pid"] == processes["sampler of rank 0"]]
    most = max((max(event["args"].values()) for event in counts), default=1) or 1
    times = [(event["ts"] - start) / 1e6 for event in counts]
    for name, style in (("under way", "-"), ("ready", ":")):
        heights = [-0.4 + 0.8 * event["args"][name] / most for event in counts]
        axes.step(times, heights, style, where="post", color="black", linewidth=0.8)
    axes.set(xlim=(0, width), ylim=(-0.6, 2.6))
    axes.set_yticks([0, 1, 2], [f"groups under way (–),\nready (··), at most {most}", "sampler", "trainer"], fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds per run")
    parser.add_argument("--work", type=Path, help="where the timelines go; a directory that is removed if not given")
    parser.add_argument("--out", type=Path, default=RESULTS / "timeline_cpu.json")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "timeline.png")
    parser.add_argument("--draw", type=Path, nargs="+", help="timelines that are there already")
    parser.add_argument("--placement", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps < LEAST_STEPS + STALENESS:
        parser.error(f"--steps={options.steps} must be at least {LEAST_STEPS + STALENESS}: first and last are no rule")
    if options.placement:
        path = options.work / f"{options.placement}.json"
        print(json.dumps(run(options.placement, path, options.steps, options.work)))
        return
    if options.draw:
        draw({path.stem: path for path in options.draw}, options.picture)
        return
    with tempfile.TemporaryDirectory() as directory:
        work = options.work or Path(directory)
        work.mkdir(parents=True, exist_ok=True)
        os.environ["OMP_NUM_THREADS"] = "1"  # a core for each of them
        found = {}
        for placement in ("shared", "separate"):
            arguments = ["--placement", placement, "--work", str(work), "--steps", str(options.steps)]
            found[placement] = run_child("timeline.py", arguments, options.timeout)
            print(placement, {name: round(value, 3) for name, value in found[placement].items()}, flush=True)
        titles = {"shared": "placement: shared", "separate": "placement: separate"}
        draw({title: work / f"{placement}.json" for placement, title in titles.items()}, options.picture)
    write_json(options.out, {**facts("cpu"), "benchmark": "timelines of two placements", "means": found})


if __name__ == "__main__":
    main()
