"""One end of a push of weights between two hosts: ``send`` or ``receive``, a directory that both have, and an address.

Run by tests/cluster/test_push.py.
"""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from lightning_megatron_rl.weights.placement import fill_buckets
from lightning_megatron_rl.weights.transports.network import NetworkReceiver, NetworkSender, parts_of

DEADLINE_S = 4.0
MIB = 2**20
SIZES = {"large": 96 * MIB, "small": 5}  # bytes


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for name, size in SIZES.items()
    }


def send(meeting: Path, address: str) -> None:
    sender = NetworkSender(address, 1, DEADLINE_S)
    draft = meeting.with_suffix(".draft")
    draft.write_text(json.dumps(vars(sender.meeting)))
    draft.rename(meeting)
    sender.meet()
    began = time.monotonic()
    for bucket, placements in fill_buckets(iter(tensors().items()), 16 * MIB):
        for part in parts_of(bucket[: placements[-1].end], placements):
            sender.send(part)
    sender.end()
    print(f"sent in {time.monotonic() - began:.1f} s")


def receive(meeting: Path) -> None:
    while not meeting.exists():
        time.sleep(0.1)
    receiver, found = NetworkReceiver(), {}
    # what comes is looked at where vLLM's model would load it: the link is what is tested
    receiver.rank, receiver.model_runner = 0, SimpleNamespace()
    receiver._load = lambda weights: found.update((name, tensor.clone()) for name, tensor in weights)
    receiver.join_trainer(json.loads(meeting.read_text()))
    receiver.receive_weights()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors().items())
    print("received")


if __name__ == "__main__":
    if sys.argv[1] == "send":
        send(Path(sys.argv[2]), sys.argv[3])
    else:
        receive(Path(sys.argv[2]))
