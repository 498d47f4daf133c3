"""Write the tables of measured results into the documents: `python scripts/performance_table.py`.

Every figure comes from a JSON file in benchmarks/results; a test holds the documents to what this writes.
"""

import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoint_tables import checkpoint, conversion, kill_drill, resharding
from peer_tables import peer_lines, peers
from results import RESULTS, ROOT, Result, load, put_between, share, split, spread, table
from stream_tables import cluster_drill, long_tail, stream_curves, stream_kill_drill

from lightning_megatron_rl.planner.memory import describe_recompute

PAGES = ("performance", "results", "busy_machine", "kill_drills", "resharding", "exports", "asynchronous", "recipes")
DOCUMENTS = (*(f"docs/{page}.md" for page in PAGES), "README.md")
NOTHING = "Not measured yet.\n"
ASLEEP = ", sampler asleep (wake, sync, wake of the cache; then sleep)"
CURVE_BLOCK = 25  # rollouts
FLOOR, MIXTURES_FLOOR = 2.2, {"30b-a3b-24-layers": 2.5, "30b-a3b": 3.0}  # times which a step of B3 takes at most
USUAL_STEP = (256, 128, 512)  # samples, tokens of a prompt and of a response, of B3


def moments(measured: dict[str, Any]) -> str:
    """Return the format of Adam's moments, to stand behind the model or its precision, if it is not fp32."""
    found = measured.get("moments", "fp32")
    return "" if found == "fp32" else f", Adam's moments in {found}"


def lengths(measured: dict[str, Any]) -> str:
    """Return how long the sequences are, to stand behind the model, if all have one length."""
    found = measured.get("lengths")
    return f" at {found['longest']:,} tokens" if found and found["shortest"] == found["longest"] else ""


def recomputed(measured: dict[str, Any]) -> str:
    """Return how many layers were computed again in the backward pass, to stand behind the precision, if some were."""
    return describe_recompute(measured["recompute"])


def gathered(measured: dict[str, Any]) -> str:
    """Return that tokens were gathered for their experts, to stand behind the model, if they were."""
    return ", tokens gathered" if measured.get("dispatcher") == "allgather" else ""


def compiled(side: dict[str, Any]) -> str:
    """Return that the sampler's model was compiled, to stand behind the model, if somebody asked for it."""
    return ", sampler compiled" if side.get("sampler_compilation") == "full" else ""


def settings(measured: dict[str, Any]) -> str:
    """Return that the planner chose micro-batches, and that logits were kept, to stand behind the model, if so."""
    kept = measured.get("logprob_chunk_size", 0) >= measured["max_tokens_per_microbatch"]  # all are one chunk
    return (", by `auto`" if measured.get("auto") else "") + (", logits kept" if kept else "") + gathered(measured)


def step_work(measured: dict[str, Any]) -> str:
    """Return what a GRPO step samples, to stand behind the model, if it is not B3's on GPUs."""
    work = measured.get("floor_work") or {}
    sizes = tuple(work.get(name) for name in ("samples", "prompt_tokens", "response_tokens"))
    if not work or sizes == USUAL_STEP or measured["shape"] == "tiny":
        return ""
    return f", {sizes[0]:,} x ({sizes[1]:,} + {sizes[2]:,}) tokens"


def sampler_place(measured: dict[str, Any]) -> str:
    """Return where the sampler is, to stand behind whose it is, if not on the trainer's GPUs."""
    return f", {measured['place']}" if "place" in measured else ""


def links(rate: dict[str, Any]) -> str:
    """Return whose limit a weight sync is held to, to stand behind its share, if it is not the memory's."""
    found = rate.get("limited_by", "memory")
    return "" if found == "memory" else f" (of {found})"


def throughput(results: Path = RESULTS) -> str:
    """Return the table of B2."""
    header = (
        "| device | model | layout | tokens per micro-batch | update, tokens/s per GPU | MFU (measured peak) |"
        " MFU (data sheet) | log-probs, tokens/s per GPU | MFU | peak memory, GiB | planned, GiB |"
    )
    rows = []
    for _, result in load("throughput_*.json", results):
        for row in result["rows"]:
            update, logprobs, memory = row["update"], row["logprobs"], row["peak_memory_gib"]
            precision = row["precision"] + moments(row) + recomputed(row)
            rows.append(
                f"| {result['device']} | {row['shape']}{lengths(row)}, {precision}{settings(row)} | {row['layout']}"
                f" | {row['max_tokens_per_microbatch']:,}"
                f" | {spread(update['tokens_per_s_per_gpu'], 0)} | {share(update['mfu_measured'])}"
                f" | {share(update['mfu_spec'])} | {spread(logprobs['tokens_per_s_per_gpu'], 0)}"
                f" | {share(logprobs['mfu_measured'])}"
                f" | {'–' if memory is None else f'{memory:.1f}'}"
                f" | {'–' if memory is None else format(row['planned_memory_gib'], '.1f')} |"
            )
    return table(header, rows)


def weight_sync(results: Path = RESULTS) -> str:
    """Return the table of B1."""
    header = (
        "| device | model | who | ms | in a step, ms | GB/s | share of the limit | beyond it, ms | extra memory, GiB |"
    )
    rows = []
    for _, result in load("weight_sync_*.json", results):
        for name, rate in result["rates"].items():
            side, sync = result[name], result[name]["sync"]
            asleep = name == "asleep"
            seconds = spread(sync["seconds"], 2, 1e3)
            if asleep:
                seconds += f"; {spread(sync['sleep_seconds'], 1, 1e3)}"
            # a run's first step finds the weights of the last measured sync
            in_step = side["phases"]["weight_sync"] if side["step_s"]["count"] > 1 else None
            rows.append(
                f"| {result['device']}{split(result['ours'])} | {result['ours']['shape']} | {side['who']}"
                f"{sampler_place(side)}{ASLEEP if asleep else ''} | {seconds}"
                f" | {spread(in_step, 1, 1e3) if in_step else '–'}"
                f" | {rate['gb_per_s']:.2f} | {rate['share_of_limit']:.2%}{links(rate)}"
                f" | {(rate['seconds'] - rate['limit_seconds']) * 1e3:.2f} | {max(rate['extra_gib'], 0):.2f} |"
            )
    return table(header, rows)


def grpo_step(results: Path = RESULTS) -> str:
    """Return the table of B3."""
    header = (
        "| device | model | who | step, s | sync | rollout | old log-probs | update | peak, GiB | times the floor"
        " | times ours |"
    )
    rows = []
    for _, result in load("grpo_step_*.json", results):
        for name in ("ours", "trl", "verl"):
            if name not in result or "failed" in result[name]:
                continue
            side, floor = result[name], result["floor_s"]["step"]
            step = side["step_s"]["median"]
            phases = [side["phases"].get(phase) for phase in ("weight_sync", "rollout", "old_logp", "update")]
            medians = [phase["median"] if phase else 0.0 for phase in phases]  # 0: the step has no such phase
            cells = " | ".join(f"{median / step:.0%}" if median else "–" for median in medians)
            peak = f"{side['peak_memory_gib']:.0f}" if side.get("peak_memory_gib") else "–"
            times = "–" if name == "ours" else f"{step / result['ours']['step_s']['median']:.2f}"
            variant = f", {side['variant']}" if side.get("variant") else ""
            rows.append(
                f"| {result['device']}{split(side)} | {side['shape']}{step_work(result['ours'])}"
                f"{moments(side.get('work', {}))}{gathered(side)}{compiled(side)} | {side['who']}{variant}"
                f" | {spread(side['step_s'], 2)} | {cells} | {peak} | {step / floor:.2f} | {times} |"
            )
    return table(header, rows)


def handover(results: Path = RESULTS) -> str:
    """Return the table of memory between phases."""
    header = (
        "| device | model | sampler wakes and falls asleep, s | it leaves, GB | trainer's state away and back, s"
        " | it leaves, GB | the slowest step's, s | step, s | times the floor |"
    )
    rows = []
    for _, result in load("handover_*.json", results, gpus_only=True):
        side = result["ours"]
        moved = side["handover"]
        rows.append(
            f"| {result['device']}{split(side)} | {side['shape']}{moments(side['work'])}"
            f" | {moved['time/sleep_s']['median']:.2f} | {moved['perf/sleep_freed_gb']['median']:.1f}"
            f" | {moved['time/offload_s']['median']:.2f} | {moved['perf/offloaded_gb']['median']:.1f}"
            f" | {moved['time/offload_s']['max']:.2f}"
            f" | {side['step_s']['median']:.2f} | {result['times_floor']:.2f} |"
        )
    return table(header, rows)


def decoding(results: Path = RESULTS) -> str:
    """Return the table of decoding."""
    header = "| device | model | sequences | vLLM's model runner | ms per token | by vLLM's own steps |"
    rows = []
    for _, result in load("decoding_*.json", results):
        for name in ("older", "newer", "only"):
            if name in result:
                layers = f", {result['layers']} layers" if "layers" in result else ""
                layers += "".join(f", `{name}={value}`" for name, value in result.get("vllm_args", {}).items())
                sequences, runner = 8 * result["prompts"], "the CPU's" if name == "only" else name
                times = [result[name].get(kind) for kind in ("ms_per_token", "vllms_own_ms_per_token")]
                if times[1] is None:
                    times.reverse()  # a row from before there were others
                quick, own = ("–" if one is None else spread(one, 1) for one in times)
                rows.append(
                    f"| {result['device']} | {result['shape']}{layers} | {sequences} | {runner} | {quick} | {own} |"
                )
    return table(header, rows)


def real_run(results: Path = RESULTS) -> str:
    """Return the table of real runs."""
    header = (
        "| device | model | layout | rollouts | accuracy before | after | mismatch, mean | seconds of GRPO |"
        " sync | rollout | log-probs | update |"
    )
    rows = []
    for _, result in load("real_run_*.json", results):
        phases = result["phase_seconds"]
        seconds = (phases["weight_sync"], phases["rollout"], phases["old_logp"] + phases["ref_logp"], phases["update"])
        rows.append(
            f"| {result['device']} | {result['parameters'] / 1e6:.1f} M | {result['layout']} | {result['rollouts']}"
            f" | {result['accuracy_before']:.3f} | {result['accuracy_after']:.3f} | {result['mismatch_mean']:.5f}"
            f" | {result['grpo_seconds']:.0f} | " + " | ".join(f"{value:.1f} s" for value in seconds) + " |"
        )
    return table(header, rows)


def curves(results: Path = RESULTS) -> str:
    """Return the mean rewards of the real runs, and how far they are apart."""
    found = load("real_run_*.json", results)
    names = [f"{result['parameters'] / 1e6:.0f} M, {result['device']}, {result['layout']}" for _, result in found]
    curves = [result["curves"]["reward/mean"][1] for _, result in found]
    length = max(map(len, curves), default=0)
    blocks = [slice(first, first + CURVE_BLOCK) for first in range(0, length - CURVE_BLOCK + 1, CURVE_BLOCK)]
    means = [
        [statistics.fmean(values[block]) if len(values) >= block.stop else None for block in blocks]
        for values in curves
    ]
    starts = [result["sft"].get("sha256") for _, result in found]
    apart = {}
    for start in sorted({start for start in starts if start and starts.count(start) > 1}):
        same = [row for row, own in zip(means, starts, strict=True) if own == start]
        apart[f"largest difference of those from warm start {start[:6]}"] = same
    header = "| rollouts | warm start | " + " | ".join(f"{block.start + 1}–{block.stop}" for block in blocks) + " |"
    rows = [
        f"| {name} | {start[:6] if start else 'its own'} | {_cells(row)}"
        for name, start, row in zip(names, starts, means, strict=True)
    ]
    for name, compared in apart.items():
        there = [[value for value in column if value is not None] for column in zip(*compared, strict=True)]
        differences = [max(column) - min(column) if len(column) > 1 else None for column in there]
        rows.append(f"| {name} | – | {_cells(differences)}")
    return table(header, rows)


def _cells(values: list[float | None]) -> str:
    return " | ".join("–" if value is None else f"{value:.3f}" for value in values) + " |"


def headline(results: Path = RESULTS) -> str:
    """Return the README's table: the best of what was measured on GPUs, once for each kind of work and model."""
    found: dict[tuple[str, str], tuple[float, str]] = {}  # by kind and model: how good, and the row

    def offer(kind: str, model: str, how_good: float, where: str, reached: str) -> None:
        if (kind, model) not in found or how_good > found[kind, model][0]:
            found[kind, model] = how_good, f"| {kind}, {model} | {where} | {reached} |"

    for _, result in load("throughput_*.json", results, gpus_only=True):
        for row in result["rows"]:
            tokens, mfu = row["update"]["tokens_per_s_per_gpu"], row["update"]["mfu_measured"]
            reached = f"{tokens['median']:,.0f} tokens/s per GPU, {mfu['median']:.0%} of the measured product's peak"
            model = row["shape"] + lengths(row)
            offer("update", model, mfu["median"], result["device"] + split(row), f"{reached}{recomputed(row)}")
    for _, result in load("grpo_step_*.json", results, gpus_only=True):
        side, times = result["ours"], result["times_floor"]
        reached = f"{side['step_s']['median']:.2f} s, {times:.2f} times the physical floor"
        offer("GRPO step", side["shape"] + step_work(side), -times, result["device"] + split(side), reached)
    for _, result in load("weight_sync_*.json", results, gpus_only=True):
        rate, side = result["rates"]["ours"], result["ours"]
        reached = f"{rate['seconds'] * 1e3:.1f} ms, {rate['gb_per_s']:,.0f} GB/s{sampler_place(side)}"
        offer("weights to the sampler", side["shape"], rate["gb_per_s"], result["device"] + split(side), reached)
    for _, result in load("real_run_*.json", results, gpus_only=True):
        before, after = result["accuracy_before"], result["accuracy_after"]
        model = f"{result['parameters'] / 1e6:.1f} M parameters, {result['rollouts']} rollouts"
        offer("GRPO run", model, after, result["device"] + split(result), f"accuracy {before:.3f} → {after:.3f}")
    return table("| what | where | result |", [row for _, row in found.values()])


def goals(results: Path = RESULTS) -> str:
    """Return the table of what was aimed at, and what each GPU reached."""
    names = ("weight_sync", "throughput", "grpo_step", "handover")
    syncs, updates, steps, handovers = (load(f"{name}_*.json", results, gpus_only=True) for name in names)
    rates = [(_place(result, result["ours"]), result["rates"]) for _, result in syncs]
    fastest: dict[str, tuple[str, dict[str, Any]]] = {}  # update of each model in each place, of usual lengths
    for _, result in updates:
        for row in result["rows"]:
            place, update = _place(result, row), row["update"]
            rate = update["mfu_measured"]["median"]
            if not lengths(row) and (place not in fastest or rate > fastest[place][1]["mfu_measured"]["median"]):
                fastest[place] = row["shape"], update
    each = [(place, shape, update) for place, (shape, update) in fastest.items()]
    steps = [(path, result) for path, result in steps if not step_work(result["ours"])]
    mfu = (
        (0.35, ("0.6b",)),
        (0.45, ("4b", "8b")),
        (0.45, ("30b-a3b-10-layers",)),
        (0.3, ("30b-a3b", "30b-a3b-24-layers")),
    )
    measured: dict[tuple[str, str], list[tuple[str, str, bool]]] = {
        **{
            (f"B1, share of the limit{where}", f"{least:.0%}".replace("%", " %")): [
                (place, f"{rate['ours']['share_of_limit']:.1%}", rate["ours"]["share_of_limit"] >= least)
                for place, rate in rates
                if (place.startswith("0.6b, ") and ", tp 2" in place) == bool(where)
            ]
            for where, least in (("", 0.6), (" at 0.6b, TP 2", 0.4))
        },
        ("B1, rate over TRL's", "10"): [
            (place, f"{ratio:.2f}", ratio >= 10)
            for place, rate in rates
            if "trl" in rate
            for ratio in [rate["ours"]["gb_per_s"] / rate["trl"]["gb_per_s"]]
        ],
        **{
            (f"B2, MFU of updates at {' and '.join(shapes)}", f"{least:.0%}".replace("%", " %")): [
                (place, f"{share(update['mfu_measured'])} (data sheet: {share(update['mfu_spec'])})", met)
                for place, shape, update in each
                if shape in shapes
                for met in [update["mfu_measured"]["median"] >= least]
            ]
            for least, shapes in mfu
        },
        ("B2, TRL's step without sampling over ours", "1.5"): [
            (_place(result, result["ours"]), f"{ratio:.2f}", ratio >= 1.5)
            for _, result in steps
            if "trl" in result
            for ratio in [_without_sampling(result["trl"]) / _without_sampling(result["ours"])]
        ],
        **{
            (f"B3, step over the floor{where}", f"at most {most:g}"): [
                (_place(result, result["ours"]) + note, f"{result['times_floor']:.2f}", result["times_floor"] <= most)
                for found, note in ((steps, ""), (handovers, ", memory changes hands"))
                for _, result in found
                if MIXTURES_FLOOR.get(result["ours"]["shape"], FLOOR) == most
            ]
            for where, most in {"": FLOOR, **{f" at {shape}": aim for shape, aim in MIXTURES_FLOOR.items()}}.items()
        },
        ("B3, TRL's step over ours", "3"): [
            (_place(result, result["ours"]), f"{result['speedup_over_trl']:.2f}", result["speedup_over_trl"] >= 3)
            for _, result in steps
            if result["speedup_over_trl"]
        ],
        **{
            (f"B3, verl's step over ours at {shape}", f"{aim:g}"): [
                (
                    _place(result, result["ours"]),
                    f"{result['speedup_over_verl']:.2f}",
                    result["speedup_over_verl"] >= aim,
                )
                for _, result in steps
                if result.get("speedup_over_verl") and result["ours"]["shape"] == shape
            ]
            for shape, aim in (("0.6b", 2.5), ("4b", 2.0))
        },
        **_goals_of_streams(results),
    }
    header = "| benchmark | goal | reached | missed |"
    rows = []
    for (name, aim), found in measured.items():
        cells = [
            "; ".join(f"{value} ({place})" for place, value, met in found if met is wanted) for wanted in (True, False)
        ]
        rows.append(f"| {name} | {aim} | {cells[0] or '–'} | {cells[1] or '–'} |")
    return table(header, rows)


def _goals_of_streams(results: Path) -> dict[tuple[str, str], list[tuple[str, str, bool]]]:
    """Return what B4's rows are held to, those of all bounds together."""
    aims: dict[str, dict[str, str]] = {}  # by bound
    found: dict[str, list[tuple[str, str, bool]]] = {}
    for _, result in load("long_tail_*.json", results, gpus_only=True):
        for goal in result["goals"]:
            side, bound = re.sub(r", bound \d+", "", goal["side"]), re.search(r"bound \d+", goal["side"])
            name = f"B4 ({result['shape']}, {result['device'].removeprefix('NVIDIA ')}), {side}"
            place, value = bound.group() if bound else "synchronous", f"{goal['reached']:.2f}"
            aims.setdefault(name, {})[place] = f"{goal['goal']:g}"
            if (float(value) >= goal["goal"]) != goal["ok"]:  # rounding would say otherwise
                value = f"{goal['reached']:.3f}"
            found.setdefault(name, []).append((place, value, goal["ok"]))
    return {
        (name, ", ".join(dict.fromkeys(aims[name][place] for place in sorted(aims[name])))): sorted(rows)
        for name, rows in found.items()
    }


def _without_sampling(side: dict[str, Any]) -> float:
    """Return the seconds of a step but for its rollout."""
    return float(side["step_s"]["median"] - side["phases"]["rollout"]["median"])


def _place(result: Result, measured: dict[str, Any]) -> str:
    """Return model, GPU and what the layout splits in a few words."""
    gpu = result["device"].removeprefix("NVIDIA ").split()[0]
    sizes = re.findall(r"\b([a-z]+ (?!1\b)\d+)", split(measured).partition("=")[2])
    return (
        ", ".join([measured["shape"], gpu, *sizes]) + sampler_place(measured) + gathered(measured) + compiled(measured)
    )


def recipe_runs(results: Path = RESULTS) -> str:
    """Return what recipes took on a GPU, and what was planned."""
    header = "| recipe | GPU | step, s (planned) | update | rollout | trainer's peak, GiB |"
    rows = []
    for _, result in load("recipe_*.json", results):
        cells = [f"{result['step_s']['median']:.2f} ({result['planned_step_s']:.2f})"]
        for phase in ("update", "rollout"):
            taken, planned = result["phases"].get(phase), result["planned_phases"].get(phase)
            cells.append(f"{taken['median']:.2f} ({planned:.2f})" if taken else "–")
        memory = result["plan"]["stages"][0]["phases"]["update"]
        own = sum(memory[part] for part in ("parameters", "gradients", "optimizer", "activations"))
        cells.append(f"{result['peak_memory_gb'] * 1e9 / 2**30:.1f} ({own:.1f})")
        recipe = result["recipe"].removeprefix("configs/recipes/").removesuffix(".yaml")
        recipe += "" if result["steps"] == 10 else f", {result['steps']} steps"
        rows.append(f"| {recipe} | {result['device'].removeprefix('NVIDIA ')} | {' | '.join(cells)} |")
    return table(header, rows)


def busy_machine(results: Path = RESULTS) -> str:
    """Return the table of runs on a CPU that others use as well."""
    header = "| CPUs | settings | beside | ms per token, 32 sequences: median | worst | s per step: median | worst |"
    rows = []
    for _, result in load("busy_machine.json", results):
        for row in result["rows"]:
            token, step = row["ms_per_token"], row["step_s"]
            cpus = f"quota of {result['quota_cpus']:g} on {result['cpu_cores']}" if row["condition"] == "quota" else ""
            rows.append(
                f"| {cpus or result['cpu_cores']} | {row['setting']} | {row['condition']}"
                f" | {token['median']:.1f} | {token['max']:.1f} | {step['median']:.2f} | {step['max']:.2f} |"
            )
    return table(header, rows)


def busy_goals(results: Path = RESULTS) -> str:
    """Return what the runs on a busy CPU are held to."""
    header = "| worst of ten, as a multiple of the worst alone (first row: of every core's) | goal | sampler | step |"
    rows = [
        f"| {goal['goal']} | {goal['limit']:g} | {goal['ms_per_token']:.2f} | {goal['step_s']:.2f} |"
        for _, result in load("busy_machine.json", results)
        for goal in result["goals"]
    ]
    return table(header, rows)


def busy_commands(results: Path = RESULTS) -> str:
    """Return what whole commands take, alone and beside a busy process."""
    header = "| command | settings | alone, s | beside one busy process, s |"
    taken: dict[tuple[str, str], dict[str, float]] = {}
    for _, result in load("busy_machine_commands.json", results):
        for row in result["rows"]:
            taken.setdefault((row["command"], row["setting"]), {})[row["condition"]] = row["seconds"]
    rows = [
        f"| {command} | {setting} | {seconds['alone']:.0f} | {seconds['beside one busy process']:.0f} |"
        for (command, setting), seconds in taken.items()
    ]
    return table(header, rows)


TABLES: dict[str, Callable[[], str]] = {
    "goals": goals,
    "throughput": throughput,
    "weight sync": weight_sync,
    "grpo step": grpo_step,
    "handover": handover,
    "decoding": decoding,
    "real run": real_run,
    "curves": curves,
    "recipe runs": recipe_runs,
    "busy machine": busy_machine,
    "busy goals": busy_goals,
    "busy commands": busy_commands,
    "checkpoint": checkpoint,
    "performance": headline,
    "kill drill": kill_drill,
    "resharding": resharding,
    "conversion": conversion,
    "long tail": long_tail,
    "stream curves": stream_curves,
    "peers": peers,
    "peer lines": peer_lines,
    "cluster drill": cluster_drill,
    "stream kill drill": stream_kill_drill,
}


def with_tables(text: str) -> str:
    """The document with the current tables between their marks; tables that it has no marks for are left out."""
    for name, make in TABLES.items():
        if f"<!-- {name} -->\n" in text:
            text = put_between(text, name, written if (written := make()).count("\n") > 2 else NOTHING)
    return text


if __name__ == "__main__":
    for document in DOCUMENTS:
        path = ROOT / document
        path.write_text(with_tables(path.read_text()))
