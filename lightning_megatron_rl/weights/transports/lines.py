"""What weights go over between the ranks that hold them and the workers that load them: gloo, or NCCL beside it.

`GlooLines` are one process's connections to the others. `NCCLLines` send data over NCCL, and see by gloo who is gone.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_megatron_rl.compat.gloo import close_gloo

CPU = torch.device("cpu")
POLL_S = 0.0001  # between two looks at what is under way on the GPU: a message takes a third of a millisecond
ABORT_S = 5.0  # for NCCL to abort; if it takes longer, a thread goes on with it
FORMING_S = 60.0  # for NCCL to connect at most: it takes a second or two, and syncs wait meanwhile
NAME_S = 1.0  # after an error of NCCL, for the closed connection that says whose end it was
_SESSION_TAG = 1  # of gloo's messages that a process has sent, or has, everything; others have 0
_SESSION = timedelta(days=1)  # a session may be long: each of its messages has a deadline
_REASON_BYTES = 512  # of the text that says why NCCL cannot be used
_LATE = "the group was not there within"

Pair = tuple[Tensor, int]  # what goes to, or comes from, which process


class Lines(Protocol):
    """One process's lines to the others, on each of which messages go one after the other.

    Messages go in sessions, from `begin` to `end`. Both sides of a line begin and end the same sessions. A failure
    closes all lines of this process, so that none of the others waits for it.
    """

    device: torch.device  # where messages to send should be

    def begin(self) -> None:
        """Begin a session."""

    def send(self, tensor: Tensor, other: int) -> None:
        """Begin to send to process `other`, or note it for `go`, when what was sent to it before is there.

        Raises:
            RuntimeError: It is gone, or takes too long.
        """

    def receive(self, tensor: Tensor, other: int) -> None:
        """Begin to receive from process `other`, or note it for `go`; `tensor` is one of `empty`, or of `staged`."""

    def go(self) -> None:
        """Begin what was noted since the last time, then wait for what was begun before.

        Raises:
            RuntimeError: A process is gone, or takes too long.
        """

    def wait(self, other: int | None = None) -> None:
        """Wait for what is under way to or from a process, if there is anything; None: all of them.

        Raises:
            RuntimeError: It is gone, or takes too long.
        """

    def end(self) -> None:
        """Wait for what is under way and end the session.

        Raises:
            RuntimeError: A process is gone, or takes too long.
        """

    def empty(self, length: int) -> Tensor:
        """Return host memory to receive into, ``[bytes]`` uint8."""

    def staged(self, other: int) -> Tensor | None:
        """Return the memory of this device that messages of process `other` come to; None: they come to the host."""

    def close(self) -> None:
        """Leave the group."""


class GlooLines:
    """Connections of gloo, through the host's memory; see `Lines`.

    What is under way keeps them open: it is known here alone, not to the frames of an error that somebody keeps.

    Args:
        group: Of all processes.
    """

    device = CPU

    def __init__(self, group: Any) -> None:
        self.group = group
        self._under_way: dict[int, Any] = {}

    def begin(self) -> None:
        """See `Lines`."""

    def send(self, tensor: Tensor, other: int) -> None:
        """See `Lines`."""
        self.wait(other)
        self._under_way[other] = self.group.send([tensor.cpu()], other, 0)

    def receive(self, tensor: Tensor, other: int) -> None:
        """See `Lines`."""
        self._under_way[other] = self.group.recv([tensor], other, 0)

    def go(self) -> None:
        """See `Lines`: nothing is noted."""

    def wait(self, other: int | None = None) -> None:
        """See `Lines`."""
        for number in list(self._under_way) if other is None else [other]:
            try:
                if number in self._under_way:
                    self._under_way.pop(number).wait()
            except BaseException:
                self.close()
                raise

    def end(self) -> None:
        """See `Lines`."""
        self.wait()

    def empty(self, length: int) -> Tensor:
        """See `Lines`."""
        return torch.empty(length, dtype=torch.uint8)

    def staged(self, other: int) -> Tensor | None:
        """See `Lines`."""
        return None

    def close(self) -> None:
        """See `Lines`."""
        self._under_way.clear()
        self.group = None


class DataGroup(Protocol):
    """A group of all processes that moves data on their devices; `NCCLGroup` is one."""

    def exchange(self, sends: Sequence[Pair], receives: Sequence[Pair]) -> Callable[[], bool]:
        """Begin to send and receive, all at once.

        Returns:
            Whether it is complete, which raises a RuntimeError if it has failed.
        """

    def abort(self) -> None:
        """End what is under way, and the group."""


@dataclass(frozen=True)
class _Exchange:
    """Messages that are under way."""

    is_complete: Callable[[], bool]
    sends: list[Pair]
    receives: list[Pair]
    into: list[Pair]  # what the messages come to, on the device


class NCCLLines:
    """Data over NCCL between devices, with gloo beside it; see `Lines`.

    Messages are noted and go at once: a rank's to all workers, or a worker's of all ranks. So they take the one
    communicator of the group; single messages of NCCL make one for each pair of processes. The next ones can be put
    together meanwhile. With `queues` they are begun then, too, and wait on the device for those before them. NCCL waits
    for a process that is gone. So each process waits for a byte of its peers over gloo, which fails when a connection
    closes.

    Args:
        control: Connections to the same processes.
        group: For the data.
        peers: Names of the processes that this one has lines to, by number.
        device: This process's.
        staged: What comes from each process lies here, or lies here first. # [bytes] uint8 on the device
        timeout_s: Deadline of each message. # seconds
        queues: Whether messages are begun while those before them are under way. Only where one rank sends: with
            CUDA_DEVICE_MAX_CONNECTIONS=1 what waits on the device holds up all behind it, messages to other servers
            too, and two ranks may so wait for each other.
    """

    def __init__(
        self,
        control: GlooLines,
        group: DataGroup,
        peers: Mapping[int, str],
        device: torch.device,
        staged: Mapping[int, Tensor],
        timeout_s: float,
        *,
        queues: bool,
    ) -> None:
        self.device = device
        self._control = control
        self._group: DataGroup | None = group
        self._peers = peers
        self._staged = staged
        self._timeout_s = timeout_s
        self._queues = queues
        self._sends: list[Pair] = []
        self._receives: list[Pair] = []
        self._under_way: deque[_Exchange] = deque()  # two at most
        self._watch: _Watch | None = None

    def begin(self) -> None:
        """See `Lines`."""
        self._watch = _Watch(self._peers)
        try:
            self._watch.begin(self._control.group)
        except BaseException:
            self.close()
            raise

    def send(self, tensor: Tensor, other: int) -> None:
        """See `Lines`."""
        self._sends.append((tensor, other))

    def receive(self, tensor: Tensor, other: int) -> None:
        """See `Lines`."""
        self._receives.append((tensor, other))

    def go(self) -> None:
        """See `Lines`."""
        is_new = bool(self._sends or self._receives)
        if not is_new or not self._queues:
            self.wait()
        if not is_new:
            return
        try:
            assert self._group is not None, "these lines are closed"
            into = [(self._landing(tensor, other), other) for tensor, other in self._receives]
            assert self._watch is not None, "begin comes first"
            with self._watch.naming_the_gone():  # NCCL may know already
                is_complete = self._group.exchange(self._sends, into)
        except BaseException:
            self.close()
            raise
        self._under_way.append(_Exchange(is_complete, self._sends, self._receives, into))
        self._sends, self._receives = [], []
        self._wait_for_all_but(1)

    def _landing(self, tensor: Tensor, other: int) -> Tensor:
        """Return `tensor` if it is staged memory, else where its message is staged."""
        staged = self._staged[other]
        is_staged = tensor.untyped_storage().data_ptr() == staged.untyped_storage().data_ptr()
        return tensor if is_staged else staged[: tensor.numel()]

    def wait(self, other: int | None = None) -> None:
        """See `Lines`: for all of them, since those of several processes go at once."""
        self._wait_for_all_but(0)

    def _wait_for_all_but(self, left: int) -> None:
        while len(self._under_way) > left:
            exchange = self._under_way[0]
            try:
                self._wait_until(exchange.is_complete, [other for _, other in (*exchange.sends, *exchange.receives)])
                for (tensor, _), (source, _) in zip(exchange.receives, exchange.into, strict=True):
                    if source is not tensor:
                        tensor.copy_(source)
            except BaseException:
                self.close()
                raise
            self._under_way.popleft()

    def end(self) -> None:
        """See `Lines`: peers tell each other that they have sent, or have, everything."""
        try:
            self.go()
            self.wait()  # for what may have gone just now
            assert self._watch is not None, "begin comes first"
            for other, name in self._peers.items():
                try:
                    self._control.group.send([torch.ones(1, dtype=torch.uint8)], other, _SESSION_TAG).wait()
                except RuntimeError as error:
                    raise RuntimeError(f"{name} is gone: {error}") from error
            self._wait_until(self._watch.is_complete, self._watch.waits_for)
        except BaseException:
            self.close()
            raise
        self._watch = None

    def empty(self, length: int) -> Tensor:
        """See `Lines`."""
        return torch.empty(length, dtype=torch.uint8, pin_memory=self.device.type == "cuda")

    def staged(self, other: int) -> Tensor | None:
        """See `Lines`."""
        return self._staged[other]

    def close(self) -> None:
        """See `Lines`."""
        group, self._group = self._group, None
        if group is None:
            return
        if self._watch is not None:  # its threads hold the connections, on which others wait
            close_gloo(self._control.group, self._peers)
        self._control.close()
        abort(group, (self._under_way, self._sends, self._staged))
        self._sends, self._receives, self._staged, self._under_way = [], [], {}, deque()

    def _wait_until(self, is_complete: Callable[[], bool], others: Sequence[int]) -> None:
        """Wait at most as long as a message may take, and while all peers are there."""
        assert self._watch is not None, "begin comes first"
        deadline = time.monotonic() + self._timeout_s
        with self._watch.naming_the_gone():
            while not is_complete():
                self._watch.check()
                if time.monotonic() > deadline:
                    names = ", ".join(self._peers[other] for other in others)
                    raise RuntimeError(f"a message over NCCL took more than {self._timeout_s:.0f} s: {names}")
                time.sleep(POLL_S)


class _Watch:
    """Waits for a byte of each peer, each in a thread: gloo tells of a closed connection only to those who wait."""

    def __init__(self, peers: Mapping[int, str]) -> None:
        self._peers = peers
        self._left = set(peers)
        self._errors: dict[int, BaseException] = {}

    def begin(self, group: Any) -> None:
        """Begin to wait."""
        for other in self._peers:
            work = group.recv([torch.empty(1, dtype=torch.uint8)], other, _SESSION_TAG)
            threading.Thread(target=self._hear, args=(work, other), name="weights' peer", daemon=True).start()

    @property
    def waits_for(self) -> list[int]:
        """Peers whose byte has not come."""
        return sorted(self._left)

    def is_complete(self) -> bool:
        """Whether all have come."""
        return not self._left

    def check(self) -> None:
        """Raise a RuntimeError if a peer is gone."""
        for other, error in list(self._errors.items()):
            raise RuntimeError(f"{self._peers[other]} is gone: {error}") from error

    @contextmanager
    def naming_the_gone(self) -> Iterator[None]:
        """After an error, wait a short time for the end of a peer, and raise a RuntimeError that names it instead."""
        try:
            yield
        except RuntimeError:
            deadline = time.monotonic() + NAME_S
            while time.monotonic() < deadline:
                self.check()
                time.sleep(POLL_S)
            raise

    def _hear(self, work: Any, other: int) -> None:
        try:
            work.wait(_SESSION)
        except BaseException as error:
            self._errors[other] = error
        else:
            self._left.discard(other)


def abort(group: DataGroup, held: Any) -> None:
    """Abort a group, which may take long: then a thread goes on with it.

    Args:
        group: To abort.
        held: What the device may still write to or read until then.
    """

    def run() -> None:
        with suppress(Exception):  # it is left in any case
            group.abort()
        used.clear()

    used = [held]
    thread = threading.Thread(target=run, name="abort of NCCL", daemon=True)
    thread.start()
    thread.join(ABORT_S)


def open_nccl(
    control: GlooLines,
    number: int,
    names: Sequence[str],
    peers: Sequence[int],
    device: torch.device,
    lengths: Mapping[int, int],
    make: Callable[[], DataGroup],
    timeout_s: float,
    *,
    queues: bool,
) -> tuple[Lines, str]:
    """Make a group for the data with all others, or find together that it cannot be.

    Args:
        control: Connections to them.
        number: Of this process; 0 is the leader's.
        names: Of all processes.
        peers: Numbers of those that this one has lines to.
        device: This process's.
        lengths: Of the memory that is staged for what comes from each. # bytes
        make: Makes this process's group, without waiting for others.
        timeout_s: Deadline of each message; the group's first one has half of it, and at most `FORMING_S`. # seconds
        queues: See `NCCLLines`.

    Returns:
        The lines, and ""; or `control`, and why it is that. The same on all.

    Raises:
        RuntimeError: A process is gone.
    """
    reason, staged, group, forming = "", {}, None, None
    try:
        staged = {other: torch.empty(length, dtype=torch.uint8, device=device) for other, length in lengths.items()}
        group = make()
    except Exception as error:
        reason = _first_line(error)
    reason = _agree(control, number, names, reason)
    if not reason and group is not None:
        forming = _Forming(group, number, peers, device)
        reason = _agree(control, number, names, forming.wait(min(timeout_s / 2, FORMING_S)))
    if reason:
        if forming is not None:
            forming.give_up()
        elif group is not None:
            abort(group, staged)
        return control, reason
    assert group is not None
    named = {other: names[other] for other in peers}
    return NCCLLines(control, group, named, device, staged, timeout_s, queues=queues), ""


class _Forming:
    """The first byte on each line, which is when a group connects: in a thread, since it may never end."""

    def __init__(self, group: DataGroup, number: int, peers: Sequence[int], device: torch.device) -> None:
        self._group = group
        self._error: BaseException | None = None
        self._is_given_up = False
        self._is_complete = threading.Event()
        self._lock = threading.Lock()
        first = [(torch.ones(1, dtype=torch.uint8, device=device), other) for other in peers]
        self._first = ([], first) if number > min(peers) else (first, [])  # ranks come before workers
        if device.type == "cuda":  # the thread has a stream of its own
            torch.cuda.current_stream(device).synchronize()
        threading.Thread(target=self._run, name="weights' NCCL group", daemon=True).start()

    def wait(self, timeout_s: float) -> str:
        """Return why the group is not there, "" if it is."""
        if not self._is_complete.wait(timeout_s):
            return f"{_LATE} {timeout_s:.0f} s"
        return "" if self._error is None else _first_line(self._error)

    def give_up(self) -> None:
        """End the group, when it can be ended."""
        with self._lock:
            self._is_given_up, is_complete = True, self._is_complete.is_set()
        if is_complete:
            abort(self._group, self._first)

    def _run(self) -> None:
        try:
            is_complete = self._group.exchange(*self._first)
            while not is_complete() and not self._is_given_up:
                time.sleep(POLL_S)
        except BaseException as error:
            self._error = error
        with self._lock:
            self._is_complete.set()
            is_given_up = self._is_given_up
        if is_given_up:
            abort(self._group, self._first)


def _agree(control: GlooLines, number: int, names: Sequence[str], reason: str) -> str:
    """Return a process's reason, with its name; "" if none has one. The leader hears and tells all.

    Those who have waited in vain for another one know less than that one.
    """
    others = range(1, len(names))
    if number != 0:
        control.send(_text_bytes(reason), 0)
        control.wait()
        answer = torch.empty(_REASON_BYTES, dtype=torch.uint8)
        control.receive(answer, 0)
        control.wait()
        return _text_of(answer)
    told = {other: torch.empty(_REASON_BYTES, dtype=torch.uint8) for other in others}
    for other, text in told.items():
        control.receive(text, other)
    control.wait()
    reasons = [reason, *(_text_of(told[other]) for other in others)]
    named = [(text.startswith(_LATE), f"{name}: {text}") for name, text in zip(names, reasons, strict=True) if text]
    found = min(named, key=lambda one: one[0], default=(False, ""))[1]
    for other in others:
        control.send(_text_bytes(found), other)
    control.wait()
    return found


def _text_bytes(text: str) -> Tensor:
    padded = text.encode()[:_REASON_BYTES].ljust(_REASON_BYTES, b"\0")
    return torch.frombuffer(bytearray(padded), dtype=torch.uint8)


def _text_of(padded: Tensor) -> str:
    return padded.numpy().tobytes().rstrip(b"\0").decode(errors="ignore")


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:300]
