r"""The same run on nodes that Ray places: an actor on each runs torchrun there.

    python examples/cluster/ray_train.py --num-nodes 2 --devices 1 --accelerator cpu -- \
        fit --config configs/demo/sft.yaml --config examples/cluster/two_nodes.yaml

As a job: `ray job submit --working-dir . -- python examples/cluster/ray_train.py ...`. With --max-restarts and
`--ckpt_path last` a run whose node is lost goes on where it was saved last.
"""

import argparse
import ctypes
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from lightning_megatron_rl.parallel.ray_cluster import connect, place_on_nodes

GRACE_S = 60.0  # for the other nodes, which notice a lost one within 30 s and say which it was
START_S = 120.0  # for an actor; Ray itself notices a silent node after some 60 s
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent() -> None:
    """Have torchrun end its ranks when the actor is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Node:
    """What runs on each node."""

    def address(self) -> tuple[str, int]:
        """Return this node's address, and a port that is free there."""
        import ray

        with socket.create_server(("", 0)) as listener:
            return ray.util.get_node_ip_address(), listener.getsockname()[1]

    def train(self, torchrun: list[str]) -> int:
        """Run the ranks of this node; returns torchrun's exit code."""
        line = [sys.executable, "-m", "torch.distributed.run", *torchrun]
        return subprocess.run(line, preexec_fn=end_with_parent, check=False).returncode


def train(ray: Any, options: argparse.Namespace) -> int:
    """Run once; returns 0, or the exit code of the node that failed first."""
    from ray.util.placement_group import remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    asked = {"CPU": options.cpus_per_node or options.devices}
    if options.accelerator == "gpu":
        asked["GPU"] = options.devices
    group = place_on_nodes(asked, options.num_nodes, options.wait_s)
    actors = []
    try:
        for place in range(options.num_nodes):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place)
            made = ray.remote(Node).options(
                num_cpus=asked["CPU"], num_gpus=asked.get("GPU", 0), scheduling_strategy=strategy
            )
            actors.append(made.remote())
        places = ray.get([actor.address.remote() for actor in actors], timeout=START_S)
        (first, port), ranks = places[0], {}
        print(f"{options.num_nodes} nodes: {', '.join(address for address, _ in places)}", flush=True)
        for number, actor in enumerate(actors):
            line = ["--nnodes", str(options.num_nodes), "--node-rank", str(number)]
            line += ["--nproc-per-node", str(options.devices), "--master-addr", first, "--master-port", str(port)]
            line += ["--local-addr", places[number][0], "-m", options.module, *options.arguments]
            ranks[actor.train.remote(line)] = number
        return wait(ray, ranks)
    finally:
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(group)


def wait(ray: Any, ranks: dict[Any, int]) -> int:
    """Wait for all nodes, or for some time after the first has failed."""
    pending, failed, deadline = list(ranks), 0, float("inf")
    while pending and time.monotonic() < deadline:
        done, pending = ray.wait(pending, timeout=1.0)
        for reference in done:
            try:
                code = ray.get(reference)
            except ray.exceptions.RayError as error:
                print(f"node {ranks[reference]} is lost: {error}", file=sys.stderr, flush=True)
                code = 1
            if code and not failed:
                print(f"node {ranks[reference]} has ended with {code}", file=sys.stderr, flush=True)
                failed, deadline = code, time.monotonic() + GRACE_S
    return failed


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train on nodes that Ray places.")
    parser.add_argument("--num-nodes", type=int, required=True)
    parser.add_argument("--devices", type=int, default=1, help="ranks on each node")
    parser.add_argument("--accelerator", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--cpus-per-node", type=int, help="to reserve; default: one for each rank")
    parser.add_argument("--wait-s", type=float, default=300, help="for nodes that others have")
    parser.add_argument("--max-restarts", type=int, default=0)
    parser.add_argument("--module", default="lightning_megatron_rl", help="what each rank runs")
    parser.add_argument("arguments", nargs="+", help="of it, after --")
    return parser


def main() -> int:
    options = make_parser().parse_args()
    try:
        ray = connect()
        for attempt in range(options.max_restarts + 1):
            if attempt:
                print(f"restart {attempt} of {options.max_restarts}", flush=True)
            code = train(ray, options)
            if code == 0:
                break
    except (ValueError, RuntimeError) as error:
        print(f"ray_train: error: {error}", file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    sys.exit(main())
