"""A trainer and vLLM servers on hosts of their own, of which something goes: ``python -m tests.drills.cluster``.

Hosts are network namespaces (tests/cluster/hosts.py). The report has, for each event, the seconds until it was noticed
and until every response went on, and how many of the responses were lost or came twice.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from lightning_megatron_rl.rollout.servers.launch import SERVER_MODULE
from lightning_megatron_rl.utilities.versions import __version__
from tests.cluster.hosts import ROOT, Cluster, Host, cluster, why_no_hosts
from tests.drills.facts import facts
from tests.rollout.server_process import TOKEN, serve_command
from tests.tiny_models import save_tiny_model

PORT = 8000
DEADLINE_S = 400.0  # of anything that is waited for
LINK_DOWN_S = 20.0
EXACT = 1e-5  # nats
WRONG = "another-token-0123456789"
OLDER = "0.0.9"  # version
SLOW = "1mbit"  # per second


class Trainer:
    """One trainer's process, which takes orders.

    Args:
        host: Where.
        out: Folder for its files.
        model: Directory.
        urls: Of servers.
        token: Of servers.
    """

    def __init__(self, host: Host, out: Path, model: Path, urls: list[str], token: str = TOKEN) -> None:
        out.mkdir()
        self._host = host
        self.out = out
        self.log = out / "log"
        self._orders = 0
        line = ["-m", "tests.drills.cluster_trainer", "--model", str(model), "--out", str(out), "--urls", *urls]
        self.process = host.python(self.log, *line, LIGHTNING_MEGATRON_RL_TOKEN=token)

    def order(self, what: str) -> int:
        self._orders += 1
        (self.out / f"{self._orders}.order").write_text(what)
        return self._orders

    def wait(self, name: str) -> dict[str, Any]:
        """Read a file of its when it is there."""
        path, deadline = self.out / name, time.monotonic() + DEADLINE_S
        while not path.exists():
            if time.monotonic() > deadline or (self.process.poll() is not None and not path.exists()):
                raise RuntimeError(f"no {name} from the trainer:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.05)
        return dict(json.loads(path.read_text()))

    def drill(self, event: str, happens: Callable[[], None]) -> dict[str, Any]:
        """Let something happen in the middle of a batch; returns a line of the report."""
        number = self.order("batch")
        self.wait(f"{number}.began")
        happens()
        at = time.time()
        line = {"event": event, **judge(self.wait(f"{number}.json"), at)}
        print(line, flush=True)
        return line

    def push(self) -> dict[str, Any]:
        return self.wait(f"{self.order('push')}.json")

    def sample(self, event: str) -> dict[str, Any]:
        """Return a line of the report for a batch in which no server may be lost."""
        at = time.time()
        line = {"event": event, **judge(self.wait(f"{self.order('batch')}.json"), at, is_lost=False)}
        del line["noticed_s"], line["goes_on_s"]
        return line

    def end(self) -> None:
        """End it as a crash would."""
        kill(self._host, str(self.out))
        self.process.wait(DEADLINE_S)


def judge(told: dict[str, Any], at: float, *, is_lost: bool = True) -> dict[str, Any]:
    """Return what a batch says of something that happened at a time.

    Args:
        told: As `Watch.run` has it.
        at: Seconds, of the same clock.
        is_lost: Whether a server must be lost by it, or none may be.
    """
    lost_at = [time_ for seen in told["states"] for time_, state in seen if state == "lost" and time_ >= at - 0.5]
    ends = Counter(told["ends"])
    # a response goes on with the first tokens that come after the loss was noticed, or it is complete
    noticed = min(lost_at) if lost_at else None
    first = [
        next((time_ for time_ in told["came"][name] if noticed is not None and time_ > noticed), told["came"][name][-1])
        for name in told["asked"]
    ]
    problems = [f"{name} has {n} tokens" for name, n in zip(told["asked"], told["lengths"], strict=True) if n != 450]
    if told["error"] > EXACT:
        problems.append(f"a log-prob is off by {told['error']:.1e}")
    if is_lost is (noticed is None):
        problems.append("it was not noticed" if is_lost else "a server was lost")
    return {
        "noticed_s": None if noticed is None else round(noticed - at, 1),
        "goes_on_s": round(max(first) - at, 1),
        "lost": sum(name not in ends for name in told["asked"]),
        "repeated": sum(count > 1 for count in ends.values()),
        "logprob_error": told["error"],
        "problems": problems,
    }


def processes(host: Host, word: str) -> list[psutil.Process]:
    """Those of a host with this word in their command line; `nsenter`, which starts them, is outside."""
    found = []
    for process in host.processes():
        with suppress(psutil.Error):
            if any(word in part for part in process.cmdline()):
                found.append(process)
    return found


def kill(host: Host, word: str = SERVER_MODULE) -> None:
    """Kill a host's process, by a word of its command line; vLLM's server by default."""
    for process in processes(host, word):
        process.kill()


def serve(host: Host, out: Path, model: Path, *more: str, **options: Any) -> "subprocess.Popen[bytes]":
    line = [*serve_command(model, PORT, host.address), *more]
    log = out / f"server-{host.name}-{time.monotonic_ns()}.log"
    return host.start(log, *line, LIGHTNING_MEGATRON_RL_TOKEN=TOKEN, **options)


def serve_over(hosts: Sequence[Host], out: Path, model: Path) -> "list[subprocess.Popen[bytes]]":
    """One engine, of which each host has a worker; the first has the server."""
    more = ["--tensor-parallel-size", str(len(hosts)), "--nodes", str(len(hosts)), "--master", hosts[0].name]
    return [serve(host, out, model, *more, "--node-rank", str(rank)) for rank, host in enumerate(hosts)]


def serve_older(host: Host, out: Path, model: Path) -> None:
    """A server of another version of this package."""
    older = out / "older"
    shutil.copytree(ROOT / "lightning_megatron_rl", older / "lightning_megatron_rl")
    versions = older / "lightning_megatron_rl" / "utilities" / "versions.py"
    text = versions.read_text()
    assert f'"{__version__}"' in text
    versions.write_text(text.replace(f'"{__version__}"', f'"{OLDER}"'))
    serve(host, out, model, cwd=older, PYTHONPATH=str(older))


def over_nodes(hosts: Sequence[Host], out: Path, model: Path) -> list[dict[str, Any]]:
    """Drill an engine over two nodes, beside one on a node of its own.

    Args:
        hosts: Of the trainer, of the other server, and of the engine's nodes.
    """
    first, second, *nodes = hosts
    started = serve_over(nodes, out, model)
    trainer = Trainer(first, out / "spread", model, [f"http://{host.name}:{PORT}" for host in (nodes[0], second)])
    trainer.wait("ready.json")
    lines = [trainer.sample("one engine over two nodes")]
    print(lines[-1], flush=True)
    lines.append(trainer.drill("a node of an engine over two killed", lambda: kill(nodes[1])))
    began = time.monotonic()
    code = started[0].wait(DEADLINE_S)
    lines[-1]["other_node_ends_s"] = round(time.monotonic() - began, 1)
    left = [process.pid for host in nodes for process in processes(host, SERVER_MODULE)]
    if code != 1 or left:
        lines[-1]["problems"].append(f"the other node's serve ended with {code}, processes left: {left}")
    trainer.end()
    return lines


def refusal(event: str, trainer: Trainer) -> dict[str, Any]:
    """Return a line of a trainer that is refused."""
    told = trainer.wait("refused.json")
    problems = [] if told["error"] else ["it was not refused"]
    says = told["error"].replace(f"{trainer.out.parent}/", "")
    line = {"event": event, "noticed_s": round(told["seconds"], 1), "says": says, "problems": problems}
    print(line, flush=True)
    return line


def run(hosts: Cluster, out: Path, model: Path, other_model: Path) -> list[dict[str, Any]]:
    """Run all drills, one after the other; returns their lines."""
    first, second, third, fourth, fifth = hosts.hosts
    urls = [f"http://{host.name}:{PORT}" for host in (second, third)]
    for host in (second, third):
        serve(host, out, model)
    lines = over_nodes([first, second, fourth, fifth], out, model)
    serve_older(fourth, out, model)
    trainer = Trainer(first, out / "trainer", model, urls)
    trainer.wait("ready.json")
    lines += [
        refusal("wrong token", Trainer(first, out / "wrong", model, urls[:1], WRONG)),
        refusal("server with another model", Trainer(first, out / "mismatched", other_model, urls[:1])),
        refusal("two trainers at one server", Trainer(second, out / "two", model, urls[:1])),
        refusal("server of another version", Trainer(second, out / "version", model, [f"http://{fourth.name}:{PORT}"])),
        slow_link(hosts, third, trainer),
    ]

    def link_down() -> None:
        hosts.cut(third)

    def host_gone() -> None:
        hosts.cut(third)
        third.kill()

    number = trainer.order("batch")
    trainer.wait(f"{number}.began")
    link_down()
    at = time.time()
    time.sleep(LINK_DOWN_S)
    hosts.join(third)
    lines.append({"event": f"link down for {LINK_DOWN_S:.0f} s", **judge(trainer.wait(f"{number}.json"), at)})
    print(lines[-1], flush=True)
    wait_for_states(trainer, ["ready", "ready"])
    lines.append(trainer.drill("server killed", lambda: kill(third)))
    serve(third, out, model)
    joined = time.time()
    wait_for_states(trainer, ["ready", "ready"])
    lines.append({"event": "a new server joins", "goes_on_s": round(time.time() - joined, 1), "problems": []})
    lines.append(trainer.drill("link down for ever", link_down))
    hosts.join(third)
    wait_for_states(trainer, ["ready", "ready"])
    lines.append(trainer.drill("server's host gone", host_gone))
    at = time.time()
    hosts.cut(first)
    first.kill()
    after = Trainer(second, out / "after", model, urls[:1])
    ready = after.wait("ready.json")["at"]
    gone = "trainer's host gone, another trainer takes its server"
    lines.append({"event": gone, "goes_on_s": round(ready - at, 1), "problems": []})
    return lines


def slow_link(hosts: Cluster, host: Host, trainer: Trainer) -> dict[str, Any]:
    """Push and sample over a link that is slow, and is no reason to give a server up."""
    quick = trainer.push()["seconds"]
    hosts.slow(host, SLOW)
    slow = trainer.push()
    line = trainer.sample(f"link of a server at {SLOW.removesuffix('mbit')} Mbit/s")
    hosts.hasten(host)
    line |= {"push_s": round(slow["seconds"], 2), "push_before_s": round(quick, 2)}
    if slow["states"] != ["ready", "ready"]:
        line["problems"].append(f"the servers were {slow['states']} after the push")
    print(line, flush=True)
    return line


def wait_for_states(trainer: Trainer, states: list[str]) -> None:
    """Push weights until all servers have these states."""
    deadline = time.monotonic() + DEADLINE_S
    while trainer.push()["states"] != states:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the servers are not {states}")
        time.sleep(1.0)


def main() -> int:
    parser = argparse.ArgumentParser(description="Drills of servers on other hosts.")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cluster_drill.json"))
    options = parser.parse_args()
    reason = why_no_hosts()
    if reason is not None:
        print(f"no drills here: {reason}", file=sys.stderr)
        return 2
    shared = Path(tempfile.mkdtemp(prefix="drills-"))
    try:
        model, other = save_tiny_model(shared / "model", "qwen3"), save_tiny_model(shared / "other", "qwen2_tied")
        with cluster(shared, 5) as hosts:
            lines = run(hosts, shared, model, other)
    finally:
        shutil.rmtree(shared, ignore_errors=True)
    options.out.write_text(json.dumps({**facts("cluster"), "drills": lines}, indent=2) + "\n")
    return 1 if any(line["problems"] for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
