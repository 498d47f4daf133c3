"""Saves under every layout and resumes under every other: ``python -m tests.drills.reshard --out FILE``.

Each family's tiny model is fitted for two steps in fp32, with a checkpoint after the first. What resumes from it is
compared with one undivided process that was never interrupted: loss, gradient norm, entropy and weights. Families that
are in FILE already stay there, so that they can be run one by one.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from lightning_megatron_rl.models.layers.moe import MoESettings
from lightning_megatron_rl.verify.layouts import parse_layout
from lightning_megatron_rl.verify.pool import WorkerPool
from tests.drills.facts import facts
from tests.strategy.test_megatron import RELATIVE
from tests.tiny_models import save_tiny_model, tiny_config
from tests.training import Run, fit_arithmetic

DENSE = ("single", "tp2", "tp2_sp", "pp2", "pp2_vpp2", "cp2", "dp2", "dp2_plain", "tp2_pp2_sp")
EXPERTS = ("single", "tp2_sp", "pp2", "cp2", "dp2", "dp2_plain", "ep2", "pp2_ep2", "tp2_ep2_etp1_sp")
# biases of experts stay whole under tensor parallelism
BIASED_EXPERTS = tuple(layout.replace("tp2_sp", "tp2_etp1_sp") for layout in EXPERTS)
FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "mistral_window", "qwen2", "qwen2_tied", "qwen3", "gemma3"), DENSE),
    **dict.fromkeys(("nemotron", "gemma", "gemma2", "exaone4"), DENSE),
    **dict.fromkeys(("qwen3_moe", "mixtral", "deepseek_v3", "deepseek_v3_plain"), EXPERTS),
    **dict.fromkeys(("glm4_moe", "olmoe", "minimax_m2", "hy_v3"), EXPERTS),
    "gpt_oss": BIASED_EXPERTS,
}
BIASED_ROUTERS = ("deepseek_v3", "glm4_moe", "minimax_m2", "hy_v3")  # a bias per expert, which no gradient moves
SAVED_AT, STEPS = 1, 2
COMPARED = ("policy/loss", "policy/grad_norm", "policy/entropy")


def fit(pool: WorkerPool, model: Path, layout: str, **options: Any) -> Run:
    """Fit the model under a layout."""
    where = parse_layout(layout)
    arguments = (fit_arithmetic, model, where.strategy, where.world_size)
    return pool.run(*arguments, world_size=where.world_size, init_process_group=False, max_steps=STEPS, **options)[0]


def module_options(family: str) -> dict[str, Any]:
    """Settings under which the layouts of a family have the same loss.

    The balance loss depends on how a layout divides the batch into micro-batches. Expert biases are moved, so that
    what no optimizer knows is in the comparison.
    """
    if FAMILIES[family] is DENSE:
        return {}
    bias_rate = 0.01 if tiny_config(family).model_type in BIASED_ROUTERS else 0.0
    return {"module": {"moe": MoESettings(aux_loss_coeff=0.0, expert_bias_update_rate=bias_rate)}}


def difference(run: Run, reference: Run) -> float:
    """The largest relative difference of what the last step logged and of the weights after it."""
    mine, theirs = run.steps[-1], reference.steps[-1]
    found = [abs(mine[name] - theirs[name]) / abs(theirs[name]) for name in COMPARED]
    if run.weights.keys() != reference.weights.keys():
        raise RuntimeError(f"other weights: {sorted(run.weights.keys() ^ reference.weights.keys())}")
    found += [float((run.weights[name] - weight).norm() / weight.norm()) for name, weight in reference.weights.items()]
    return max(found)


def reshard(pool: WorkerPool, family: str, layouts: Sequence[str], root: Path) -> dict[str, Any]:
    """Save and resume one family's model in all pairs of `layouts`; returns what the report says of it."""
    model, options = save_tiny_model(root / family, family), module_options(family)
    started = time.monotonic()
    directories = {layout: root / f"{family}-{layout}" for layout in layouts}
    whole = {layout: fit(pool, model, layout, checkpoints=path, **options) for layout, path in directories.items()}
    reference = whole["single"] if "single" in whole else fit(pool, model, "single", **options)
    rows, problems = dict[str, dict[str, float]](), list[str]()
    for saved, directory in directories.items():
        checkpoint = directory / f"step={SAVED_AT}.ckpt"
        resumed = {layout: fit(pool, model, layout, ckpt_path=str(checkpoint), **options) for layout in layouts}
        rows[saved] = {layout: difference(run, reference) for layout, run in resumed.items()}
        # not <=, which nan would pass
        problems += [f"{saved} -> {to}: {worst:.1e}" for to, worst in rows[saved].items() if not worst <= RELATIVE]
        same = resumed[saved].weights
        if not all(torch.equal(same[name], weight) for name, weight in whole[saved].weights.items()):
            problems.append(f"{saved} -> {saved}: not bitwise")
    return {
        "family": family,
        "layouts": list(layouts),
        "worst": max(worst for row in rows.values() for worst in row.values()),
        "largest_step": _largest_step(reference, model),
        "differences": rows,
        "problems": problems,
        "seconds": round(time.monotonic() - started, 1),
    }


def _largest_step(reference: Run, model: Path) -> float:
    """How far the run moved the weight that it moved most, relative: what a lost update would be measured by."""
    from transformers import AutoModelForCausalLM

    before = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    return max(
        float((weight - before[name]).norm() / before[name].norm())
        for name, weight in reference.weights.items()
        if name in before
    )


def kept_lines(path: Path, report: dict[str, Any]) -> list[dict[str, Any]]:
    """What an earlier report says of other families, if it was made by the same programs on the same machine."""
    earlier: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    is_same = all(earlier.get(name) == value for name, value in report.items() if name != "date")
    return list(earlier["families"]) if is_same else []


def main() -> int:
    """Run the matrix and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="+", choices=sorted(FAMILIES), default=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--layouts", nargs="+", help="instead of all that the family is tried in")
    parser.add_argument("--out", type=Path, help="where the report goes, JSON")
    options = parser.parse_args()
    report: dict[str, Any] = {**facts("reshard"), "tolerance": RELATIVE}
    lines = kept_lines(options.out, report) if options.out is not None else []
    lines = [line for line in lines if line["family"] not in options.families]
    report["families"] = lines
    with tempfile.TemporaryDirectory() as root, closing(WorkerPool()) as pool:
        for family in options.families:
            lines.append(reshard(pool, family, options.layouts or FAMILIES[family], Path(root)))
            print(json.dumps({key: value for key, value in lines[-1].items() if key != "differences"}), flush=True)
            if options.out is not None:
                options.out.write_text(json.dumps(report, indent=2) + "\n")
    return int(any(line["problems"] for line in lines))


if __name__ == "__main__":
    sys.exit(main())
