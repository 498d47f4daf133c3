"""B4: whole GRPO steps whose responses have a long tail, synchronous and streamed: ``python benchmarks/long_tail.py``.

16 groups of 8 responses a step, of lognormal lengths (mean 884 tokens, longest 3,900; on a CPU a tiny model and 24 and
104): lengths belong to prompts, so every side draws the same tokens in the end, which is checked. The sampler works
between training steps ("shared") or beside them ("separate": on GPUs its own, on a CPU one core for the trainer and one
for the sampler, against the synchronous run on both), or two replicas do both on a device each ("replicas"). Peers run
in the same run: TRL's synchronous trainer, verl's synchronous one, and its asynchronous one at the same bounds; where
ours has two GPUs, TRL's asynchronous one, too.

A rate is that of the measured steps together, not of the median one: steps of a stream differ. The simulation has the
engine's measured speed, and sampling and training alone take time in it.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Self, get_args

import peers
import torch
from common import SHAPES, TokenPrompts, facts, make_tokenizer, result_path, write_json
from compare import Sides, Started, add_at_once, different_work, peer_side, start_peer
from long_tail_side import add_arguments, passed_on
from response_lengths import LongTail, work
from stream_simulation import Rates, simulate

from lightning_megatron_rl.modules.streaming import OnUpdate
from lightning_megatron_rl.rollout.stream import StreamPlan
from lightning_megatron_rl.sample import Prompt
from lightning_megatron_rl.utilities.cpus import OthersLoad

GOALS = {  # as many times as fast as the synchronous run
    "cuda": {
        ("shared", 1): 1.3,
        ("shared", 2): 1.45,
        ("shared", 4): 1.5,
        ("separate", 1): 1.6,  # of a synchronous run on both GPUs
        ("separate", 2): 2.0,
        ("separate", 4): 2.4,
        ("replicas", 1): 1.6,  # on the same GPUs
        ("replicas", 2): 2.0,
        ("replicas", 4): 2.4,
    },
    "cpu": {("separate", 1): 1.3, ("separate", 2): 1.3, ("separate", 4): 1.3},
}
OVER_TRL = {"shared": (2, 1.8), "separate": (2, 2.6), "replicas": (2, 2.6)}  # at this bound, with as many GPUs
OVER_VERL = (1.4, 1.3)  # synchronous both; at equal bounds
TRL_SIDES = {"shared": "trl", "separate": "trl, two GPUs", "replicas": "trl, two GPUs"}  # synchronous all
VERL_MODES = {"shared": "colocate_async", "separate": "separate_async", "replicas": "separate_async"}  # on as many GPUs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--bounds", default="1,2,4", help="of max_staleness")
    placements = "shared, separate, replicas (on CUDA these need a second GPU); default: the first two, if they can be"
    parser.add_argument("--placements", help=placements)
    parser.add_argument(
        "--in-flight",
        type=int,
        nargs="+",
        help="groups sampled at a time at most, for all bounds or each; 2 batches on CUDA, else 3",
    )
    parser.add_argument(
        "--servers", type=int, nargs="+", default=[0], help="that share the device of separate rows; 0: none"
    )
    parser.add_argument(
        "--on-update",
        nargs="+",
        default=["recomputed"],
        choices=get_args(OnUpdate),
        help="of caches",
    )
    parser.add_argument(
        "--parts", type=int, nargs="+", default=[1], help="in which separate rows train on a batch, as they come"
    )
    peers.add_arguments(parser)
    parser.add_argument("--trl-batch", type=int, default=4, help="sequences per TRL micro-batch")
    parser.add_argument(
        "--trl-cache-gb", type=float, default=24.0, help="TRL's cache at most, GiB: it stays beside training"
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds per side")
    add_at_once(parser)
    parser.add_argument("--resume", action="store_true", help="keep the rows that the result has, measure the others")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    bounds = [int(bound) for bound in options.bounds.split(",")]
    if options.in_flight:
        limits = options.in_flight * len(bounds) if len(options.in_flight) == 1 else options.in_flight
        if len(limits) != len(bounds):
            given = " ".join(map(str, limits))
            parser.error(f"--in-flight {given} with --bounds {options.bounds}: give one number, or one for each")
        options.in_flight = dict(zip(bounds, limits, strict=True))
    if max(bounds) > options.drain:
        parser.error(f"--bounds {options.bounds} with --drain {options.drain}: measured steps would begin nothing new")
    placements = options.placements.split(",") if options.placements else default_placements(options.device)
    load = os.getloadavg()[0]  # of other processes: nothing of this runs yet
    most = max(in_flight(options, bound) for bound in (0, *bounds))
    most_sequences = most * options.generations
    sizes = sorted({size for size in (1, 8, 32, 128, 512) if size < most_sequences} | {min(512, most_sequences)})
    if options.device == "cpu" and options.peer != "none":
        parser.error(f"--peer {options.peer} on a CPU: there it does not sample with vLLM. --peer none")
    names = peers.chosen(options.peer)
    before = saved(options) if options.resume else {}
    rows: list[dict[str, Any]] = before.get("rows", [])
    others: dict[str, Any] = before.get("peers", {})
    about = {**facts(options.device), "benchmark": "B4 long tail", "load_before": load, **epoch_of(options)}
    about["earlier"] = earlier_runs(before)

    todo = wanted(options, placements, bounds, rows)
    rates = [] if known_rates(rows) else ["--rates", *map(str, sizes)]  # by the first row
    failed: list[str] = []
    with Sides(options.at_once) as pool:
        started = [start_row(pool, options, side, most, rates if side == todo[0] else []) for side in todo]
        of_peers = {
            side: start_side(pool, options, side, more)
            for side, more in peer_sides(names, bounds, placements).items()
            if "samples_per_s" not in others.get(side, {})
        }
        for run in started:
            busy = OthersLoad()
            try:
                row = run.result()
            except RuntimeError as error:
                if not rows:
                    raise  # of the synchronous run, which all others are compared with
                failed.append(str(error))
                print(error, file=sys.stderr, flush=True)  # the others may take an hour
                continue
            rows.append({**row, "date": about["date"], "others_cpus": busy.cpus() if options.at_once == 1 else None})
            rows.sort(key=lambda one: (one["placement"] == "separate", one["devices"], one["max_staleness"], name(one)))
            finish(rows, options)
            write(rows, options, about, others)  # what is measured is not lost with a later side
            print(f"{name(row)}: {row['samples_per_s']:.1f} samples/s", flush=True)
        for side, runs in of_peers.items():
            others[side] = {**finish_side(options, side, runs, rows[0]), "date": about["date"]}
            write(rows, options, about, others)
    finish(rows, options)
    print_table(write(rows, options, about, others))
    if failed:
        sys.exit("\n".join(failed))


@dataclass(frozen=True)
class Side:
    """What a row of ours is measured with."""

    placement: str  # of the sampler: "shared" or "separate"
    bound: int  # of staleness; 0: synchronous
    devices: int  # of the trainer
    on_update: str = "recomputed"
    servers: int = 0  # that sample; 0: a process of the trainer's
    parts: int = 1  # of a batch, each trained on when it is there

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        """Return that of a row; rows of older results do not say all of it."""
        placement, *rest = row["placement"] or "shared", row["max_staleness"], row["devices"]
        return cls(placement, *rest, row.get("on_update", "recomputed"), row.get("servers", 0), row.get("parts", 1))

    @property
    def sampler(self) -> str:
        """What is special to the sampler, to stand behind a row's name.

        Example:
            ``Side("separate", 2, 1, "kept").sampler == ", caches kept"``
        """
        told = f", {self.servers} server{'s' if self.servers > 1 else ''}" if self.servers else ""
        told += "" if self.on_update == "recomputed" else f", caches {self.on_update}"
        return told + ("" if self.parts == 1 else f", batches in {self.parts} parts")


def wanted(
    options: argparse.Namespace, placements: Sequence[str], bounds: Sequence[int], rows: Sequence[dict[str, Any]]
) -> list[Side]:
    """Return the rows to measure; the synchronous run is the first."""
    there = {Side.of(row) for row in rows}
    on_cuda = options.device == "cuda"
    found = [Side("shared", 0, 1)] if not on_cuda or "shared" in placements else []
    if "replicas" in placements or (on_cuda and "separate" in placements):
        found.append(Side("shared", 0, 2))  # as many GPUs as trainer and sampler have
    for placement in placements:
        if placement == "replicas":
            found += [Side("shared", bound, 2, on_update) for on_update, bound in product(options.on_update, bounds)]
            continue
        servers, parts = (options.servers, options.parts) if placement == "separate" else ([0], [1])
        for number, on_update, count in product(servers, options.on_update, parts):
            found += [Side(placement, bound, 1, on_update, number, count) for bound in bounds]
    return [side for side in found if side not in there]


def start_row(
    pool: Sides, options: argparse.Namespace, side: Side, most: int, more: list[str]
) -> Future[dict[str, Any]]:
    """Start a side of ours; `most` groups are in flight in any of them, and `more` is what this one has besides."""
    arguments = [*passed_on(options), f"--devices={side.devices}", f"--bound={side.bound}"]
    arguments += [f"--placement={side.placement}", f"--on-update={side.on_update}", f"--servers={side.servers}"]
    arguments.append(f"--parts={side.parts}")
    arguments += [f"--in-flight={in_flight(options, side.bound)}", f"--most-in-flight={most}"]
    arguments += more
    needed = 2 if side.placement == "separate" else side.devices
    return pool.start("long_tail_side.py", arguments, options.timeout, devices=needed)


def saved(options: argparse.Namespace) -> dict[str, Any]:
    """Return the result that is there.

    Raises:
        ValueError: It is of another device, model or epoch, or of an older version of this benchmark.
    """
    path = result_path("long_tail", options.device, options.out)
    if not path.exists():
        return {}
    result: dict[str, Any] = json.loads(path.read_text())
    now = {**facts(options.device), **epoch_of(options)}
    for name in ("device", "versions", *epoch_of(options)):
        if result[name] != now[name]:
            raise ValueError(f"{path} has {name} {result[name]!r}, this run has {now[name]!r}: choose another --out")
    if any("train_s" not in row for row in result["rows"]):
        raise ValueError(f"{path} has rows of an older version of this benchmark: choose another --out")
    for side in (*result["rows"], *result["peers"].values()):
        side.setdefault("date", result["date"])  # older results have one for all
    return result


def known_rates(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the rates for the simulation, which one of the rows has measured."""
    return next((row["rates"] for row in rows if row["rates"]), None)


def epoch_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return what all rows of a result share."""
    return {name: getattr(options, name) for name in ("shape", "warmup", "steps", "drain", "groups", "generations")}


def in_flight(options: argparse.Namespace, bound: int) -> int:
    """Return the groups that are sampled at a time: more of them decode better, and take more of the cache."""
    given: dict[int, int] = options.in_flight or {}
    most = given.get(bound, (2 if options.device == "cuda" else 3) * options.groups)
    return min((bound + 1) * options.groups, max(most, options.groups))


def default_placements(device: str) -> list[str]:
    """Return the placements that the machine has devices for."""
    both = torch.cuda.device_count() > 1 if device == "cuda" else len(os.sched_getaffinity(0)) > 1
    return ["shared", "separate"] if both else ["shared"]


def peer_sides(names: Sequence[str], bounds: Sequence[int], placements: Sequence[str]) -> dict[str, list[str]]:
    """Return the sides of peers, and what each is told besides. They sample as many batches ahead as ours may.

    Args:
        names: Of peers.
        bounds: Of their staleness.
        placements: Of ours.

    Example:
        ``peer_sides(["trl"], [1], ["shared"]) == {"trl": []}``
    """
    sides: dict[str, list[str]] = {}
    if "trl" in names:
        sides = {TRL_SIDES[placement]: [] for placement in placements}
        if set(placements) != {"shared"}:  # its asynchronous trainer has a GPU for the sampler
            sides |= {f"trl, asynchronous, bound {bound}": [f"--bound={bound}"] for bound in bounds}
    if "verl" in names:
        if "shared" in placements:  # it has one GPU
            sides["verl, synchronous"] = ["--mode=sync"]
        for placement in placements:
            for bound in bounds:
                more = [f"--mode={VERL_MODES[placement]}", f"--bound={bound}", f"--ahead={bound}"]
                sides[verl_side(placement, bound)] = more
    return sides


def verl_side(placement: str, bound: int) -> str:
    """Return what verl's side is called that a row of ours is held to.

    Example:
        ``verl_side("separate", 2) == "verl, separate, bound 2"``
    """
    if not bound:
        return "verl, synchronous"
    return f"verl, bound {bound}" if placement == "shared" else f"verl, separate, bound {bound}"


def start_side(pool: Sides, options: argparse.Namespace, side: str, more: list[str]) -> Started:
    """Start a peer's side."""
    peer, is_asynchronous = side.partition(",")[0], "asynchronous" in side
    devices = 2 if "separate" in side or "two GPUs" in side or is_asynchronous else 1
    beside_training = peer == "trl" and not is_asynchronous
    arguments = [
        f"--device={options.device}",
        f"--shape={options.shape}",
        f"--precision={options.precision}",
        f"--steps={steps_of(options, peer)}",
        f"--warmup={options.warmup}",
        f"--prompts={options.groups}",
        f"--generations={options.generations}",
        f"--prompt-tokens={options.prompt_tokens}",
        f"--response-tokens={options.longest}",
        f"--max-tokens={options.max_tokens}",
        f"--cache-gb={min(options.cache_gb, options.trl_cache_gb) if beside_training else options.cache_gb}",
        f"--trl-batch={options.trl_batch}",
        "--long-tail",
        *more,
    ]
    return start_peer(pool, peer, arguments, options.timeout, options.verl_variants.split(","), devices)


def steps_of(options: argparse.Namespace, peer: str) -> int:
    """Return the steps of a peer behind the warm-up: TRL samples nothing ahead."""
    return int(options.steps + (options.drain if peer == "verl" else 0))


def finish_side(options: argparse.Namespace, name: str, started: Started, ours: dict[str, Any]) -> dict[str, Any]:
    """Return a peer's side, with what is different in its work from the synchronous run's; if it failed, why.

    TRL's asynchronous trainer leaves out what is too old, so that it trains on other prompts, as many.
    """
    peer, steps = name.partition(",")[0], options.warmup + options.steps
    same = {"response_tokens_per_step": ours["response_tokens_per_step"][:steps]}
    if peer == "verl":
        same = ours["work"]
    elif "asynchronous" in name:
        same = {"samples_per_step": [options.groups * options.generations] * steps}
    side = peer_side(peer, started, same)
    if "failed" in side:
        return side
    measured = side["seconds"][options.warmup :]
    seconds = whole_periods(measured, side.get("max_staleness", 0) + 1) or measured
    return {**side, "samples_per_s": options.groups * options.generations * len(seconds) / sum(seconds)}


def whole_periods(seconds: Sequence[float], period: int) -> Sequence[float]:
    """Return the seconds of those steps that a peer's rate is of.

    verl's asynchronous trainer samples for bound + 1 steps, then trains so often: other numbers of steps have more of
    one than of the other.

    Example:
        ``whole_periods([9, 1, 8, 1, 9], period=2) == [9, 1, 8, 1]``
    """
    return seconds[: len(seconds) // period * period]


def earlier_runs(before: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return command and date of the runs that measured what a result has already, the last one behind the others.

    Example:
        ``earlier_runs({}) == []``
    """
    if not before:
        return []
    return [*before.get("earlier", []), {name: before[name] for name in ("command", "date")}]


def write(
    rows: list[dict[str, Any]], options: argparse.Namespace, about: Mapping[str, Any], others: dict[str, Any]
) -> dict[str, Any]:
    """Write and draw what is known by now, and return it."""
    result = {**about, "rows": rows, "goals": goals(rows, options.device, others), "peers": others}
    path = result_path("long_tail", options.device, options.out)
    write_json(path, result)
    plot(result, path.with_suffix(".png"))
    return result


def finish(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Add to each row its sampler, and what follows from the first, a synchronous run: speed-ups, the simulation's.

    The simulation has the first row's speed of the engine, and each row's own seconds of training. It knows one
    sampler, which is interrupted by updates, for each replica: rows with servers have none, nor those whose responses
    are finished first. The synchronous run on two devices has none either: the others are held to what it measured.

    Raises:
        RuntimeError: A side has not used every prompt once, with responses of their lengths.
    """
    prompts, lengths = epoch(options), LongTail(options.longest)
    wanted = work(
        (prompt.token_ids, [lengths(prompt.token_ids, place) for place in range(options.generations)])
        for prompt in prompts
    )
    kept = slice(options.warmup, options.warmup + options.steps)
    measured_rates = known_rates(rows)
    for row in rows:
        if different := different_work(wanted, row["work"]):
            raise RuntimeError(f"{name(row)} did not do the work of the epoch: {'; '.join(different)}")
        side = Side.of(row)
        row["sampler"] = side.sampler
        separate = side.placement == "separate"
        seconds = None
        replicas = side.devices
        is_held = replicas == 1 or side.bound > 0
        if is_held and measured_rates and not side.servers and side.on_update != "finished":
            sizes = options.groups // replicas, side.bound, row["in_flight"] // replicas, options.generations
            plans = [StreamPlan(*sizes, side.parts) for _ in range(replicas)]
            rates = Rates(**measured_rates, train_s=row["train_s"])
            if side.on_update == "kept":
                rates = replace(rates, prefill_tokens_per_s=math.inf)
            seconds = simulate(plans, prompts, lengths, rates, separate=separate)[kept]
        row["simulated_step_s"] = None if seconds is None else sum(seconds) / options.steps
        base = synchronous(rows, side, on_cuda=options.device == "cuda")
        row["speedup"] = row["samples_per_s"] / base["samples_per_s"]
        row["epoch_speedup"] = base["epoch_s"] / row["epoch_s"]
        measured = options.groups * options.generations / base["samples_per_s"]
        compared = measured if base["simulated_step_s"] is None else base["simulated_step_s"]
        row["simulated_speedup"] = None if seconds is None else compared / row["simulated_step_s"]


def synchronous(rows: Sequence[dict[str, Any]], side: Side, *, on_cuda: bool) -> dict[str, Any]:
    """Return the synchronous run on as many devices; on a CPU separate cores are those of a trainer alone."""
    needed = 2 if side.devices == 2 or (on_cuda and side.placement == "separate") else 1
    alone = [row for row in rows if not row["max_staleness"]]
    return next((row for row in alone if row["devices"] == needed), alone[0])


def epoch(options: argparse.Namespace) -> list[Prompt]:
    """Return the prompts of every side."""
    vocab_size = SHAPES[options.shape]["vocab_size"]
    ids = make_tokenizer(vocab_size).get_vocab()
    size = options.groups * (options.warmup + options.steps + options.drain)
    rows = TokenPrompts(size, options.prompt_tokens, vocab_size)()
    texts = [str(row["prompt"]) for row in rows]
    return [Prompt([ids[word] for word in text.split()], text, index=index) for index, text in enumerate(texts)]


def goals(rows: list[dict[str, Any]], device: str, others: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what rows are held to, and whether they reach it; those whose sampler is not servers, a variant."""
    found = []

    def hold(side: str, goal: float, reached: float) -> None:
        found.append({"side": side, "goal": goal, "reached": reached, "ok": reached >= goal})

    for row in rows:
        if row.get("servers"):
            continue
        bound, ours = row["max_staleness"], row["samples_per_s"]
        placement = row["placement"] or "shared"
        if row["devices"] > 1:
            if not bound:
                continue  # synchronous peers have one
            placement = "replicas"
        if bound and (goal := GOALS[device].get((placement, bound))) is not None:
            hold(name(row), goal, row["speedup"])
        wanted = {verl_side(placement, bound): OVER_VERL[bool(bound)]}
        if bound == OVER_TRL[placement][0]:
            wanted[TRL_SIDES[placement]] = OVER_TRL[placement][1]
        for peer, goal in wanted.items():
            if "samples_per_s" in others.get(peer, {}):
                hold(f"{name(row)}, against {peer}", goal, ours / others[peer]["samples_per_s"])
    return found


def name(row: dict[str, Any]) -> str:
    """Return what a row is called.

    Example:
        ``name({"max_staleness": 2, "placement": "shared", "devices": 1}) == "shared, bound 2"``
    """
    devices = "" if row["devices"] == 1 else f" on {row['devices']} devices"
    if not row["max_staleness"]:
        return f"synchronous{devices}"
    return f"{row['placement']}{devices}, bound {row['max_staleness']}{Side.of(row).sampler}"


def print_table(result: dict[str, Any]) -> None:
    """Print a line for each row, and what became of the goals."""
    print(
        f"{'':22s}{'samples/s':>10s}{'s/step, median':>20s}{'trainer idle':>14s}{'sampler idle':>14s}"
        f"{'staleness':>11s}{'speed-up':>10s}{'simulated':>11s}"
    )
    for row in result["rows"]:
        step = f"{row['step_s']['median']:.3f} ± {row['step_s']['spread']:.0%}"
        simulated = "–" if row["simulated_speedup"] is None else f"{row['simulated_speedup']:.2f}"
        sampler = "–" if row["sampler_idle"] is None else f"{row['sampler_idle']:.0%}"
        print(
            f"{name(row):22s}{row['samples_per_s']:10.1f}{step:>20s}{row['trainer_idle']:14.0%}{sampler:>14s}"
            f"{row['staleness_max']:11.0f}{row['speedup']:10.2f}{simulated:>11s}"
        )
    for peer, side in result["peers"].items():
        told = f"{side['samples_per_s']:.1f} samples/s" if "samples_per_s" in side else f"failed: {side['failed']}"
        print(f"{peer}: {told}")
        for line in side.get("different_work", ()):
            print(f"{peer}: NOT THE SAME WORK: {line}")
    for goal in result["goals"]:
        verdict = "reached" if goal["ok"] else "missed"
        print(f"{goal['side']}: {goal['reached']:.2f} x, goal {goal['goal']:.2f} x: {verdict}", flush=True)


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw the speed-ups, and the simulation's beside them."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = result["rows"][::-1]
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.35 * len(rows)))
    places = range(len(rows))
    axes.barh(places, [row["speedup"] for row in rows], color="tab:blue", label="measured")
    axes.plot([row["simulated_speedup"] for row in rows], places, "o", color="tab:orange", label="simulated")
    wanted = {goal["side"]: goal["goal"] for goal in result["goals"]}
    marks = [(wanted[name(row)], place) for place, row in zip(places, rows, strict=True) if name(row) in wanted]
    if marks:
        axes.plot(*zip(*marks, strict=True), "|", markersize=16, color="black", label="goal")
    axes.set_yticks(places, [name(row) for row in rows])
    axes.set(xlabel="samples/s, times the synchronous run's", title=f"B4: long tail, {result['device']}")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
