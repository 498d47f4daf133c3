"""Messages over NCCL's lines are those of gloo, bit by bit; a process that goes, or cannot, holds nobody up.

There is no GPU here: a group of gloo stands for that of NCCL, and like it waits for a process that is gone.
"""

import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from lightning_megatron_rl.compat.gloo import close_gloo, gloo_group
from lightning_megatron_rl.weights.lent import LentPiece, LentWeight
from lightning_megatron_rl.weights.loader import WeightLoader
from lightning_megatron_rl.weights.messages import HeldPart, HeldTensor, Messages, plan_messages
from lightning_megatron_rl.weights.placement import fill_buckets
from lightning_megatron_rl.weights.reads import Read
from lightning_megatron_rl.weights.rectangles import Rectangle
from lightning_megatron_rl.weights.transports import direct, lines
from lightning_megatron_rl.weights.transports.direct import DirectMeeting, RankEnd, WorkerEnd
from lightning_megatron_rl.weights.transports.lines import Pair
from tests.distributed import WorkerError, WorkerPool, free_port

HOST = "127.0.0.1"
DEADLINE = 30.0  # seconds
SHORT = 6.0  # half of a deadline that is reached; shorter ones are missed on a busy machine
AT_ONCE = 8.0  # for a failure to be known, on a busy machine; far below `DEADLINE`
LIMIT = 4096  # bytes of a message


class HostGroup:
    """Stands for `NCCLGroup` on the CPU: a failure is not seen, what is under way never ends then."""

    made = 0  # and connected
    calls: list[tuple[list[int], list[int]]] = []  # noqa: RUF012  of this process: whom it sent to, and received from

    def __init__(self, store: dist.Store, number: int, size: int, device: torch.device) -> None:
        self._store, self._number, self._size = store, number, size
        self._group: Any = None

    def exchange(self, sends: Sequence[Pair], receives: Sequence[Pair]) -> Callable[[], bool]:
        if self._group is None:
            self._group = gloo_group(self._store, self._number, self._size, timedelta(seconds=60), HOST)
            HostGroup.made += 1
        HostGroup.calls.append(([other for _, other in sends], [other for _, other in receives]))
        works = [self._group.send([tensor], other, 0) for tensor, other in sends]
        works += [self._group.recv([tensor], other, 0) for tensor, other in receives]
        is_complete = threading.Event()

        def wait() -> None:
            with suppress(RuntimeError):
                for work in works:
                    work.wait()
                is_complete.set()

        threading.Thread(target=wait, daemon=True).start()
        return is_complete.is_set

    def abort(self) -> None:
        if self._group is not None:
            close_gloo(self._group, [other for other in range(self._size) if other != self._number])


class LateGroup(HostGroup):
    """One that tells late that a message has come."""

    overlaps = 0  # messages that were begun before the end of the one before was known
    most = 0  # that were under way
    under_way: list[float] = []  # noqa: RUF012  when each is known to have come

    def exchange(self, sends: Sequence[Pair], receives: Sequence[Pair]) -> Callable[[], bool]:
        found, now = super().exchange(sends, receives), time.monotonic()
        LateGroup.under_way = [until for until in LateGroup.under_way if until > now]
        known = max([now, *LateGroup.under_way]) + 0.1  # one after the other
        LateGroup.overlaps += bool(LateGroup.under_way)
        LateGroup.under_way.append(known)
        LateGroup.most = max(LateGroup.most, len(LateGroup.under_way))
        return lambda: time.monotonic() > known and found()


class NoGroup(HostGroup):
    """One that the first worker cannot make."""

    def __init__(self, store: dist.Store, number: int, size: int, device: torch.device) -> None:
        if number == 1:
            raise RuntimeError("no driver\nof the network")
        super().__init__(store, number, size, device)


class FailingGroup(HostGroup):
    """One whose first message fails on the first worker, when all are connected."""

    def exchange(self, sends: Sequence[Pair], receives: Sequence[Pair]) -> Callable[[], bool]:
        found = super().exchange(sends, receives)
        if self._number == 1:
            raise RuntimeError("no way\nfrom there")
        return found


class SlowGroup(HostGroup):
    """One that the last process connects to too late."""

    def exchange(self, sends: Sequence[Pair], receives: Sequence[Pair]) -> Callable[[], bool]:
        if self._group is None and self._number == self._size - 1:
            time.sleep(SHORT * 1.5)
        return super().exchange(sends, receives)


@dataclass(frozen=True)
class Setting:
    """Ranks and workers, and a model; each process makes the same one."""

    num_ranks: int
    num_workers: int
    port: int
    device: str = "cpu"
    rows: int = 48
    limit: int = LIMIT
    deadline: float = DEADLINE

    @property
    def number(self) -> int:
        """Of this process."""
        return int(os.environ["RANK"])

    def shapes(self) -> dict[str, tuple[tuple[int, int], torch.dtype]]:
        sizes = {"a": torch.float32, "b": torch.bfloat16, "c": torch.float32, "d": torch.bfloat16}
        return {name: ((self.rows + 2 * place, 34), dtype) for place, (name, dtype) in enumerate(sizes.items())}

    def held(self, rank: int, seed: int) -> dict[str, HeldTensor]:
        """What a rank has: of each tensor rows of its own; the first rank has three quarters."""
        found = {}
        for place, (name, (shape, dtype)) in enumerate(self.shapes().items()):
            generator = torch.Generator().manual_seed(100 * seed + place)
            whole = torch.randn(shape, generator=generator).to(dtype)
            cut = shape[0] if self.num_ranks == 1 else shape[0] * 3 // 4
            begin, end = (0, cut) if rank == 0 else (cut, shape[0])
            rectangle = Rectangle(begin, 0, end - begin, shape[1])
            mine = whole[begin:end].to(self.device)[None]
            found[name] = HeldTensor(shape, dtype, (HeldPart(rectangle, mine),))
        return found

    def reads(self) -> list[dict[str, Read]]:
        """Columns of all tensors for the first worker, two rows of one for the other."""
        found = {}
        for name, ((rows, columns), dtype) in self.shapes().items():
            found[name] = Read((rows, columns), dtype, (Rectangle(0, 1, rows, columns - 2),))
        shape, dtype = self.shapes()["b"]
        return [found, {"b": Read(shape, dtype, (Rectangle(1, 0, shape[0] - 2, shape[1]),))}][: self.num_workers]

    def messages(self) -> list[list[Messages]]:
        holdings = [
            {name: tensor.holding for name, tensor in self.held(rank, 0).items()} for rank in range(self.num_ranks)
        ]
        planned = plan_messages(holdings, self.reads(), self.limit)
        assert planned is not None
        return planned

    def meeting(self, key: str, backend: str) -> DirectMeeting:
        sizes = (self.num_ranks, self.num_workers)
        return DirectMeeting(key, HOST, self.port, HOST, *sizes, self.deadline, backend)  # type: ignore[arg-type]

    def meet(self, key: str, backend: str) -> RankEnd | WorkerEnd:
        """This process's end."""
        meeting, number, device = self.meeting(key, backend), self.number, torch.device(self.device)
        if number >= self.num_ranks:
            worker = number - self.num_ranks
            return WorkerEnd(meeting, worker, self.reads()[worker], device)
        messages = self.messages()
        end = RankEnd(meeting, number, messages[number], device)
        end.meet(messages)
        return end

    def push(self, end: RankEnd | WorkerEnd, seed: int) -> Any:
        """Send, or receive: what a rank has sent to each worker, or the bytes of a worker's tensors."""
        if isinstance(end, WorkerEnd):
            tensors, _ = end.receive(nan=True)
            return {name: tensor.view(torch.uint8).clone() for name, tensor in tensors.items()}
        return end.send(self.held(self.number, seed))[0]


@dataclass
class Seen:
    """What a process saw."""

    pushes: dict[str, list[Any]] = field(default_factory=dict)  # by backend
    groups: int = 0  # that stand for NCCL's, and were made
    calls: list[tuple[list[int], list[int]]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    error: str = ""
    seconds: float = 0.0
    threads: list[str] = field(default_factory=list)  # that are left


def keep_store(setting: Setting) -> Any:
    """The store of all meetings, in the first process; the others wait for it."""
    is_master = setting.number == 0
    return dist.TCPStore(HOST, setting.port, is_master=is_master, timeout=timedelta(seconds=60), wait_for_workers=False)


def threads_left() -> list[str]:
    """Threads of lines that are there after a moment."""
    deadline = time.monotonic() + AT_ONCE
    while True:
        found = [thread.name for thread in threading.enumerate() if "NCCL" in thread.name or "peer" in thread.name]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def leave_last(store: Any, setting: Setting) -> None:
    """In the first process, which has the store, wait for the others."""
    count = store.add("left", 1)
    while setting.number == 0 and count < setting.num_ranks + setting.num_workers:
        time.sleep(0.02)
        count = store.add("left", 0)


def push_both_ways(setting: Setting, group: type[HostGroup] | None) -> Seen:
    """Push twice over gloo and twice over NCCL."""
    store, seen = keep_store(setting), Seen()
    handler = logging.Handler()
    handler.emit = lambda record: seen.warnings.append(record.getMessage())  # type: ignore[method-assign]
    direct.log.addHandler(handler)
    HostGroup.made, HostGroup.calls = 0, []
    try:
        with mock.patch.object(direct, "NCCLGroup", group or direct.NCCLGroup):
            for backend in ("gloo", "nccl"):
                end = setting.meet(backend, backend)
                before = len(HostGroup.calls)
                began = time.perf_counter()
                seen.pushes[backend] = [setting.push(end, seed) for seed in (1, 2)]
                seen.seconds = time.perf_counter() - began
                seen.calls = HostGroup.calls[before:]
                end.leave()
    finally:
        direct.log.removeHandler(handler)
    seen.groups, seen.threads = HostGroup.made, threads_left()
    leave_last(store, setting)
    return seen


def check_same(found: list[Seen], setting: Setting) -> None:
    """Workers have the same bytes by both ways, which are those of what ranks hold."""
    for seen in found:
        assert len(seen.pushes["gloo"]) == len(seen.pushes["nccl"]) == 2
    for seen in found[: setting.num_ranks]:
        assert seen.pushes["gloo"] == seen.pushes["nccl"]
    for worker, seen in enumerate(found[setting.num_ranks :]):
        for seed, mine, theirs in zip((1, 2), seen.pushes["nccl"], seen.pushes["gloo"], strict=True):
            assert mine.keys() == theirs.keys() == setting.reads()[worker].keys()
            for name, tensor in mine.items():
                assert torch.equal(tensor, theirs[name])
                assert torch.equal(tensor, expected(setting, worker, name, seed))


def expected(setting: Setting, worker: int, name: str, seed: int) -> Tensor:
    """Bytes of a tensor, of which a worker has what it reads, and ones."""
    parts = [setting.held(rank, seed)[name].parts[0].view[0].cpu() for rank in range(setting.num_ranks)]
    whole, read = torch.cat(parts), setting.reads()[worker][name].parts[0]
    found = torch.empty_like(whole)
    found.view(torch.uint8).fill_(255)
    read.of(found).copy_(read.of(whole))
    return found.view(torch.uint8)


class Reader(torch.nn.Module):
    """A model whose loader copies what a worker reads, and nothing else."""

    def __init__(self, reads: dict[str, Read], device: str) -> None:
        super().__init__()
        self.parts = {name: read.parts[0] for name, read in reads.items()}
        for name, read in reads.items():
            part = read.parts[0]
            empty = torch.zeros(part.rows, part.columns, dtype=read.dtype, device=device)
            self.register_parameter(name, torch.nn.Parameter(empty, requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name in self.parts:
                self.get_parameter(name).copy_(self.parts[name].of(tensor))


def recorded(setting: Setting, worker: int) -> tuple[Reader, WeightLoader]:
    """A model, and a loader that has seen it load whole weights from the host."""
    model = Reader(setting.reads()[worker], setting.device)
    loader = WeightLoader(model, None)
    loader.begin()
    for bucket, placements in fill_buckets(whole_weights(setting, 9), 2 * LIMIT):
        loader.load([bucket.clone()], placements, keep=True)
    return model, loader


def whole_weights(setting: Setting, seed: int) -> Iterator[tuple[str, Tensor]]:
    for name in setting.shapes():
        parts = [setting.held(rank, seed)[name].parts[0].view[0].cpu() for rank in range(setting.num_ranks)]
        yield name, torch.cat(parts)


def push_in_place(setting: Setting, group: type[HostGroup] | None) -> list[dict[str, Tensor]]:
    """Push thrice over NCCL, straight into the workers' models; returns a worker's after each push.

    What ranks hold stays in place.
    """
    store, found = keep_store(setting), list[dict[str, Tensor]]()
    with mock.patch.object(direct, "NCCLGroup", group or direct.NCCLGroup):
        end = setting.meet("in place", "nccl")
        if isinstance(end, WorkerEnd):
            model, loader = recorded(setting, setting.number - setting.num_ranks)
            landings = end.landings
            assert landings is not None
            copies = loader.copies_of(end.weights, [*itertools.chain(*landings)])
            assert copies is not None
            each = iter(copies)
            by_rank = [[next(each) for _ in of_rank] for of_rank in landings]
        else:
            held = setting.held(setting.number, 0)
        for seed in (1, 2, 3):
            if isinstance(end, WorkerEnd):
                end.receive_in_place(by_rank)
                found.append({name: value.detach().cpu().clone() for name, value in model.named_parameters()})
            else:
                for name, tensor in setting.held(setting.number, seed).items():
                    held[name].parts[0].view.copy_(tensor.parts[0].view)
                end.send(held)
        end.leave()
    leave_last(store, setting)
    return found


def check_in_place(found: list[list[dict[str, Tensor]]], setting: Setting) -> None:
    """Models have what they read of each push."""
    for worker, pushes in enumerate(found[setting.num_ranks :]):
        assert len(pushes) == 3
        for seed, parameters in zip((1, 2, 3), pushes, strict=True):
            wholes = dict(whole_weights(setting, seed))
            assert parameters.keys() == setting.reads()[worker].keys()
            for name, read in setting.reads()[worker].items():
                assert torch.equal(parameters[name], read.parts[0].of(wholes[name])), (seed, name)


@pytest.mark.parametrize(("num_ranks", "num_workers"), [(1, 1), (2, 2)])
def test_messages_are_copied_into_the_model_as_they_come(worker_pool, num_ranks, num_workers):
    """Several to each worker, one of which comes while another is read."""
    setting = Setting(num_ranks, num_workers, free_port())
    assert max(len(messages) for of_rank in setting.messages() for messages in of_rank) > 2
    options = {"world_size": num_ranks + num_workers, "init_process_group": False}
    check_in_place(worker_pool.run(push_in_place, setting, HostGroup, **options), setting)


def test_parameters_that_have_moved_are_not_copied_into():
    """Else copies would go where the model is no more."""
    setting = Setting(1, 1, 0)
    model, loader = recorded(setting, 0)
    weights, end = dict[str, LentWeight](), 0
    for name, whole in whole_weights(setting, 1):
        rows, columns = whole.shape
        piece = LentPiece(0, end, 1, rows, 0, columns, columns, 0, 0)
        weights[name] = LentWeight((rows, columns), whole.dtype, (piece,))
        end += whole.numel() * whole.itemsize
    blocks = [torch.zeros(end, dtype=torch.uint8)]
    copies = loader.copies_of(weights, blocks)
    assert copies is not None
    for one in copies:
        one.run()
    assert not any(parameter.any() for parameter in model.parameters())
    model.get_parameter("c").data = model.get_parameter("c").clone()
    assert loader.copies_of(weights, blocks) is None


@pytest.mark.parametrize(("num_ranks", "num_workers"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_values_are_those_of_gloo_bit_by_bit(worker_pool, num_ranks, num_workers):
    setting = Setting(num_ranks, num_workers, free_port())
    found = worker_pool.run(
        push_both_ways, setting, HostGroup, world_size=num_ranks + num_workers, init_process_group=False
    )
    check_same(found, setting)
    assert all(seen.groups == 1 and not seen.warnings and not seen.threads for seen in found)
    counts = [[len(messages) for messages in of_rank] for of_rank in setting.messages()]
    if num_ranks == num_workers == 2:
        assert len({count for of_rank in counts for count in of_rank}) > 2  # they are unequal, or this proves little
    for rank in range(num_ranks):  # the k-th message to each worker that has one, at once
        once = [
            ([num_ranks + worker for worker, count in enumerate(counts[rank]) if number < count], [])
            for number in range(max(counts[rank]))
        ]
        assert found[rank].calls == once * 2
    for worker in range(num_workers):
        mine = [of_rank[worker] for of_rank in counts]
        once = [([], [rank for rank, count in enumerate(mine) if number < count]) for number in range(max(mine))]
        assert found[num_ranks + worker].calls == once * 2


def count_overlaps(setting: Setting) -> tuple[list[dict[str, Tensor]], int, int]:
    LateGroup.overlaps, LateGroup.most, LateGroup.under_way = 0, 0, []  # the process has run others
    found = push_in_place(setting, LateGroup)
    return found, LateGroup.overlaps, LateGroup.most


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_one_rank_begins_the_next_message_before_it_knows_the_end_of_the_last(worker_pool, num_ranks):
    """Or links are idle until the host has seen the end, packed, and called NCCL. Two could block each other."""
    setting = Setting(num_ranks, 1, free_port())
    options = {"world_size": num_ranks + 1, "init_process_group": False}
    told = worker_pool.run(count_overlaps, setting, **options)
    check_in_place([found for found, _, _ in told], setting)
    counts = [len(messages) for (messages,) in setting.messages()]
    for count, (_, overlaps, most) in zip([*counts, max(counts)], told, strict=True):
        if num_ranks == 1:
            assert overlaps >= 3 * (count - 1)
            assert most == 2, "a buffer is packed anew before what was in it has gone"
        else:
            assert (overlaps, most) == (0, 1)


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        (None, "rank 0 of the replica: RuntimeError: its device is cpu"),
        (NoGroup, "worker 0 of the server on 127.0.0.1: RuntimeError: no driver"),
        (FailingGroup, "worker 0 of the server on 127.0.0.1: RuntimeError: no way"),
        pytest.param(SlowGroup, f"the group was not there within {SHORT:.0f} s", marks=pytest.mark.slow),
    ],
)
def test_all_take_gloo_where_one_has_no_nccl(worker_pool, group, reason):
    """They say so once, and why."""
    setting = Setting(1, 2, free_port(), deadline=2 * SHORT if group is SlowGroup else DEADLINE)
    found = worker_pool.run(push_both_ways, setting, group, world_size=3, init_process_group=False)
    check_same(found, setting)
    (warning,) = found[0].warnings
    assert warning.endswith(reason)
    assert not found[1].warnings
    assert all(not seen.calls and not seen.threads for seen in found)


# ---- processes that go


def push_with_a_failure(setting: Setting, how: str, group: type[HostGroup] | None = HostGroup) -> Seen:
    """The last worker goes at its second message; then all meet again, if it has come back."""
    store, seen = keep_store(setting), Seen()
    read, count = direct.read_message, 0

    def fail(*arguments: Any) -> None:
        nonlocal count
        count += 1
        if count == 2 and setting.number == setting.num_ranks + setting.num_workers - 1:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "raises":
                raise RuntimeError("bad memory")
            time.sleep(1.5 * setting.deadline)
        read(*arguments)

    with mock.patch.object(direct, "NCCLGroup", group or direct.NCCLGroup):
        end = setting.meet("first", "nccl")
        with mock.patch.object(direct, "read_message", fail):
            began = time.monotonic()
            try:
                setting.push(end, 1)
            except RuntimeError as error:
                seen.error, seen.seconds = str(error), time.monotonic() - began
                end.leave()
        seen.threads = threads_left()
        if how == "killed":
            raise RuntimeError(f"{seen.seconds:.1f} s, {seen.threads}: {seen.error}")
        store.add("failed", 1)
        while store.add("failed", 0) < setting.num_ranks + setting.num_workers:  # all have
            time.sleep(0.02)
        seen.pushes["again"] = [setting.push(setting.meet("again", "nccl"), 2)]
    leave_last(store, setting)
    return seen


@pytest.mark.parametrize("how", ["raises", "silent"])
def test_a_worker_that_fails_holds_nobody_up(worker_pool, how):
    """One that raises is known at once, one that falls silent after the deadline; then all meet anew."""
    setting = Setting(2, 2, free_port(), limit=256, deadline=DEADLINE if how == "raises" else 2 * SHORT)
    found = worker_pool.run(push_with_a_failure, setting, how, world_size=4, init_process_group=False)
    name = f"worker 1 of the server on {HOST}"
    first = [seen for seen in found[:2] if name in seen.error]
    assert first, [seen.error for seen in found]
    if how == "silent":
        assert f"more than {setting.deadline:.0f} s" in first[0].error
    for seen in found[:3]:
        assert "is gone" in seen.error or "more than" in seen.error
        assert seen.seconds < AT_ONCE + (setting.deadline + lines.NAME_S if how == "silent" else 0)
    assert all(not seen.threads for seen in found)
    for worker, seen in enumerate(found[2:]):
        for name, tensor in seen.pushes["again"][0].items():
            assert torch.equal(tensor, expected(setting, worker, name, 2))


@pytest.fixture
def own_pool() -> Iterator[WorkerPool]:
    """Processes that may be killed."""
    from tests.policing import keep_process

    pool = WorkerPool(4, on_start=keep_process)
    yield pool
    pool.close()


def test_a_killed_worker_is_named_at_once(own_pool):
    """Nobody waits for the deadline, though what stands for NCCL never ends."""
    setting = Setting(2, 2, free_port(), limit=256)
    with pytest.raises(WorkerError) as caught:
        own_pool.run(push_with_a_failure, setting, "killed", world_size=4, init_process_group=False, timeout=90)
    stories = [caught.value.raised.get(number, ("", ""))[1] for number in range(3)]
    print(stories)
    for story in stories:
        assert " s, []: " in story
        assert float(story.partition(" s")[0]) < AT_ONCE
        assert "is gone: " in story
    assert any(f"worker 1 of the server on {HOST} is gone" in story for story in stories[:2])
