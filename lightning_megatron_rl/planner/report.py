"""A plan in words: tables for people, plain data for programs."""

from collections.abc import Sequence
from typing import Any

from lightning_megatron_rl.planner.hardware import GIB
from lightning_megatron_rl.planner.memory import describe_recompute
from lightning_megatron_rl.planner.run import COLUMNS, Run
from lightning_megatron_rl.planner.scaling import Scaled, efficiency


def as_data(run: Run) -> dict[str, Any]:
    """Return the plan as plain data; sizes in GiB, times in seconds."""
    layers = run.layers()
    plans = list(run.stages())
    return {
        "model": run.model,
        "parameters": run.size.parameters,
        "device": run.kind.name,
        "gpus": run.world,
        "layout": run.layout.describe(run.world),
        "fits": run.fits,
        "needed_gib": run.memory().needed / GIB,
        "free_gib": run.kind.free / GIB,
        "stages": [
            {
                "stage": stage,
                "layers": layers[stage],
                "phases": {
                    phase: {name: size / GIB for name, size in row.items()} for phase, row in run.phases(plan).items()
                },
            }
            for stage, plan in plans
        ],
        "divisibility": divisibility(run),
        "work": {**vars(run.work), "micro_batches_per_update": run.microbatches, "recompute": run.recompute_setting},
        "cache_tokens": run.cache_tokens,
        "seconds": [
            {"phase": phase.name, "seconds": phase.seconds, "bound": phase.bound, "parts": dict(phase.parts)}
            for phase in run.seconds()
        ],
        "step_seconds": run.step_seconds,
        "save_seconds": run.saving().seconds,
        "traffic": [
            {"what": item.what, "link": item.link, "gib": item.size / GIB, "seconds": item.seconds}
            for item in run.traffic()
        ],
        "change": run.advice() if run.fits else run.smallest_change(),
    }


def divisibility(run: Run) -> list[str]:
    """Return each size that the layout divides, with its arithmetic."""
    layout, sizes, replicas = run.layout, run.divided, run.data_parallel
    tp, ep = layout.tensor_model_parallel_size, layout.expert_model_parallel_size
    found = [
        f"world {run.world} = tp {tp} x pp {layout.pipeline_model_parallel_size} x cp {layout.context_parallel_size}"
        f" x dp {replicas}",
        f"num_attention_heads {sizes.num_attention_heads} / tp {tp} = {sizes.num_attention_heads / tp:g}",
        f"num_key_value_heads {sizes.num_key_value_heads} / tp {tp} = {sizes.num_key_value_heads / tp:g}",
        *(f"{name} {width} / tp {tp} = {width / tp:g}" for name, width in sizes.widths.items()),
        f"num_hidden_layers {sizes.num_hidden_layers} over {len(run.layers())} stage(s): {_ranges(run.layers())}",
    ]
    if sizes.experts is not None:
        name, count = sizes.experts.count
        found.append(f"{name} {count} / ep {ep} = {count / ep:g}")
    batch = run.work.batch
    found.append(f"batch_size {batch} / dp {replicas} = {batch / replicas:g}")
    return found


def _ranges(layers: list[int]) -> str:
    return f"{layers[0]} each" if len(set(layers)) == 1 else " + ".join(map(str, layers))


def as_text(run: Run) -> str:
    """Return the plan as tables."""
    data = as_data(run)
    work = run.work
    what = (
        f"{work.prompts} prompts x {work.sequences // work.prompts} responses, {work.prompt_tokens} +"
        f" {work.response_tokens} tokens, {work.updates} update(s)"
        if work.sampled
        else f"{work.sequences} sequences of {work.tokens} tokens"
    )
    lines = [
        f"{run.model}: {run.size.parameters / 1e9:.3f}e9 parameters on {run.world} x {run.kind.name}"
        f" ({run.kind.free / GIB:.1f} GiB free each), {run.precision}",
        f"layout: {data['layout']}",
        f"step: {what}; {run.microbatches} micro-batch(es) per update of at most {run.microbatch_tokens} tokens"
        f"{describe_recompute(run.recompute)}",
    ]
    if work.sampled and run.sampling is not None:
        needs = run.sampling.needs
        engines = max(1, run.data_parallel // run.engines_on_gpu)
        lines.append(
            f"samplers: {engines} x {needs.tensor_parallel_size} GPU(s), cache for {data['cache_tokens']} tokens"
            f" ({data['cache_tokens'] // run.sampling.tokens} sequences of {run.sampling.tokens})"
        )
        if (alone := run.samplers_alone()) is not None:
            lines.append(
                f"samplers have GPUs without a trainer: {alone.needed / GIB:.1f} of {alone.free / GIB:.1f} GiB of each"
            )
    if work.sampled and run.servers is not None:
        lines.append(f"samplers: {run.servers.servers} server(s), whose memory and time are not planned")
    lines += ["", "GiB of one GPU, by pipeline stage and phase:"]
    header = ["stage", "phase", *COLUMNS, "free"]
    rows = [header]
    for stage in data["stages"]:
        for phase, row in stage["phases"].items():
            rows.append([str(stage["stage"]), phase, *(f"{row[name]:.1f}" for name in (*COLUMNS, "free"))])
    lines += _table(rows)
    lines += ["", "Seconds of a step:"]
    timed = [["phase", "seconds", "most of it"]]
    timed += [[item["phase"], f"{item['seconds']:.2f}", item["bound"]] for item in data["seconds"]]
    timed.append(["step", f"{data['step_seconds']:.2f}", ""])
    timed.append(["save (beside training)", f"{data['save_seconds']:.1f}", "disk"])
    lines += _table(timed)
    if data["traffic"]:
        lines += ["", "What one GPU sends in a step:"]
        sent = [["what", "link", "GiB", "seconds"]]
        sent += [[i["what"], i["link"], f"{i['gib']:.2f}", f"{i['seconds']:.3f}"] for i in data["traffic"]]
        lines += _table(sent)
    lines += ["", "Divides: " + "; ".join(data["divisibility"])]
    verdict = f"needs {data['needed_gib']:.1f} of {data['free_gib']:.1f} GiB"
    if data["fits"]:
        lines += ["", f"Fits: {verdict}. First thing to change: {data['change']}."]
    else:
        lines += ["", f"Does not fit: {verdict}. Smallest change that does: {data['change'] or 'none is known here'}."]
    return "\n".join(lines)


def summary(run: Run) -> str:
    """Return a plan in one line, for the table at start and the headers of recipes.

    Example:
        ``"70.2 of 78.6 GiB per GPU; 41 s per step, rollout 18 s, update 16 s"``
    """
    phases = {phase.name: phase.seconds for phase in run.seconds()}
    longest = sorted(phases.items(), key=lambda item: item[1], reverse=True)[:3]
    parts = ", ".join(f"{name} {_short(seconds)} s" for name, seconds in longest if name != "everything else")
    sampling = ", without sampling on servers" if run.work.sampled and run.servers is not None else ""
    return (
        f"{run.memory().needed / GIB:.1f} of {run.kind.free / GIB:.1f} GiB per GPU;"
        f" {_short(run.step_seconds)} s per step, {parts}{sampling}"
    )


def scaled_as_data(rows: Sequence[Scaled]) -> list[dict[str, Any]]:
    """Return a run on several numbers of GPUs as plain data; sizes in GiB, times in seconds."""
    found: list[dict[str, Any]] = []
    for row, share in zip(rows, efficiency(rows), strict=True):
        told: dict[str, Any] = {"gpus": row.gpus, "samples_per_s": row.samples_per_s, "efficiency": share}
        found.append({**told, **(as_data(row.run) if row.run else {"fits": False, "refusal": row.refusal})})
    return found


def scaled_cells(rows: Sequence[Scaled]) -> list[list[str]]:
    """Return a run on several numbers of GPUs as a table's cells, the header first."""
    names = ["GPUs", "layout", "batch", "step, s", "rollout", "log-probs", "update", "network", "samples/s", "per GPU"]
    table = [names]
    for row, share in zip(rows, efficiency(rows), strict=True):
        if row.run is None or share is None:
            table.append([str(row.gpus), "none fits", *["-"] * 8])
            continue
        run, seconds = row.run, {phase.name: phase.seconds for phase in row.run.seconds()}
        network = sum(item.seconds for item in run.traffic() if item.link == "network")
        phases = [_short(seconds[name]) if name in seconds else "-" for name in ("rollout", "log-probs", "update")]
        batch = str(run.work.batch)
        layout = run.layout.describe(row.gpus).split(" = ", 1)[1]
        rate = [f"{row.samples_per_s:.3g}", f"{share:.0%}"]
        table.append([str(row.gpus), layout, batch, _short(run.step_seconds), *phases, _short(network), *rate])
    return table


def scaled_as_text(rows: Sequence[Scaled]) -> str:
    """Return a run on several numbers of GPUs as a table, and below it why some have no layout."""
    refusals = [f"{row.gpus} GPUs: {row.refusal}" for row in rows if row.run is None]
    return "\n".join([*_table(scaled_cells(rows)), *refusals])


def _short(seconds: float) -> str:
    return f"{seconds:.2g}" if seconds < 10 else f"{seconds:.0f}"


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if column < 2 or not _is_number(rows[-1][column]) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _is_number(text: str) -> bool:
    return text.replace(".", "").replace("-", "").isdigit()
