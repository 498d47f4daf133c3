"""Where the ranks of several hosts meet: all of them come in time, or the error names those that have not."""

import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from lightning_megatron_rl.parallel import presence
from lightning_megatron_rl.parallel.hosts import (
    MARK,
    HostFacts,
    compare_hosts,
    find_unshared,
    interface_of,
    is_loopback,
    measure_host,
    name_hosts,
    own_address,
    remove_marks,
    set_mark,
)
from lightning_megatron_rl.parallel.nodes import NodeSettings
from lightning_megatron_rl.parallel.presence import Meeting, Presence

log = logging.getLogger(__name__)

LOOK_S = 0.2
TELL_S = 30.0  # between two words of what is waited for
LATE_S = 10.0  # that the others wait for rank 0's word after its own deadline
INTERFACE = "GLOO_SOCKET_IFNAME"  # torch's variable
ANYWHERE = {socket.AF_INET: "0.0.0.0", socket.AF_INET6: "::"}
_SELF = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # by which a host reaches what listens anywhere


@dataclass(frozen=True)
class Place:
    """Where one rank of a run on several hosts is."""

    rank: int
    local_rank: int
    world_size: int
    ranks_per_node: int
    address: str  # of rank 0's host
    port: int
    served: bool  # whether a launcher serves the store there; else rank 0 does

    @property
    def name(self) -> str:
        """For messages."""
        return f"rank {self.rank} on host {socket.gethostname()}"

    def describe(self, rank: int) -> str:
        """Name a rank whose host nobody knows yet."""
        return f"rank {rank} (node {rank // self.ranks_per_node}, local rank {rank % self.ranks_per_node})"


def meet(
    place: Place, device: torch.device, settings: NodeSettings, directories: Sequence[Path], timeout: timedelta
) -> tuple[dist.Store, list[HostFacts]]:
    """Wait for all ranks, compare their hosts, and watch them from then on.

    Args:
        place: Of this rank.
        device: Of this rank.
        settings: Deadlines, and what may differ.
        directories: That all hosts must share, as this rank's configuration names them.
        timeout: Of what waits in the store later.

    Returns:
        The store, for the default process group; facts of all ranks.

    Raises:
        RuntimeError: Rank 0's host cannot be reached, or not every rank has come in time; with names.
        ValueError: The hosts cannot work together; see `compare_hosts`.
    """
    deadline = time.monotonic() + settings.rendezvous_timeout_s
    base = _connect(place, deadline, timeout)
    store, attempt = _enter(base, place, deadline)
    if place.rank == 0:
        name = f"{MARK}{uuid.uuid4().hex[:12]}"
        marks = set_mark(directories, name)
        try:
            with _words_for_all(store, place):
                store.set("mark", json.dumps([name, len(marks)]))
                hosts = _collect(base, attempt, place, _facts(place, device), deadline)
                for warning in compare_hosts(
                    hosts, place.ranks_per_node, allow_different=settings.allow_different_hosts
                ):
                    log.warning(warning)
                mine = _address_of_first(hosts, place)
                _choose_interface(mine)
                watcher = Presence([facts.host for facts in hosts], 0, settings.lost_after_s)
                verdict = {"hosts": [asdict(facts) for facts in hosts], "meeting": asdict(watcher.listen(mine))}
        finally:
            remove_marks(marks)
        store.set("verdict", json.dumps(verdict))
    else:
        name, marked = json.loads(_await(store, "mark", place, deadline))
        unshared = find_unshared(directories, name, marked) if place.local_rank == 0 else []
        facts = _facts(place, device, unshared)
        store.set(f"host/{place.rank}", json.dumps(asdict(facts)))
        verdict = json.loads(_await(store, "verdict", place, deadline + LATE_S))
        if "error" in verdict:
            raise {"ValueError": ValueError}.get(verdict["kind"], RuntimeError)(verdict["error"])
        hosts = [HostFacts(**found) for found in verdict["hosts"]]
        _choose_interface(facts.address)
        watcher = Presence([found.host for found in hosts], place.rank, settings.lost_after_s)
        watcher.connect(Meeting(**verdict["meeting"]))
    presence.install(watcher)
    return dist.PrefixStore("group", store), hosts


@contextmanager
def _words_for_all(store: dist.Store, place: Place) -> Iterator[None]:
    """Tell all ranks what rank 0 raises, so that they raise it, too."""
    try:
        yield
    except (ValueError, RuntimeError, OSError) as error:
        store.set("verdict", json.dumps({"error": str(error), "kind": type(error).__name__}))
        if not place.served:
            time.sleep(2 * LOOK_S)  # the store ends with this process
        raise


def _facts(place: Place, device: torch.device, unshared: Sequence[str] = ()) -> HostFacts:
    address = own_address(place.address, place.port)
    return measure_host(place.rank, place.local_rank, address, device, unshared)


def _connect(place: Place, deadline: float, timeout: timedelta) -> dist.Store:
    """Return the store of all ranks."""
    if place.rank == 0 and not place.served:
        listener = _listen(place)
        here = listener.getsockname()[0]
        store = dist.TCPStore(
            _SELF.get(here, here),
            place.port,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),  # the store closes it
        )
    else:
        _reach(place, deadline)
        store = dist.TCPStore(place.address, place.port, None, is_master=False, timeout=timeout)
    return dist.PrefixStore("lightning-megatron-rl", store)


def _enter(base: dist.Store, place: Place, deadline: float) -> tuple[dist.Store, str]:
    """Return the part of the store that belongs to this attempt, and the attempt's name, which rank 0 chooses.

    After a restart by torchrun the words of the last attempt are in the same store, and torchrun's own count differs
    between nodes: only the one whose rank has failed counts it. So each rank asks under a name that nobody had before.
    """
    name = uuid.uuid4().hex
    if place.rank > 0:
        base.set(f"asks/{place.rank}", name)
        name = _await(base, f"attempt of {name}", place, deadline).decode()
    return dist.PrefixStore(name, base), name


def _answer(base: dist.Store, attempt: str, ranks: Sequence[int]) -> None:
    """Tell ranks that ask which attempt this is; those of the last one hear nothing any more."""
    for rank in ranks:
        if base.check([f"asks/{rank}"]):
            base.set(f"attempt of {base.get(f'asks/{rank}').decode()}", attempt)


def _listen(place: Place) -> socket.socket:
    """Bind rank 0's port, where only the run's own network reaches it if that can be told.

    Raises:
        RuntimeError: Another process has the port.
    """
    try:
        found = socket.getaddrinfo(place.address, place.port, type=socket.SOCK_STREAM)
    except OSError:
        found = []
    family = socket.AF_INET6 if {entry[0] for entry in found} == {socket.AF_INET6} else socket.AF_INET
    address = next((str(entry[4][0]) for entry in found if entry[0] == family), "")
    anywhere = ANYWHERE[family]
    if not address or is_loopback(address):
        address = anywhere  # the others know this host by another address than it does itself
    for candidate in (address, anywhere):
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((candidate, place.port))
        except OSError as error:
            listener.close()
            if candidate == anywhere or "in use" in str(error):
                raise RuntimeError(
                    f"{place.name} cannot listen at the rendezvous port of this run, {candidate}:{place.port}"
                    f" ({error}). Another run on this host may hold it: set MASTER_PORT to another port on all nodes."
                ) from error
            continue
        listener.listen(place.world_size)
        return listener
    raise AssertionError("the last candidate returns or raises")


def _reach(place: Place, deadline: float) -> None:
    """Wait until rank 0's host answers.

    Raises:
        RuntimeError: Its name does not resolve, or nobody listens there before the deadline.
    """
    told = time.monotonic()
    while True:
        try:
            found = socket.getaddrinfo(place.address, place.port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            problem = (
                f"the name {place.address!r} of rank 0's host does not resolve here ({error}): give its IP address"
                " (MASTER_ADDR, or torchrun's --rdzv-endpoint and --local-addr), or enter it in DNS or /etc/hosts"
            )
        else:
            address = str(found[0][4][0])
            try:
                socket.create_connection((address, place.port), timeout=5.0).close()
                return
            except OSError as error:
                problem = (
                    f"nobody answers at {place.address}:{place.port} ({address}; {error}): rank 0 has not started there"
                    " or has ended, its port differs (MASTER_PORT), or a firewall is between the hosts"
                )
        now = time.monotonic()
        if now > deadline:
            raise RuntimeError(f"{place.name} cannot join its run: {problem}.")
        if now - told > TELL_S:
            told = now
            log.warning("%s waits: %s", place.name, problem)
        time.sleep(1.0)


def _await(store: dist.Store, key: str, place: Place, deadline: float) -> bytes:
    """Wait for a word of rank 0's."""
    while True:
        try:
            if store.check([key]):
                return bytes(store.get(key))
        except RuntimeError as error:  # torch's own, of a connection that is gone
            raise RuntimeError(
                f"{place.name} has lost rank 0's host {place.address} before all ranks had come ({error}): rank 0's log"
                " has the reason."
            ) from error
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"{place.name} waited in vain for rank 0 (at {place.address}:{place.port}) to say that all ranks have"
                " come: its log has the reason."
            )
        time.sleep(LOOK_S)


def _collect(base: dist.Store, attempt: str, place: Place, own: HostFacts, deadline: float) -> list[HostFacts]:
    """Wait for the facts of all ranks of this attempt.

    Raises:
        RuntimeError: Not all have come in time; names those that have not.
    """
    store = dist.PrefixStore(attempt, base)
    found: dict[int, HostFacts] = {0: replace(own, clock=0.0)}
    told = began = time.monotonic()
    while len(found) < place.world_size:
        _answer(base, attempt, [rank for rank in range(1, place.world_size) if rank not in found])
        for rank in range(1, place.world_size):
            if rank not in found and store.check([f"host/{rank}"]):
                facts = HostFacts(**json.loads(store.get(f"host/{rank}")))
                found[rank] = replace(facts, clock=facts.clock - time.time())
        now = time.monotonic()
        missing = [rank for rank in range(place.world_size) if rank not in found]
        if not missing:
            break
        names = ", ".join(place.describe(rank) for rank in missing[:8])
        names += f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        here = ", ".join(sorted({facts.host for facts in found.values()}))
        if now > deadline:
            raise RuntimeError(
                f"only {len(found)} of {place.world_size} ranks have come to {place.name} within {now - began:.0f} s."
                f" Missing: {names}; there: {here}. Look at the logs of the missing ones; if their hosts only start"
                " later, raise MegatronStrategy(nodes=NodeSettings(rendezvous_timeout_s=...))."
            )
        if now - told > TELL_S:
            told = now
            log.warning("after %.0f s still waiting for %s; there: %s", now - began, names, here)
        time.sleep(LOOK_S)
    return name_hosts([found[rank] for rank in range(place.world_size)], place.ranks_per_node)


def _address_of_first(hosts: Sequence[HostFacts], place: Place) -> str:
    """Return the address by which the other hosts reach rank 0's: its name may be a loopback address at home."""
    others = [facts.address for facts in hosts if facts.host != hosts[0].host]
    return own_address(others[0], place.port) if others else hosts[0].address


def _choose_interface(address: str) -> None:
    """Let gloo take the network that the run goes over; by itself it takes what the host's own name resolves to."""
    name: Any = interface_of(address)
    if name is not None:
        os.environ.setdefault(INTERFACE, name)
