"""Ranks of a split model send workers what they read: the elements of an export, from ranks that have them."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_megatron_rl.strategy.offload import Offloader
from lightning_megatron_rl.weights import send_buffers
from lightning_megatron_rl.weights.direct import Delivered, DirectPush, DirectRanks, Order, Route, held_views
from lightning_megatron_rl.weights.messages import HeldTensor, plan_messages
from lightning_megatron_rl.weights.placement import aligned
from lightning_megatron_rl.weights.reads import Read
from lightning_megatron_rl.weights.rectangles import Rectangle, matrix_shape
from lightning_megatron_rl.weights.send_buffers import SendBuffers
from lightning_megatron_rl.weights.source import WeightSource, WeightView, WeightViews
from lightning_megatron_rl.weights.transports.direct import DirectMeeting, RankEnd, WorkerEnd
from lightning_megatron_rl.weights.transports.network import NetworkSender
from tests.selection import by_default
from tests.weights.test_sharded_views import count_calls, disturb, exported, run_case, train

LAYOUTS = {  # family and layout: whether the ranks of a replica have all of its model
    "qwen3 tp2_sp": True,
    "qwen3 pp2": True,
    "qwen3 pp2_vpp2": True,
    "qwen3 cp2": True,
    "qwen3 tp2_pp2_sp": True,
    "qwen3 tp2_dp2": True,
    "qwen3 pp2_cp2": True,
    "qwen2_tied pp2": True,
    "gemma3 tp2": True,
    "qwen3_moe tp2_sp": True,
    "qwen3_moe tp2_sp_ep2_etp1": True,
    "qwen3_moe pp2_ep2": False,  # half of the experts are in another replica
    "qwen3_moe ep2": False,
    "deepseek_v3_plain tp2_sp": True,
    "deepseek_v3_plain pp2": True,
}
DEFAULT = ("qwen3 tp2_sp", "qwen3 cp2", "qwen3_moe tp2_sp_ep2_etp1")
DEADLINE = 10.0  # seconds, of a meeting and of a message
CPU = torch.device("cpu")
LIMIT = 3000  # bytes of a message: rows of large tensors go in several


@dataclass
class Pushes:
    """What a rank saw of pushes to two workers of one server."""

    is_planned: bool
    different: list[str]
    calls: list[Counter[str]]  # of each push
    sent: list[int]  # bytes by worker in a push, of all ranks
    read: list[int]  # that the workers read


def halves(weights: list[tuple[str, Tensor]]) -> list[dict[str, Read]]:
    """Two workers that split each matrix, by rows or by columns, and read each vector whole."""
    reads: list[dict[str, Read]] = [{}, {}]
    for number, (name, tensor) in enumerate(weights):
        rows, columns = matrix_shape(tensor.shape)
        for worker, of_worker in enumerate(reads):
            part = Rectangle(0, 0, rows, columns)
            if number % 2 and rows > 1 and columns > 1:
                part = Rectangle(worker * (rows // 2), 0, rows // 2, columns)
            elif rows > 1 and columns > 1:
                part = Rectangle(0, worker * (columns // 2), rows, columns // 2)
            of_worker[name] = Read(tuple(tensor.shape), tensor.dtype, (part,))
    return reads


class Workers:
    """Two workers of a server, each in a thread of the leader's process."""

    def __init__(self, reads: list[dict[str, Read]]) -> None:
        self.reads = reads
        self._threads = ThreadPoolExecutor(2)
        self._sender = NetworkSender("127.0.0.1", 2, DEADLINE)  # which has the store
        self._ends: dict[int, WorkerEnd] = {}

    def route(self, source: WeightSource, key: str) -> Route | None:
        assert source.direct is not None
        holdings = source.direct.holdings
        if key in source.direct.keys:
            return Route(key)
        messages = plan_messages(holdings, self.reads, LIMIT)
        if messages is None:
            return None
        place = self._sender.meeting
        meeting = DirectMeeting(key, place.address, place.port, "127.0.0.1", len(holdings), 2, place.timeout_s)
        return Route(key, meeting, messages)

    def send(self, source: WeightSource) -> tuple[Delivered, list[Future[dict[str, Tensor]]]]:
        """What the ranks say, and what each worker gets."""
        assert source.direct is not None
        route = self.route(source, "key")
        assert route is not None

        def receive(worker: int) -> dict[str, Tensor]:
            end = self._ends.pop(worker, None)
            if route.meeting is not None:
                end = WorkerEnd(route.meeting, worker, self.reads[worker], torch.device("cpu"))
            assert end is not None
            try:
                tensors, _ = end.receive()
            except BaseException:
                end.leave()
                raise
            self._ends[worker] = end
            return tensors

        came = [self._threads.submit(receive, worker) for worker in (0, 1)]
        return source.direct.send(Order([route], others_take_buckets=False)), came


def push_directly(model: Path, strategy: dict[str, Any], world_size: int) -> Pushes:
    """Push thrice after changes; every other rank takes part."""
    policy = train(model, strategy, world_size)
    replica = policy.strategy.replica
    found = Pushes(True, [], [], [], [])
    workers: Workers | None = None
    for _ in range(3):
        disturb(policy, copies_differ=False)
        expected = exported(policy)
        source = policy.weights_to_push(direct=True)

        def push(source: WeightSource = source, expected: list[tuple[str, Tensor]] = expected) -> None:
            nonlocal workers
            if not replica.is_leader:
                source.run_collectives()
                return
            workers = workers or Workers(halves(expected))
            delivered, came = workers.send(source)
            assert delivered.deliveries["key"].error is None
            found.sent = delivered.deliveries["key"].sent
            found.different += differences(workers.reads, [one.result() for one in came], dict(expected))
            source.finish_collectives()

        if source.direct is None:
            found.is_planned = False
            list(source.tensors())
        else:
            found.calls.append(count_calls(policy, push))
    if workers is not None:
        found.read = [sum(read.num_bytes for read in reads.values()) for reads in workers.reads]
    return found


def differences(
    reads: list[dict[str, Read]], tensors: list[dict[str, Tensor]], expected: dict[str, Tensor]
) -> list[str]:
    """Names of tensors of which a worker has not got what it reads."""
    found = []
    for of_worker, held in zip(reads, tensors, strict=True):
        for name, read in of_worker.items():
            matrix = matrix_shape(read.shape)
            pairs = [(part.of(held[name].view(matrix)), part.of(expected[name].view(matrix))) for part in read.parts]
            found += [name for mine, theirs in pairs if not torch.equal(mine, theirs)]
    return found


@pytest.mark.parametrize("case", by_default(DEFAULT, LAYOUTS))
def test_workers_get_what_they_read_of_an_export(worker_pool, checkpoint, case):
    """Nothing is put together: no collective of tensors, and from each rank only what it has."""
    for found in run_case(worker_pool, checkpoint, case, push_directly):
        assert found.is_planned == LAYOUTS[case]
        assert not found.different
        assert found.sent == found.read
        if found.is_planned:
            assert len(found.calls) == 3
            assert all(not calls.keys() - {"broadcast_object_list", "all_gather_object"} for calls in found.calls)


@dataclass
class Failed:
    """What a rank saw of a push in which rank 1 failed."""

    keys: int  # servers that it can send to
    delivered: Delivered | None = None
    errors: list[BaseException | None] = field(default_factory=list)  # of the workers
    seconds: float = 0.0
    different: list[str] = field(default_factory=list)  # of what came in buckets then


def push_with_a_failure(model: Path, strategy: dict[str, Any], step: str) -> Failed:
    """Rank 1 fails when it meets the workers, or in the second push when it sends; then the leader takes buckets."""
    policy = train(model, strategy, 2)
    expected, is_leader = exported(policy), policy.strategy.replica.is_leader
    workers = Workers(halves(expected))
    if step == "send":
        first = policy.weights_to_push(direct=True)
        if is_leader:
            for one in workers.send(first)[1]:
                one.result()  # its thread is ready for the next
        else:
            first.run_collectives()
    source = policy.weights_to_push(direct=True)
    assert source.direct is not None
    began = time.monotonic()
    if not is_leader:
        with mock.patch.object(RankEnd, step, side_effect=RuntimeError("no way to the server")):
            source.run_collectives()
        return Failed(len(source.direct.keys))
    delivered, came = workers.send(source)
    errors = [one.exception() for one in came]
    found = Failed(len(source.direct.keys), delivered, errors, time.monotonic() - began)
    if delivered.buckets_follow:
        pushed = dict(source.tensors())
        found.different = [name for name, tensor in expected if not torch.equal(pushed[name], tensor)]
    source.finish_collectives()
    return found


@pytest.mark.parametrize("step", by_default(["send"], ["meet", "send"]))
def test_a_rank_that_fails_is_known_to_all(worker_pool, qwen3_dir, step):
    """Where it cannot meet the workers, they take buckets; in the middle the server is lost. Nobody waits for it."""
    strategy = {"tensor_model_parallel_size": 2}
    leader, other = worker_pool.run(
        push_with_a_failure, qwen3_dir, strategy, step, world_size=2, init_process_group=False
    )
    assert leader.keys == other.keys == 0
    delivery = leader.delivered.deliveries["key"]
    assert delivery.error is not None
    assert delivery.has_met == (step == "send")
    assert leader.delivered.buckets_follow == (step == "meet")
    assert not leader.different
    assert all(isinstance(error, RuntimeError) for error in leader.errors), leader.errors  # a time-out is one
    assert leader.seconds < (1.5 * DEADLINE if step == "meet" else DEADLINE / 2)  # or its connections are closed


def views(*tensors: Tensor) -> WeightViews:
    return WeightViews([WeightView(str(number), tensor, tuple(tensor.shape)) for number, tensor in enumerate(tensors)])


def test_weights_whose_rows_lie_apart_are_held_in_blocks():
    parameter = torch.arange(48.0).view(12, 4)
    blocks = parameter.as_strided((3, 2, 4), (16, 4, 1), 4)
    held = held_views(WeightViews([WeightView("keys", blocks, (6, 4)), WeightView("norm", parameter[0], (4,))]))
    assert held is not None
    (part,) = held["keys"].parts
    rows = torch.cat([view for _, view in part.cut(Rectangle(1, 1, 4, 2))])
    assert torch.equal(rows, parameter[[2, 5, 6, 9], 1:3])
    assert held["norm"].holding.parts == (Rectangle(0, 0, 4, 1),)


def test_weights_that_are_no_matrix_as_they_lie_are_not_held():
    assert held_views(views(torch.zeros(3, 4, 5).transpose(1, 2))) is None
    assert held_views(views(torch.zeros(3, 4, 5), torch.zeros(3, 4).T, torch.zeros(()))) is not None


def test_a_server_that_does_not_come_takes_buckets():
    """The rank waits as long as the meeting may last."""
    held = held_views(views(torch.zeros(8, 4)))
    assert held is not None
    ranks = DirectRanks(lambda: held, torch.device("cpu"))
    sender = NetworkSender("127.0.0.1", 1, 1.0)
    place = sender.meeting
    meeting = DirectMeeting("key", place.address, place.port, "127.0.0.1", 1, 1, 1.0)
    reads = {"0": Read((8, 4), torch.float32, (Rectangle(0, 0, 8, 4),))}
    messages = plan_messages(ranks.holdings, [reads], LIMIT)
    assert messages is not None
    delivered = DirectPush(ranks).send(Order([Route("key", meeting, messages)], others_take_buckets=False))
    assert delivered.buckets_follow
    assert not delivered.deliveries["key"].has_met
    assert delivered.deliveries["key"].error is not None
    assert not ranks.keys


# ---- what a rank keeps from one update to the next


class Model:
    """Three parameters of one rank, and one worker on the CPU that reads all of them."""

    def __init__(self, device: torch.device) -> None:
        shapes = ((48, 34), (36, 50), (70,))
        self.parameters = [torch.nn.Parameter(torch.empty(shape, device=device)) for shape in shapes]
        self.ranks = DirectRanks(self.held, device)
        self._offloader = Offloader(device)
        self._longest = 0  # bytes of a message
        self._sender = NetworkSender("127.0.0.1", 1, DEADLINE)  # which has the store
        self._thread = ThreadPoolExecutor(1)
        self._end: WorkerEnd | None = None

    def held(self) -> dict[str, HeldTensor]:
        """The first one in blocks of rows that lie apart, as a fused projection has them."""
        fused, *others = [parameter.detach() for parameter in self.parameters]
        found = [WeightView("keys", fused.as_strided((4, 8, 34), (12 * 34, 34, 1), 4 * 34), (32, 34))]
        found += [WeightView(str(number), tensor, tuple(tensor.shape)) for number, tensor in enumerate(others)]
        held = held_views(WeightViews(found))
        assert held is not None
        return held

    @torch.no_grad()
    def change(self, seed: int) -> None:
        """In place."""
        for number, parameter in enumerate(self.parameters):
            generator = torch.Generator().manual_seed(10 * seed + number)
            parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def rebind(self) -> None:
        """Move to memory of their own, and leave NaN where they were."""
        for parameter in self.parameters:
            old, parameter.data = parameter.data, parameter.data.clone()
            old.fill_(torch.nan)

    def offload(self) -> None:
        """Go and come back, while NaN takes the memory that is free then."""
        self._offloader.offload("parameters", self.parameters)
        taken = [torch.full(one.shape, torch.nan, device=one.device) for one in self.parameters]
        self._offloader.reload()
        del taken

    def push(self) -> dict[str, Tensor]:
        """Send what is held; returns what the worker has got."""
        reads = {name: Read(one.shape, one.dtype, (Rectangle.whole(one.shape),)) for name, one in self.held().items()}
        route = Route("key")
        if not self.ranks.keys:
            place, messages = self._sender.meeting, plan_messages(self.ranks.holdings, [reads], LIMIT)
            assert messages is not None
            assert len(messages[0][0]) > 4  # they alternate between two buffers
            self._longest = max(message.num_bytes for message in messages[0][0])
            meeting = DirectMeeting("key", place.address, place.port, "127.0.0.1", 1, 1, place.timeout_s)
            route = Route("key", meeting, messages)

        def receive() -> dict[str, Tensor]:
            if route.meeting is not None:
                self._end = WorkerEnd(route.meeting, 0, reads, CPU)
            assert self._end is not None
            return self._end.receive(nan=True)[0]

        came = self._thread.submit(receive)
        delivery = self.ranks.send(Order([route], others_take_buckets=False)).deliveries["key"]
        assert delivery.error is None
        assert delivery.buffer_bytes == 2 * aligned(self._longest)
        return came.result()

    def expected(self) -> dict[str, Tensor]:
        return {name: one.parts[0].view.reshape(one.shape).cpu() for name, one in self.held().items()}

    def check_push(self) -> None:
        """The worker gets what is held, bit by bit."""
        came, expected = self.push(), self.expected()
        assert came.keys() == expected.keys()
        assert not [name for name in came if not torch.equal(came[name], expected[name])]

    def close(self) -> None:
        self.ranks.close()
        if self._end is not None:
            self._end.leave()
        self._thread.shutdown()


@pytest.fixture
def model() -> Iterator[Model]:
    with closing(Model(CPU)) as model:
        yield model


MOVES = {"stay": None, "are rebound": Model.rebind, "are offloaded": Model.offload}


def push_and_move(model: Model, move: Callable[[Model], None] | None) -> None:
    """Three updates of weights in one place, then move them, and the same again."""
    for seed in range(6):
        if seed == 3 and move is not None:
            move(model)
        model.change(seed)
        model.check_push()


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_weights_are_sent_from_where_they_are_now(model, move):
    """Copies that were prepared for earlier updates read no memory that weights have left."""
    push_and_move(model, move)


def test_copies_are_prepared_once_if_weights_stay(model):
    """And anew, if one of them has moved."""
    counts = []
    with mock.patch.object(send_buffers, "packing_views", wraps=send_buffers.packing_views) as prepared:
        for step in range(4):
            model.change(step)
            if step == 3:
                model.parameters[1].data = model.parameters[1].data.clone()
            model.push()
            counts.append(prepared.call_count)
    assert counts == [counts[0], counts[0], counts[0], 2 * counts[0]]


def test_buffers_are_kept_until_the_rank_leaves(model):
    packed, pack = [], SendBuffers.pack

    def spy(self: SendBuffers, worker: int, number: int) -> Tensor:
        message = pack(self, worker, number)
        packed.append(StorageWeakRef(message.untyped_storage()))
        return message

    with mock.patch.object(SendBuffers, "pack", spy):
        for seed in range(2):
            model.change(seed)
            model.push()
    assert len({one.cdata for one in packed}) == 1
    assert not packed[0].expired()
    model.ranks.close()
    assert packed[0].expired()


def test_weights_are_let_go(model):
    """Servers can be sent to as before."""
    model.change(0)
    model.push()
    old = [StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters]
    model.rebind()
    assert not any(one.expired() for one in old)
    model.ranks.let_go()
    assert all(one.expired() for one in old)
    model.check_push()
