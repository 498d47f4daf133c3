"""`DirectRanks`: the ranks of a replica send what each holds of a model straight to the workers that load it."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from lightning_megatron_rl.parallel.distributed import ReplicaGroup
from lightning_megatron_rl.weights.messages import HeldPart, HeldTensor, Holdings, Messages
from lightning_megatron_rl.weights.rectangles import Rectangle, matrix_shape
from lightning_megatron_rl.weights.source import WeightViews
from lightning_megatron_rl.weights.transports.direct import DirectMeeting, RankEnd


@dataclass(frozen=True)
class Route:
    """A server in one update."""

    key: str  # of its meeting with the ranks
    meeting: DirectMeeting | None = None  # None: they have met
    messages: Sequence[Sequence[Messages]] = ()  # of a new meeting, by rank and worker


@dataclass(frozen=True)
class Order:
    """What the leader asks of all ranks in one update."""

    routes: Sequence[Route] = ()  # to the servers that are sent to; others are forgotten
    others_take_buckets: bool = True  # whether there are other servers, or none


@dataclass
class Delivery:
    """What came of one route."""

    has_met: bool = False  # if not, the server is there, and takes buckets
    error: str | None = None  # why not all of it went
    sent: list[int] = field(default_factory=list)  # bytes by worker
    buffer_bytes: int = 0
    seconds: float = 0.0  # until the workers had everything, as the leader saw it
    link_rate: float = 0.0  # what the link carried at the meeting. # bytes per second


@dataclass(frozen=True)
class Delivered:
    """What came of an order; the same on all ranks."""

    deliveries: dict[str, Delivery]  # by key of the route
    buckets_follow: bool  # whether a server takes buckets


def held_views(weights: WeightViews) -> dict[str, HeldTensor] | None:
    """Return whole weights as what a rank holds; None if one is no matrix as it lies."""
    found = {}
    for weight in weights.views:
        rows, columns = matrix_shape(weight.shape)
        is_apart = tuple(weight.view.shape) != weight.shape
        blocks = tuple(weight.view.shape[:2]) if is_apart else (1, rows)
        try:
            view = weight.view.detach().view(*blocks, columns)
        except RuntimeError:
            return None
        part = HeldPart(Rectangle(0, 0, rows, columns), view)
        found[weight.name] = HeldTensor(weight.shape, view.dtype, (part,))
    return found


class DirectRanks:
    """One rank's part, which lasts from one update to the next. Making it is a collective of the replica.

    Args:
        held: Returns what this rank holds now, the same parts each time.
        device: Where that is.
        replica: The ranks that share the model, and take part; None: this rank has the whole model.
    """

    def __init__(
        self, held: Callable[[], Mapping[str, HeldTensor]], device: torch.device, replica: ReplicaGroup | None = None
    ) -> None:
        self._held = held
        self._device = device
        self._replica = replica
        self._rank = 0 if replica is None else replica.ranks.index(dist.get_rank())
        holdings: Holdings = {name: tensor.holding for name, tensor in held().items()}
        self.holdings = self._gather(holdings)  # of each rank
        self._ends: dict[str, RankEnd] = {}
        if device.type == "cuda":
            from lightning_megatron_rl.weights.copy_kernels import warm_up

            warm_up(device)  # the threads of `send` may not compile or load a kernel at the same time

    @property
    def keys(self) -> frozenset[str]:
        """Of the meetings with servers that can be sent to."""
        return frozenset(self._ends)

    def send(self, order: Order | None) -> Delivered:
        """Send all weights to servers, at the same time; a collective of the replica.

        No rank waits for a server longer than the deadline of its meeting, and none fails: what has, is in the answer.

        Args:
            order: The leader's; None on the other ranks.
        """
        order = self._from_leader(order)
        for key in self._ends.keys() - {route.key for route in order.routes}:
            self._ends.pop(key).leave()
        found = {route.key: Delivery(has_met=True) for route in order.routes}
        new = [route for route in order.routes if route.meeting is not None]
        if new:
            mine = dict(zip((route.key for route in new), _at_once(self._meet, new), strict=True))
            self._merge(found, mine)
        there = [key for key, delivery in found.items() if delivery.error is None]
        for key in found.keys() - set(there):
            found[key].has_met = False
        if there:
            if self._device.type == "cuda":  # other threads have streams of their own
                torch.cuda.current_stream(self._device).synchronize()
            held = self._held()
            sent = _at_once(lambda key: self._send(key, held), there)
            self._merge(found, dict(zip(there, sent, strict=True)))
        met = [delivery.has_met for delivery in found.values()]
        return Delivered(found, order.others_take_buckets or not all(met))

    def let_go(self) -> None:
        """Drop all references to the memory of what was sent; servers can be sent to as before."""
        for end in self._ends.values():
            end.let_go()

    def close(self) -> None:
        """Leave all servers' groups."""
        while self._ends:
            self._ends.popitem()[1].leave()

    def _meet(self, route: Route) -> Delivery:
        assert route.meeting is not None
        end = RankEnd(route.meeting, self._rank, route.messages[self._rank], self._device)
        try:
            end.meet(route.messages)
        except Exception as error:
            end.leave()
            return Delivery(error=f"{type(error).__name__}: {error}")
        self._ends[route.key] = end
        return Delivery(link_rate=end.link_rate)

    def _send(self, key: str, held: Mapping[str, HeldTensor]) -> Delivery:
        end = self._ends[key]
        try:
            sent, buffer_bytes, seconds = end.send(held)
        except Exception as error:
            end.leave()  # nobody waits for this rank
            return Delivery(error=f"{type(error).__name__}: {error}")
        return Delivery(sent=sent, buffer_bytes=buffer_bytes, seconds=seconds, link_rate=end.link_rate)

    def _merge(self, found: dict[str, Delivery], mine: Mapping[str, Delivery]) -> None:
        """Add what has come of a step on all ranks; a server that has failed on any is left by all."""
        for rank, of_rank in enumerate(self._gather(dict(mine))):
            for key, step in of_rank.items():
                total = found[key]
                if step.error is not None and total.error is None:
                    total.error = f"rank {rank} of the replica: {step.error}"
                if step.sent:
                    before = total.sent or [0] * len(step.sent)
                    total.sent = [one + other for one, other in zip(before, step.sent, strict=True)]
                total.buffer_bytes = max(total.buffer_bytes, step.buffer_bytes)
                if rank == 0:
                    total.seconds, total.link_rate = step.seconds, step.link_rate
        for key, delivery in found.items():
            if delivery.error is not None and key in self._ends:
                self._ends.pop(key).leave()

    def _from_leader(self, order: Order | None) -> Order:
        if self._replica is not None:
            order = self._replica.broadcast_object(order)
        assert order is not None
        return order

    def _gather[T](self, value: T) -> list[T]:
        return [value] if self._replica is None else self._replica.gather_object(value)


class DirectPush:
    """One update's `DirectSender`.

    Args:
        ranks: What lasts from one update to the next.
    """

    def __init__(self, ranks: DirectRanks) -> None:
        self._ranks = ranks
        self._delivered: Delivered | None = None

    @property
    def holdings(self) -> Sequence[Holdings]:
        """See `DirectSender`."""
        return self._ranks.holdings

    @property
    def keys(self) -> frozenset[str]:
        """See `DirectSender`."""
        return self._ranks.keys

    def send(self, order: Order | None) -> Delivered:
        """See `DirectSender`; a collective."""
        assert self._delivered is None, "once in an update"
        self._delivered = Delivered({}, True)  # if it fails
        self._delivered = self._ranks.send(order)
        return self._delivered

    def run(self) -> None:
        """Take part on a rank without an engine; a collective."""
        self.send(None)

    def finish(self) -> None:
        """On the leader, take part if its engine has not; a collective."""
        if self._delivered is None:
            self.send(Order())

    @property
    def buckets_follow(self) -> bool:
        """Whether, as all ranks know, some server takes buckets."""
        return self._delivered is None or self._delivered.buckets_follow


def _at_once[A, T](work: Callable[[A], T], items: Sequence[A]) -> list[T]:
    """Do something with each item, each in a thread of its own."""
    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(work, items))
