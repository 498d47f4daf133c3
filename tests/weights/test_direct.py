"""Ranks of a split model send workers what they read: the elements of an export, from ranks that have them."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron_rl.weights.direct import DirectPush, DirectRanks, Order, Route, held_views
from lightning_megatron_rl.weights.messages import plan_messages
from lightning_megatron_rl.weights.reads import Read
from lightning_megatron_rl.weights.rectangles import Rectangle, matrix_shape
from lightning_megatron_rl.weights.source import WeightSource, WeightView, WeightViews
from lightning_megatron_rl.weights.transports.direct import DirectMeeting, WorkerEnd
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
DEFAULT = ("qwen3 tp2_sp", "qwen3 pp2", "qwen3 cp2", "qwen3_moe tp2_sp_ep2_etp1", "qwen3_moe ep2")
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
        self._sender = NetworkSender("127.0.0.1", 2, 20.0)  # which has the store
        self._ends: list[WorkerEnd] = []

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

    def push(self, source: WeightSource, route: Route) -> tuple[list[dict[str, Tensor]], Any]:
        assert source.direct is not None

        def take(worker: int) -> tuple[dict[str, Tensor], int]:
            if route.meeting is not None:
                return WorkerEnd(route.meeting, worker, self.reads[worker])
            return self._ends[worker]

        ends = [self._threads.submit(lambda worker=worker: (end := take(worker), end.receive())) for worker in (0, 1)]
        delivered = source.direct.send(Order([route], others_take_buckets=False)).deliveries[route.key]
        assert delivered.error is None, delivered.error
        self._ends = [end.result()[0] for end in ends]
        return [end.result()[1][0] for end in ends], delivered


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
        assert source.direct is not None or len(replica.ranks) == 1

        def push(source: WeightSource = source, expected: list[tuple[str, Tensor]] = expected) -> None:
            nonlocal workers
            if not replica.is_leader:
                source.run_collectives()
                return
            workers = workers or Workers(halves(expected))
            route = workers.route(source, "key")
            if route is None:
                found.is_planned = False
                list(source.tensors())
            else:
                tensors, delivered = workers.push(source, route)
                found.sent = delivered.sent
                found.different += differences(workers.reads, tensors, dict(expected))
            source.finish_collectives()

        if source.direct is None:  # this rank alone, which has not the whole model
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
        assert found.is_planned == LAYOUTS[case] or not found.read
        assert not found.different
        if found.is_planned and LAYOUTS[case]:
            assert found.sent == found.read
            assert all(not calls.keys() - {"broadcast_object_list", "all_gather_object"} for calls in found.calls)


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
