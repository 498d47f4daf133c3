"""What NCCL carries between the GPUs of this machine: ``python benchmarks/nccl_rates.py``.

All-to-all, all-gather and reduce-scatter among all GPUs, and messages from the first to one other and to all others at
once, as weights go to servers. Rates are the bytes that a GPU sends per second. NCCL's own variables
(``NCCL_MIN_P2P_NCHANNELS``) are those of the environment. On a CPU the collectives are gloo's, for a dry run.
"""

import argparse
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import default_device, facts, result_path, timed, write_json

MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    device = default_device()
    parser.add_argument("--device", choices=("cpu", "cuda"), default=device)
    parser.add_argument("--devices", type=int, default=torch.cuda.device_count() if device == "cuda" else 2)
    parser.add_argument("--mib", type=int, nargs="+", default=[32, 128, 512] if device == "cuda" else [1])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.devices < 2:
        parser.error(f"--devices {options.devices}: rates between GPUs need two")
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "rates"
        mp.spawn(_measure, (options, str(Path(directory) / "store"), file), nprocs=options.devices)
        rates = torch.load(file)
    own = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    result = {**facts(options.device), "benchmark": "NCCL", "devices": options.devices, "environment": own}
    write_json(result_path("nccl_rates", options.device, options.out), {**result, "rates": rates})
    for rate in rates:
        print(f"{rate['what']:28s} {rate['mib']:4d} MiB  {rate['seconds'] * 1e6:8.0f} us  {rate['gb_per_s']:6.1f} GB/s")


def _measure(rank: int, options: argparse.Namespace, store: str, file: Path) -> None:
    """Measure as one of the processes; the first writes what it saw."""
    on_cuda, world = options.device == "cuda", options.devices
    device = torch.device("cuda", rank) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_cuda else "gloo", f"file://{store}", rank=rank, world_size=world)
    rates: list[dict[str, Any]] = []
    for mib in options.mib:
        for what, (num_bytes, call) in _calls(mib * MIB, rank, world, device).items():
            _repeat(call, 3, device)
            dist.barrier()
            seconds = _repeat(call, options.repeats, device) / options.repeats
            rates.append({"what": what, "mib": mib, "seconds": seconds, "gb_per_s": num_bytes / seconds / 1e9})
    if rank == 0:
        torch.save(rates, file)
    dist.destroy_process_group()


def _calls(
    num_bytes: int, rank: int, world: int, device: torch.device
) -> dict[str, tuple[float, Callable[[], object]]]:
    """Return what is measured by name: the bytes that a GPU sends, and the call."""
    part = num_bytes // 2 // world  # of bf16, which each has of a whole
    here, there = (torch.zeros(part * world, dtype=torch.bfloat16, device=device) for _ in range(2))
    sent = num_bytes * (world - 1) / world
    return {
        "all-to-all": (sent, lambda: dist.all_to_all_single(there, here)),
        "all-gather": (sent, lambda: dist.all_gather_into_tensor(there, here[:part])),
        "reduce-scatter": (sent, lambda: dist.reduce_scatter_tensor(there[:part], here)),
    } | {
        f"messages of one to {others}": (num_bytes * others, partial(_send, rank, others, here))
        for others in {1, world - 1}
    }


def _send(rank: int, others: int, tensor: torch.Tensor) -> None:
    """Send a tensor from the first process to those behind it, at once."""
    if rank == 0:
        messages = [dist.P2POp(dist.isend, tensor, other) for other in range(1, others + 1)]
    else:
        messages = [dist.P2POp(dist.irecv, tensor, 0)] if rank <= others else []
    for work in dist.batch_isend_irecv(messages) if messages else ():
        work.wait()


def _repeat(call: Callable[[], object], count: int, device: torch.device) -> float:
    """Return the seconds of so many calls together."""
    return timed(lambda: [call() for _ in range(count)], device)


if __name__ == "__main__":
    main()
