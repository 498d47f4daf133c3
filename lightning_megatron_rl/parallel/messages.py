"""Objects with many small tensors as one message: pickle and torch take some 100 µs for each tensor, a copy takes 1."""

import io
import pickle
from typing import Any

import torch
from torch import Tensor


class _Pickler(pickle.Pickler):
    """Puts tensors aside, and their numbers in their places."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) is not Tensor or obj.device.type != "cpu" or obj.layout != torch.strided or obj.requires_grad:
            return None
        self.tensors.append(obj)
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    """Puts them back."""

    def __init__(self, stream: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(stream)
        self.tensors = tensors

    def persistent_load(self, pid: Any) -> Tensor:
        return self.tensors[pid]


def pack(value: Any) -> bytes:
    """Return a picklable object as bytes; of a view of a larger tensor, what it shows goes with it and no more."""
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(value)
    places: dict[torch.dtype, list[int]] = {}
    for number, tensor in enumerate(pickler.tensors):
        places.setdefault(tensor.dtype, []).append(number)
    numbers = {
        dtype: torch.cat([pickler.tensors[number].reshape(-1) for number in found]).view(torch.uint8).numpy().tobytes()
        for dtype, found in places.items()
    }
    shapes = [tuple(tensor.shape) for tensor in pickler.tensors]
    return pickle.dumps((stream.getvalue(), shapes, places, numbers), protocol=pickle.HIGHEST_PROTOCOL)


def unpack(message: bytes) -> Any:
    """Return the object of a message of `pack`, from another rank of this run; each tensor has memory of its own."""
    stream, shapes, places, numbers = pickle.loads(message)
    tensors: list[Tensor] = [torch.empty(0)] * len(shapes)
    for dtype, found in places.items():
        content = torch.frombuffer(bytearray(numbers[dtype]) or bytearray(dtype.itemsize), dtype=dtype)
        start = 0
        for number in found:
            end = start + torch.Size(shapes[number]).numel()
            tensors[number] = content[start:end].clone().view(shapes[number])
            start = end
    return _Unpickler(io.BytesIO(stream), tensors).load()
