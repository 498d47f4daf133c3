"""When workers read weights where they lie, and when they are told anew; what the loader then copies.

Memory is lent through CUDA IPC, which no CPU has: here trainer and workers answer by hand. The real ones are those of
`tests/gpu/test_engine.py`.
"""

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_megatron_rl.weights.cuda_memory import DEVICE
from lightning_megatron_rl.weights.lent import LentMemory, LentWeight, LentWeights, Readiness
from lightning_megatron_rl.weights.loader import WeightLoader
from lightning_megatron_rl.weights.placement import fill_buckets
from lightning_megatron_rl.weights.source import WeightSource, WeightViews
from lightning_megatron_rl.weights.transports import borrowing, ipc
from lightning_megatron_rl.weights.transports.base import Part
from lightning_megatron_rl.weights.transports.in_process import InProcess
from lightning_megatron_rl.weights.transports.ipc import IPCTransport
from tests.weights.test_borrowed_copies import scattered
from tests.weights.test_copy_plan import ROWS, WIDTH, Fused, weights

CANNOT, NEEDS_PLACES, KNOWS_PLACES = Readiness.CANNOT, Readiness.NEEDS_PLACES, Readiness.KNOWS_PLACES


def handle(name: str) -> tuple[Any, ...]:
    """As long as torch's, with the device where it has it."""
    return (name, *["-"] * 5, 0, *["-"] * 6)


class Trainer:
    """One push of ranks that are always ready."""

    def __init__(self, lent: LentWeights, gpus: frozenset[str] = frozenset({"a", "b"})) -> None:
        self._lent = lent
        self._gpus = gpus
        self.said: list[Readiness] = []
        self.settled: list[bool] = []
        self.apart: list[bool] = []

    @property
    def gpus(self) -> frozenset[str]:
        return self._gpus

    def lend(self, readiness: Readiness, readers: int, *, in_process: bool = False) -> LentWeights | None:
        self.said.append(readiness)
        return None if readiness == CANNOT else self._lent

    def settle(self, loaded: bool, *, apart: bool = False) -> bool:
        self.settled.append(loaded)
        self.apart.append(apart)
        return loaded


class Workers:
    """Answer as the engine's process does."""

    def __init__(self) -> None:
        self.answers: list[int | None] = [0, 1000]
        self.heard: list[Any] = []

    def __call__(self, message: tuple[Any, ...], meanwhile: Any = None) -> Any:
        self.heard.append(message)
        return {"borrow": self.answers, "replace": True, "end": False}.get(message[0])

    @property
    def names(self) -> list[str]:
        names = [message[0] for message in self.heard]
        self.heard.clear()
        return names


def lent_weights() -> LentWeights:
    """One weight in the memory of two GPUs, with a handle for each of two workers."""
    memories = [LentMemory(gpu, (handle(f"{gpu}0"), handle(f"{gpu}1"))) for gpu in "ba"]
    return LentWeights({"w": LentWeight((4, 2), torch.bfloat16, ())}, memories)


def transport_after_buckets() -> IPCTransport:
    transport = IPCTransport(0, 2, gpus=["a", "b"])
    transport.send_buckets(iter(()), mock.Mock())
    return transport


def push(transport: IPCTransport, workers: Workers, lent: LentWeights) -> tuple[Any, Readiness]:
    """What one push returned, and what the sampler said of itself."""
    trainer = Trainer(lent)
    found = transport.borrowing.send(trainer, workers, 1)
    assert trainer.settled == ([] if trainer.said == [CANNOT] else [found is not None])
    return found, trainer.said[0]


def test_places_are_told_once():
    transport, workers, lent = transport_after_buckets(), Workers(), lent_weights()
    assert push(transport, workers, lent) == ((16, 0, True), NEEDS_PLACES)
    (_, told, handles), _ = workers.heard
    assert told is lent.weights
    # each worker's own handles, with the numbers by which it knows the GPUs
    found = [[(one[0], one[DEVICE]) for one in of_worker] for of_worker in handles]
    assert found == [[("b0", 1), ("a0", 0)], [("b1", 1), ("a1", 0)]]
    assert workers.names == ["borrow", "replace"]
    assert transport.peer_bytes == 1000
    assert transport.is_open
    assert push(transport, workers, lent) == ((16, 0, True), KNOWS_PLACES)
    assert workers.names == ["replace"]
    assert push(transport, workers, lent_weights()) == ((16, 0, True), KNOWS_PLACES)  # some rank's has moved
    assert workers.names == ["borrow", "replace"]


def test_a_worker_in_this_process_takes_its_own_memory_as_it_is():
    own = torch.zeros(16, dtype=torch.uint8)
    memories = [LentMemory("b", (handle("b0"),)), LentMemory("a", (), own)]
    lent = LentWeights({"w": LentWeight((4, 2), torch.bfloat16, ())}, memories)
    transport, workers, trainer = InProcess(1024, {"a": 0, "b": 1}), Workers(), Trainer(lent)
    source = WeightSource(torch.device("cpu"), lambda: iter(()), lender=trainer, buckets=lambda: iter(()))
    workers.answers = [1000]
    assert transport.send(source, workers, 1) == (0, 0, False)  # nothing is recorded yet
    assert (workers.names, trainer.said.pop()) == (["begin", "end"], CANNOT)
    for version, names in ((2, ["borrow", "replace"]), (3, ["replace"])):
        assert transport.send(source, workers, version) == (16, 0, True)
        if version == 2:
            ((peer, itself),) = workers.heard[0][2]
            assert itself is own
            assert (peer[0], peer[DEVICE]) == ("b0", 1)
        assert workers.names == names
        assert transport.peer_bytes == 1000
    assert trainer.apart == [False, False]
    workers.answers = [0]  # it reads nothing of the other GPU
    trainer._lent = LentWeights(lent.weights, list(memories))
    assert transport.send(source, workers, 4) == (16, 0, True)
    memories[0] = LentMemory("a", (handle("a0"),))  # another process's, perhaps the one that was read
    trainer._lent = LentWeights(lent.weights, list(memories))
    assert transport.send(source, workers, 5) == (16, 0, True)
    assert (workers.names, trainer.apart[2:]) == (["borrow", "replace"] * 2, [True, False])
    transport.forget()
    workers.answers = [None]
    with mock.patch.object(borrowing, "take_back") as take_back:
        assert transport.send(source, workers, 6) == (0, 0, False)
    assert [call.args[0][0] for call in take_back.call_args_list] == ["a0"]
    assert workers.names == ["borrow", "let_go", "begin", "end"]
    assert trainer.settled == [True] * 4 + [False]


def send(transport: IPCTransport) -> None:
    transport.send_tensors(iter(()), mock.Mock())


def send_buckets(transport: IPCTransport) -> None:
    transport.send_buckets(iter(()), mock.Mock())


def send_whole(transport: IPCTransport) -> None:
    named = [("w", torch.zeros(4))]
    with mock.patch.object(torch.cuda, "current_stream"), mock.patch.object(ipc, "lend"):
        transport.whole(WeightViews.of(named))


def let_go(transport: IPCTransport) -> None:
    transport.forget()


def relaunch(transport: IPCTransport) -> None:
    with mock.patch.object(borrowing, "take_back") as take_back:
        transport.forget(workers_are_gone=True)
    assert take_back.call_count == 4, "each worker's handles of each memory"


@pytest.mark.parametrize(
    ("event", "expected"),
    [(send, CANNOT), (send_whole, CANNOT), (relaunch, CANNOT), (send_buckets, NEEDS_PLACES), (let_go, NEEDS_PLACES)],
)
def test_whatever_comes_between_is_told_anew(event, expected):
    """Another kind of update records other copies; a new process has none; one that has let go has no memory open."""
    transport, workers, lent = transport_after_buckets(), Workers(), lent_weights()
    push(transport, workers, lent)
    assert push(transport, workers, lent)[1] == KNOWS_PLACES
    event(transport)
    assert transport.peer_bytes == (1000 if event in (let_go, relaunch) else 0)
    found, said = push(transport, workers, lent)
    assert said == expected
    assert (found is None) == (expected == CANNOT)


def test_workers_that_cannot_are_asked_once():
    transport, workers, lent = transport_after_buckets(), Workers(), lent_weights()
    workers.answers = [1000, None]
    with mock.patch.object(borrowing, "take_back") as take_back:
        assert push(transport, workers, lent) == (None, NEEDS_PLACES)
        transport.forget(workers_are_gone=True)  # nothing of it is taken back twice
    assert workers.names == ["borrow", "let_go"]
    assert [call.args[0][0] for call in take_back.call_args_list] == ["b0", "a0", "b1", "a1"]
    assert not transport.is_open
    send_buckets(transport)
    assert push(transport, workers, lent) == (None, CANNOT)
    assert not transport.copies_peers


@pytest.mark.parametrize(("seen", "memory"), [((), {"a"}), (("a",), {"a", "b"}), (("a", "b"), set())])
def test_memory_that_the_workers_do_not_see_is_not_asked_for(seen, memory):
    transport = IPCTransport(0, 2, gpus=seen)
    send_buckets(transport)
    trainer = Trainer(lent_weights(), frozenset(memory))
    assert transport.borrowing.send(trainer, Workers(), 1) is None
    assert trainer.said == [CANNOT]


def test_handles_are_kept_for_workers_that_die_meanwhile():
    """What they had opened is counted off when they are gone."""
    transport, lent = transport_after_buckets(), lent_weights()
    dying = mock.Mock(side_effect=RuntimeError("gone"))
    with pytest.raises(RuntimeError, match="gone"):
        transport.borrowing.send(Trainer(lent), dying, 1)
    assert transport.is_open
    relaunch(transport)


# ---- the worker's loader ---------------------------------------------------------------------------------------------


def load_in_buckets(loader: WeightLoader, named: list[tuple[str, Tensor]]) -> None:
    loader.begin()
    for bucket, placements in fill_buckets(named, 256):
        loader.load([bucket], placements, keep=False)


def test_the_loader_copies_out_of_what_it_borrowed():
    model, expected = Fused(1), Fused(1)
    loader = WeightLoader(model, None)
    assert loader.borrow({}, []) is None  # nothing is recorded yet
    load_in_buckets(loader, weights(1))
    named = weights(2)
    lent = scattered(named, 2, WIDTH, 1)
    read = loader.borrow(lent.weights, lent.blocks)
    assert read is not None
    assert sum(read) == sum(parameter.nbytes for parameter in model.parameters())
    for _ in range(2):
        loader.begin()
        loader.load_borrowed()
        assert loader.was_replayed
    expected.load_weights(named)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), expected.parameters(), strict=True))


def test_the_loader_forgets_what_it_borrowed():
    model = Fused(0)
    loader = WeightLoader(model, None)
    load_in_buckets(loader, weights(1))
    lent = scattered(weights(1), ROWS, WIDTH, ROWS)
    assert loader.borrow(lent.weights, lent.blocks) is not None
    loader.let_go()
    with pytest.raises(AssertionError):
        loader.load_borrowed()
    assert loader.borrow(lent.weights, lent.blocks) is not None
    load_in_buckets(loader, list(reversed(weights(1))))  # laid out otherwise: recorded anew
    with pytest.raises(AssertionError):
        loader.load_borrowed()
    assert loader.borrow(lent.weights, lent.blocks) is not None
    model.prepare = lambda loaded: loaded * 2
    load_in_buckets(loader, weights(1))  # and this is more than copies
    assert loader.borrow(lent.weights, lent.blocks) is None


# ---- in the trainer's process: the transport and the loader together -------------------------------------------------


class Within:
    """What the engine's worker does with messages, on a model of this process."""

    def __init__(self, rank: int) -> None:
        self.model = Fused(rank)
        self.loader = WeightLoader(self.model, None)
        self.heard: list[str] = []
        self._placements: dict[int, Any] = {}
        self._memory: list[Tensor] = []

    def __call__(self, message: tuple[Any, ...], meanwhile: Any = None) -> Any:
        name, *values = message
        self.heard.append(name)
        if name in ("begin", "replace"):
            self.loader.begin()
        if name in ("load", "replace"):
            self._load(values[0])
        if name == "borrow":
            weights, (memory,) = values
            self._memory = list(memory)
            read = self.loader.borrow(weights, self._memory)
            return [None if read is None else sum(read)]
        return self.loader.was_replayed

    def _load(self, part: Part) -> None:
        if part.borrowed:
            self.loader.load_borrowed()
            return
        assert part.blocks is not None
        assert part.placements is not None
        self.loader.load(part.blocks, part.placements, keep=part.keep, stays=part.stays)

    def has(self, named: list[tuple[str, Tensor]]) -> bool:
        expected = Fused(self.model.rank)
        expected.load_weights(named)
        return all(torch.equal(*pair) for pair in zip(self.model.parameters(), expected.parameters(), strict=True))


def in_two_buckets(named: list[tuple[str, Tensor]]) -> list[WeightViews]:
    """Each in memory of its own."""
    halves = [named[:3], named[3:]]
    return [
        WeightViews.of(
            [(name, part) for (name, _), part in zip(half, torch.stack([t for _, t in half]).unbind(), strict=True)]
        )
        for half in halves
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_every_way_in_one_process_gives_the_same_weights(rank):
    """Whole, one by one, in buckets, and then, as those have shown what goes where, out of several ranks' memory."""
    within, transport = Within(rank), InProcess(256, {"a": 0})
    cpu = torch.device("cpu")
    source = WeightSource.of_views(WeightViews.of(weights(1)))
    assert transport.send(source, within, 1)[0] == sum(tensor.nbytes for _, tensor in weights(1))
    assert within.heard == ["replace"]
    assert within.has(weights(1))
    transport.send(WeightSource.streamed(iter(weights(2)), cpu), within, 2)
    assert within.has(weights(2))
    ways = []
    for version in (3, 4, 5):
        named = weights(version)
        lent = scattered(named, 2, WIDTH, 1)
        memories = [LentMemory("a", (), block) for block in lent.blocks]
        trainer = Trainer(LentWeights(lent.weights, memories), frozenset({"a"}))
        buckets = in_two_buckets(named)
        source = WeightSource(cpu, lambda: iter(()), lender=trainer, buckets=partial(iter, buckets))
        within.heard.clear()
        transport.send(source, within, version)
        ways.append(list(within.heard))
        assert within.has(named)
    assert ways == [["begin", "load", "load", "end"], ["borrow", "replace"], ["borrow", "replace"]]
