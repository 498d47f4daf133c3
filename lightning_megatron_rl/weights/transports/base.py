"""The interface of transports, and the parts that updates consist of."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from lightning_megatron_rl.weights.cuda_memory import Handle
from lightning_megatron_rl.weights.placement import Placement
from lightning_megatron_rl.weights.source import WeightSource

BACKEND = "lightning_megatron_rl"  # the name under which vLLM knows our receiver
DEFAULT_BUCKET_BYTES = 512 * 2**20

PASSING = -1  # number of memory that is not kept open
LENT = -2  # of what several ranks lend


@dataclass
class Part:
    """One part of an update; `transports.receiver` takes it."""

    number: int  # in the update, from 0
    placements: list[Placement] | None  # None: those of this part in the last update
    memory: int = PASSING  # number of the memory; PASSING: it is closed when the update ends, or when others come
    handles: list[list[Handle]] | None = None  # of CUDA IPC, by worker and block; None: what is open under the number
    sizes: list[int] | None = None  # bytes of broadcasts by NCCL, each a part, of which this is the first
    blocks: list[Tensor] | None = None  # in the same process: the memory itself
    keep: bool = False  # whether the memory stays as it is until the update ends
    stays: bool = False  # whether it stays where it is, and is held, until `let_go`
    borrowed: bool = False  # all weights, out of the memory that was borrowed


class Sent(NamedTuple):
    """Measurements of one update."""

    num_bytes: int  # of the weights
    extra_bytes: int  # the most that were held besides them at one time
    replayed: bool  # whether the workers replayed copies of an earlier update


class Ask(Protocol):
    """Sends the engine's process a message and returns its answer."""

    def __call__(self, message: tuple[Any, ...], meanwhile: Callable[[], None] | None = None) -> Any:
        """Send, run `meanwhile`, wait."""


class Post(Protocol):
    """Gives the workers one part; returns when `meanwhile` has run and the workers have loaded it."""

    def __call__(self, part: Part, meanwhile: Callable[[], None] | None = None) -> None:
        """Send, run `meanwhile`, wait."""


class Transport(Protocol):
    """Hands weights to the workers of one process after the other.

    A transport of a user's own brings the other end, too: `extension`, whose methods `send` calls in each worker by
    ``ask(("call", method, arguments, version))``.
    """

    name: str
    extension: str | None = None  # import path of a class that vLLM mixes into its workers; None: the engine's own
    takes_host: bool = False  # whether it takes weights that are not on a GPU
    peer_bytes: int = 0  # read in place out of other GPUs' memory in the last update, by the worker that read most

    @property
    def is_open(self) -> bool:
        """Whether workers keep memory of the trainer open."""
        return False

    @property
    def copies_peers(self) -> bool:
        """Whether workers keep copies of what is on other GPUs."""
        return False

    def connect(self, pid: int, start: Callable[[dict[str, Any]], None], finish: Callable[[], None]) -> None:
        """Meet the workers of a process before its first update.

        Args:
            pid: The process.
            start: Tells the workers where to meet, and returns at once.
            finish: Waits for their answer.
        """
        return

    def send(self, source: WeightSource, ask: Ask, version: int) -> Sent:
        """Hand all weights over, and let the workers sample with them from then on."""

    def finish(self) -> None:
        """Take back what the workers have let go of since, or read only until the update ended."""
        return

    def forget(self, *, workers_are_gone: bool = False) -> None:
        """Start anew: the workers are other ones, or have let go of what they had.

        Args:
            workers_are_gone: Whether they have ended, and so cannot count themselves off as torch's readers.
        """
        return


def post_by(ask: Ask) -> Post:
    """Return a `Post` that sends messages by `ask`."""

    def post(part: Part, meanwhile: Callable[[], None] | None = None) -> None:
        ask(("load", part), meanwhile)

    return post


def total_bytes(placements: Iterable[Placement]) -> int:
    """Return the bytes of tensors."""
    return sum(place.num_bytes for place in placements)
