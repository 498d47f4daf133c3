"""Hosts of a cluster on one machine: own network, hostname, process ids, /dev/shm and /tmp, joined by a bridge.

A host is a process in namespaces of its own, which ends with the test process; the kernel then takes apart what
belongs to it. Nothing needs to be removed after a test that was killed.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.distributed import CHILD_PATH, ROOT

NETWORK = "10.77.0"  # /24, within the namespaces alone
START_S = 10.0
_TOOLS = ("ip", "tc", "unshare", "nsenter", "mount")
# of this machine's network; and without bytecode imports take twice as long
_NOT_INHERITED = ("GLOO_SOCKET_IFNAME", "MASTER_ADDR", "MASTER_PORT", "PYTHONDONTWRITEBYTECODE")
# what the first process of a host does: what is below /tmp and named stays there, the rest is the host's own
_FIRST = """
set -e
name=$1 hosts=$2; shift 2
hostname "$name"
mount -t tmpfs -o size=4g tmpfs /dev/shm
mount -t tmpfs tmpfs /mnt
number=0
for kept in "$@"; do
  mkdir -p /mnt/$number; mount --bind "$kept" /mnt/$number; number=$((number + 1))
done
mount -t tmpfs tmpfs /tmp
number=0
for kept in "$@"; do
  mkdir -p "$kept"; mount --move /mnt/$number "$kept"; number=$((number + 1))
done
mount --bind "$hosts" /etc/hosts
ip link set lo up
echo ready
exec cat
"""


def why_no_hosts() -> str | None:
    """Return why this machine lets no test make hosts; None if it does."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not installed (iproute2, util-linux)"
    tried = subprocess.run(
        ["unshare", "--uts", "--net", "--mount", "--pid", "--fork", "sh", "-c", "mount -t tmpfs tmpfs /mnt"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"no right to make namespaces: {tried.stderr.strip()}" if tried.returncode else None


@dataclass
class Host:
    """One of them.

    Args:
        name: Its hostname.
        address: In the network of all hosts.
        pid: Of its first process, as this machine numbers it.
    """

    name: str
    address: str
    pid: int
    holder: "subprocess.Popen[str]"
    started: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def command(self, *command: str, cwd: Path = ROOT) -> list[str]:
        """Return a command line that runs `command` on this host."""
        return ["nsenter", "-t", str(self.pid), "--uts", "--net", "--mount", "--pid", f"--wd={cwd}", *command]

    def start(self, log: Path, *command: str, cwd: Path = ROOT, **environment: str) -> "subprocess.Popen[bytes]":
        """Start a command on this host; its output goes to `log`."""
        variables = {"PYTHONPATH": CHILD_PATH, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
        inherited = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        with log.open("wb") as file:
            process = subprocess.Popen(
                self.command(*command, cwd=cwd),
                env=inherited | variables,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def python(self, log: Path, *arguments: str, **options: Any) -> "subprocess.Popen[bytes]":
        """Start this Python on this host."""
        return self.start(log, sys.executable, *arguments, **options)

    def processes(self) -> list[psutil.Process]:
        """What was started on the host, as this machine numbers it."""
        space = Path(f"/proc/{self.pid}/ns/net").readlink()
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if (
                    process.pid not in (self.pid, self.holder.pid)
                    and Path(f"/proc/{process.pid}/ns/net").readlink() == space
                ):
                    found.append(process)
        return found

    def kill(self) -> None:
        """End all processes of the host at once, without a word to anybody."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.holder.communicate(timeout=START_S)
        for process in self.started:
            process.wait(START_S)

    def ip(self, *arguments: str) -> None:
        """Change the host's network."""
        subprocess.run(["nsenter", "-t", str(self.pid), "--net", "ip", *arguments], check=True)


class Cluster:
    """Hosts that reach each other, and nothing else.

    Args:
        hosts: By their order.
        switch: What joins them.
    """

    def __init__(self, hosts: list[Host], switch: Host) -> None:
        self.hosts = hosts
        self.switch = switch

    def cut(self, host: Host) -> None:
        """Pull a host's cable: packets are lost without a word, at either end."""
        self.switch.ip("link", "set", f"port-{host.name}", "nomaster")

    def join(self, host: Host) -> None:
        """Put the cable back."""
        self.switch.ip("link", "set", f"port-{host.name}", "master", "bridge")

    def slow(self, host: Host, rate: str) -> None:
        """Slow a host's link both ways, such as to "2mbit": packets wait up to two seconds, then they are lost."""
        shape = ["root", "tbf", "rate", rate, "burst", "16kb", "latency", "2s"]
        self._shape(host, "replace", *shape)

    def hasten(self, host: Host) -> None:
        """Undo `slow`."""
        self._shape(host, "del", "root")

    def _shape(self, host: Host, verb: str, *arguments: str) -> None:
        for end, device in ((self.switch, f"port-{host.name}"), (host, "eth0")):
            line = ["nsenter", "-t", str(end.pid), "--net", "tc", "qdisc", verb, "dev", device, *arguments]
            subprocess.run(line, check=True)


def _first_process(name: str, hosts_file: Path, kept: Sequence[Path]) -> Host:
    line = ["unshare", "--uts", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation"]
    holder = subprocess.Popen(
        [*line, "private", "sh", "-c", _FIRST, "sh", name, str(hosts_file), *map(str, kept)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stderr is not None
    if holder.stdout.readline() != "ready\n":
        holder.wait(START_S)
        raise RuntimeError(f"host {name} did not start: {holder.stderr.read()}")
    children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
    return Host(name, "", int(children[0]), holder)


@contextmanager
def cluster(shared: Path, count: int = 2, *, names_resolve: bool = True) -> Iterator[Cluster]:
    """Make hosts ``node-0``, ``node-1``, ... for as long as the context lasts.

    Args:
        shared: A directory that all of them have, under the same path.
        count: How many.
        names_resolve: Whether they know each other's names.
    """
    names = [f"node-{number}" for number in range(count)]
    addresses = [f"{NETWORK}.{number + 1}" for number in range(count)]
    lines = ["127.0.0.1 localhost"]
    if names_resolve:
        lines += [f"{address} {name}" for address, name in zip(addresses, names, strict=True)]
    hosts_file = shared / f"hosts-{time.monotonic_ns()}"
    hosts_file.write_text("\n".join(lines) + "\n")
    kept = [path for path in {shared.resolve(), ROOT, Path(sys.prefix)} if path.is_relative_to("/tmp")]
    made: list[Host] = []
    try:
        switch = _first_process("switch", hosts_file, kept)
        made.append(switch)
        switch.ip("link", "add", "bridge", "type", "bridge")
        switch.ip("link", "set", "bridge", "up")
        for name, address in zip(names, addresses, strict=True):
            host = _first_process(name, hosts_file, kept)
            made.append(host)
            host.address = address
            switch.ip("link", "add", f"port-{name}", "type", "veth", "peer", "name", "eth0", "netns", str(host.pid))
            host.ip("address", "add", f"{address}/24", "dev", "eth0")
            host.ip("link", "set", "eth0", "up")
            switch.ip("link", "set", f"port-{name}", "master", "bridge", "up")
        yield Cluster(made[1:], switch)
    finally:
        for host in reversed(made):
            host.kill()
