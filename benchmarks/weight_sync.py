"""B1: seconds until the sampler has the trainer's weights: ``python benchmarks/weight_sync.py``.

From the trainer's layout to vLLM's, export included, until the new weights sample (prefix cache reset). The limit is
the bytes of the weights read once and written once for each sampler, at the bandwidth that a copy on this device was
measured at (of several devices, at the sum of theirs), or what one worker reads out of other GPUs' memory, at the rate
of a copy from one GPU to another, if that takes longer. One step of training follows, whose log-prob mismatch shows
that the weights arrived. TRL's own sync runs in the same run with ``--peer trl``. With ``--profile FILE`` more syncs
follow, in a row, under Python's profiler and under torch's.

With ``--apart`` the sampler's process has the GPU behind the trainer's. With ``--servers N`` there are N vLLM servers,
one on each GPU behind the trainer's. The limit is then the links': see `bytes_over_a_link`.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import gpus
import peers
import torch
from common import default_device, facts, result_path, run_child, write_json, write_model
from compare import run_sides
from ours import BUCKET_MB, add_arguments, add_place_arguments, longest, passed_on, weights_over
from servers import serve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, default_device())
    parser.set_defaults(syncs=10, steps=1, warmup=0, prompts=4, response_tokens=32)
    parser.add_argument("--peer", choices=("trl", "none"), default="none", help="that runs, too; `make peers` first")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds per side")
    parser.add_argument("--out", type=Path)
    add_place_arguments(parser)
    parser.add_argument("--servers", type=int, default=0, help="vLLM servers that sample, one GPU each")
    parser.add_argument("--start-timeout", type=float, default=600.0, help="seconds until all servers answer")
    add_asleep_argument(parser)
    options = parser.parse_args()
    check_place(options)
    path = result_path("weight_sync", options.device, options.out)
    if options.apart or options.servers:
        sides = {"ours": measure_servers(options) if options.servers else measure_apart(options)}
        write_report(sides, options.device, path)
        return
    for sides in run_sides(passed_on(options), peers.chosen(options.peer), options.timeout):
        write_report(sides, options.device, path)
    options.profile = None  # it is of the first side
    if options.asleep and options.device == "cuda":
        sides["asleep"] = measure_asleep(passed_on(options), options.timeout)
        write_report(sides, options.device, path)


def check_place(options: argparse.Namespace) -> None:
    """Refuse a sampler that sleeps, and one on other GPUs beside settings that it cannot have.

    Raises:
        ValueError: With what to leave out.
    """
    if options.sleep_level:
        raise ValueError(f"--sleep-level {options.sleep_level} is for grpo_step.py; here --asleep measures it")
    if not options.servers and options.bucket_mb != BUCKET_MB:
        raise ValueError(f"--bucket-mb {options.bucket_mb} is for servers: give --servers N, or leave it out")
    if not options.servers and options.weights_over:
        raise ValueError("--weights-over is for servers: give --servers N, or leave it out")
    if not options.apart and options.weight_transfer != "auto":
        raise ValueError(f"--weight-transfer {options.weight_transfer} is for --apart: give that, or leave it out")
    if not options.apart and not options.servers:
        return
    if options.apart and options.servers:
        raise ValueError(
            "--apart and --servers: the sampler is a process of the trainer's or servers; give one of them"
        )
    if options.in_process:
        raise ValueError("--in-process with --apart or --servers: in the trainer's processes or elsewhere, not both")
    if options.peer != "none":
        raise ValueError(f"--peer {options.peer} with --apart or --servers: peers share the trainer's GPU; --peer none")
    if options.servers and (options.sampler_parallel > 1 or options.eager):
        raise ValueError("--servers with --sampler-parallel or --eager: a server has one GPU, and vLLM's own defaults")
    if options.apart and options.device == "cpu":
        raise ValueError("--apart on a CPU: every process shares it already; leave it out, or take --servers 1")
    replica = options.tensor_parallel * options.context_parallel
    if options.apart and options.devices != replica:
        raise ValueError(
            f"--apart with --devices {options.devices} and --tensor-parallel {options.tensor_parallel} x"
            f" --context-parallel {options.context_parallel} = {replica}: each replica of the model has a sampler of"
            " its own, and --apart places one"
        )
    needed, found = options.devices + options.sampler_parallel, torch.cuda.device_count()
    if options.apart and needed > found:
        raise ValueError(
            f"--apart: {options.devices} GPU(s) of the trainer + {options.sampler_parallel} of the sampler = {needed},"
            f" and there are {found}"
        )


def measure_apart(options: argparse.Namespace) -> dict[str, Any]:
    """Measure syncs to a process on other GPUs."""
    way = [f"--weight-transfer={options.weight_transfer}"]
    side = run_child("ours.py", [*passed_on(options), "--apart", *way], options.timeout)
    place = f"engine on another GPU over {side['sync']['transport']}"
    return {**side, "place": place, "samplers_elsewhere": 1, "trainer_devices": options.devices}


def measure_servers(options: argparse.Namespace) -> dict[str, Any]:
    """Start servers and measure syncs to them."""
    over = weights_over(options)
    with tempfile.TemporaryDirectory() as directory:
        model = write_model(options.model or Path(directory) / "model", options.shape, longest(options))
        on_cuda = options.device == "cuda"
        if on_cuda:
            torch.cuda.empty_cache()
        sizes = [f"--device={options.device}", f"--max-model-len={longest(options)}"]
        sizes += [f"--max-num-seqs={options.prompts * options.generations}", f"--kv-cache-memory-gb={options.cache_gb}"]
        sizes += [] if on_cuda else ["--num-threads=1"]
        arguments = [*passed_on(options), f"--weights-over={over}", f"--bucket-mb={options.bucket_mb}"]
        where = gpus.visible() if on_cuda else []
        with serve(model.absolute(), sizes, where, options.devices, options.servers, options.start_timeout) as found:
            arguments += [f"--model={model.absolute()}", f"--urls={','.join(found.urls)}"]
            side = run_child("ours.py", arguments, options.timeout, variables=found.environment)
    return {
        **side,
        "place": place_of_servers(options.servers, over, side, share=found.share) + buckets_of(options.bucket_mb),
        "samplers_elsewhere": options.servers,
        "trainer_devices": options.devices,
    }


def place_of_servers(servers: int, over: str, side: dict[str, Any], *, share: bool) -> str:
    """Return how many servers there are and what weights went over in fact, for the row's name.

    Example:
        ``place_of_servers(2, "gloo", {"sync": {"direct": {}}, "warnings": []}, share=False) == "2 servers over gloo"``

    Args:
        servers: How many.
        over: What weights should go over.
        side: What was measured; without ``direct`` nothing went straight from ranks to workers.
        share: Whether a server shared the trainer's GPU, where NCCL takes sockets instead of NVLink.
    """
    if side["sync"]["direct"] is None:
        over = "gloo in buckets"
    elif over == "nccl":
        fell_back = any("over gloo" in told for told in side["warnings"])
        over = "gloo, since NCCL did not connect" if fell_back else "NCCL"
        over += " (sockets: processes share a GPU)" if share and not fell_back else ""
    return f"{servers} server{'s' if servers > 1 else ''} over {over}"


def buckets_of(mebibytes: int) -> str:
    """Return what the row's name says of buckets that are not of the default size.

    Example:
        ``buckets_of(1024) == ", buckets of 1,024 MiB"``
    """
    return "" if mebibytes == BUCKET_MB else f", buckets of {mebibytes:,} MiB"


def add_asleep_argument(parser: argparse.ArgumentParser) -> None:
    """Let a run leave out the sampler that slept: it takes one more start."""
    parser.add_argument(
        "--asleep",
        action=argparse.BooleanOptionalAction,
        help="a sampler that slept, too; on CUDA, on the trainer's GPU",
    )
    parser.set_defaults(asleep=default_device() == "cuda")


def measure_asleep(arguments: list[str], timeout_s: float) -> dict[str, Any]:
    """Measure syncs to an engine that slept at level 2: its memory comes back, weights go, its cache comes back."""
    short = ["--sleep-level=2", "--steps=1", "--warmup=0", "--prompts=4", "--response-tokens=32"]
    return run_child("ours.py", [*arguments, *short], timeout_s)


def write_report(sides: dict[str, Any], device: str, path: Path) -> None:
    """Write and print what the syncs of two sides took; grpo_step.py calls it, too, to save a start of each."""
    bandwidth = sides["ours"]["devices_per_sampler"] * sides["ours"]["peaks"]["measured_bytes_per_s"]
    runs = {name: side for name, side in sides.items() if "failed" not in side}
    links = sides["ours"]["peaks"]["measured_peer_bytes_per_s"]
    samplers = sides["ours"].get("samplers_elsewhere", 1)  # each reads and writes all weights
    rates = {
        name: rate({**side["sync"], "peer_bytes": bytes_over_a_link(side)}, bandwidth / samplers, links)
        for name, side in runs.items()
        if side["sync"]
    }
    result = {
        **facts(device),
        "benchmark": "B1 weight sync",
        **sides,
        "rates": rates,
        "speedup_over_trl": rates["trl"]["seconds"] / rates["ours"]["seconds"] if "trl" in rates else None,
    }
    write_json(path, result)
    plot(result, path.with_suffix(".png"))
    for name, found in rates.items():
        print(
            f"{name:5s} {found['seconds'] * 1e3:9.2f} ms  {found['gb_per_s']:8.2f} GB/s  {found['share_of_limit']:7.2%}"
            f" of the limit ({found['limit_seconds'] * 1e3:.2f} ms)  extra {found['extra_gib']:.2f} GiB"
        )
    print(f"mismatch after the sync: {sides['ours']['mismatch'][0]:.5f}")


def bytes_over_a_link(side: dict[str, Any]) -> float:
    """Return what the busiest GPU sends to, or gets from, others in one sync.

    Where the sampler shares the trainer's GPUs, it is what one worker reads of others' memory. Servers get all weights
    each, and the trainer's ranks share the sending; each server has one GPU, which all its weights come in through.

    Example:
        10 GB to 4 servers: 40 GB of one rank, 20 GB of each of two, and 10 of each of eight, since a server gets 10.
    """
    if "samplers_elsewhere" not in side:
        return float(side["sync"].get("peer_bytes", 0))
    return float(side["sync"]["bytes"] * max(1.0, side["samplers_elsewhere"] / side["trainer_devices"]))


def rate(sync: dict[str, Any], bytes_per_s: float, peer_bytes_per_s: float | None) -> dict[str, Any]:
    """Return a sync's rate against the time that reading and writing its bytes takes, or reading them from other GPUs.

    Example:
        1 GB in 0.1 s at 2 TB/s: 10 GB/s, a limit of 1 ms, 1 % of it.
    """
    seconds, by_memory = sync["seconds"]["median"], 2 * sync["bytes"] / bytes_per_s
    by_links = sync.get("peer_bytes", 0) / peer_bytes_per_s if peer_bytes_per_s else 0.0
    limit = max(by_memory, by_links)
    return {
        "seconds": seconds,
        "gb_per_s": sync["bytes"] / seconds / 1e9,
        "limit_seconds": limit,
        "limited_by": "links between GPUs" if by_links > by_memory else "memory",
        "share_of_limit": limit / seconds,
        "extra_gib": sync["extra_bytes"] / 2**30,
    }


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw the time of each side beside the limit."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rates = result["rates"]
    figure, axes = plt.subplots(figsize=(6, 2.4))
    seconds = {"limit": rates["ours"]["limit_seconds"]} | {name: found["seconds"] for name, found in rates.items()}
    bars = axes.barh([*seconds], [1000 * value for value in seconds.values()])
    axes.bar_label(bars, fmt="%.3g", padding=3)
    axes.margins(x=0.12)  # for the labels
    axes.set(xlabel="ms", title=f"B1: weights of {result['ours']['shape']} on {result['device']}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
