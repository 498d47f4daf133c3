"""`SendBuffers`: the memory in which a rank packs its messages, kept from one update to the next."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_megatron_rl.weights.copies import Copies
from lightning_megatron_rl.weights.messages import HeldTensor, Messages, packing_views
from lightning_megatron_rl.weights.placement import aligned

Places = list[tuple[str, int, tuple[int, ...], tuple[int, ...]]]  # name, address, shape and strides of each part


class SendBuffers:
    """Two buffers for each worker, and the copies of a rank's weights into them, prepared once.

    A worker's messages take turns: one is packed while the last one goes, and the one before that is there.

    Args:
        messages: That the rank sends, by worker.
        device: Of what it holds.
    """

    def __init__(self, messages: Sequence[Messages], device: torch.device) -> None:
        self._messages = messages
        lengths = [aligned(max((message.num_bytes for message in of_worker), default=0)) for of_worker in messages]
        self._buffers = [torch.empty(2, length, dtype=torch.uint8, device=device) for length in lengths]
        self._places: Places | None = None  # of what the copies read
        self._copies: list[list[Copies]] = []  # by worker and message

    @property
    def num_bytes(self) -> int:
        """Of all buffers."""
        return sum(buffer.numel() for buffer in self._buffers)

    def prepare(self, held: Mapping[str, HeldTensor]) -> None:
        """Prepare to pack what this rank holds, if it does not lie where it did the last time.

        Args:
            held: The same parts each time.
        """
        places = _places(held)
        if places == self._places:
            return
        self.let_go()
        self._copies = [
            [
                Copies(*packing_views(message, held, self._place(worker, number)))
                for number, message in enumerate(of_worker)
            ]
            for worker, of_worker in enumerate(self._messages)
        ]
        self._places = places

    def pack(self, worker: int, number: int) -> Tensor:
        """Copy one of a worker's messages out of what was prepared, and return it: ``[bytes]`` uint8."""
        self._copies[worker][number].run()
        return self._place(worker, number)

    def let_go(self) -> None:
        """Drop all references to the weights' memory."""
        self._places, self._copies = None, []

    def _place(self, worker: int, number: int) -> Tensor:
        return self._buffers[worker][number % 2][: self._messages[worker][number].num_bytes]


def _places(held: Mapping[str, HeldTensor]) -> Places:
    views = [(name, part.view) for name, tensor in held.items() for part in tensor.parts]
    return [(name, view.data_ptr(), tuple(view.shape), view.stride()) for name, view in views]
