"""Writes a model's weights to files and compares files with them: the writing half of `HFModel`."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron_rl.models.families.registry import FAMILIES, num_experts
from lightning_megatron_rl.models.hf.files import FailedEverywhereError, raise_everywhere, weight_map
from lightning_megatron_rl.models.hf.peft_files import (
    WEIGHTS_FILE,
    adapter_config,
    name_experts,
    prefixed,
    stack_experts,
    write_adapter,
)
from lightning_megatron_rl.models.hf.writer import CheckpointWriter
from lightning_megatron_rl.models.layers.lora import LoRASettings

MAX_SHARD_SIZE = 5_000_000_000  # bytes


class SavesFiles:
    """A Hugging Face model whose Megatron twin's weights can be written and compared."""

    path: Path
    name_or_path: str
    config: Any
    _bridge: Any

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The precision of the checkpoint's weights."""

    @property
    @abstractmethod
    def export_config(self) -> Any:
        """The config that goes with exported weights."""

    @abstractmethod
    def export_weights(
        self, chunks: list[Any], dtype: torch.dtype | None = None, tasks: Sequence[Any] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight whole, under its Hugging Face name; a collective of the world."""

    def save_pretrained(
        self,
        chunks: list[Any],
        directory: str | Path,
        dtype: torch.dtype | None = None,
        max_shard_size: int = MAX_SHARD_SIZE,
        tasks: Sequence[Any] | None = None,
    ) -> None:
        """Write a checkpoint that Transformers loads: weights (`export_weights`), config, tokenizer, generation config.

        A collective: all ranks call it, rank 0 writes, in files of at most `max_shard_size` bytes. The directory
        appears under its name only when it is complete. Raises `ValueError` on all ranks if it is not empty or rank 0
        cannot write.
        """
        writer = None
        error = None
        try:
            if dist.get_rank() == 0:
                try:
                    writer = CheckpointWriter(Path(directory), max_shard_size)
                except (OSError, ValueError) as exception:
                    error = str(exception)
            raise_everywhere(error, FailedEverywhereError)
            for name, tensor in self.export_weights(chunks, dtype, tasks):
                if writer is not None and error is None:
                    try:
                        writer.add(name, tensor)
                    except Exception as exception:  # the others are inside the collective: finish it, then tell them
                        error = f"writing {directory} failed at {name}: {type(exception).__name__}: {exception}"
            if writer is not None and error is None:
                try:
                    writer.finish(self.path, self.export_config, dtype or self.dtype)
                except Exception as exception:
                    error = f"writing {directory} failed: {type(exception).__name__}: {exception}"
        finally:  # whatever came, Ctrl-C too
            if writer is not None:
                writer.abandon()
        raise_everywhere(error, FailedEverywhereError)

    def differences(self, chunks: list[Any], directory: str | Path, dtype: torch.dtype | None = None) -> list[str]:
        """Return how the tensors in a directory differ from what `save_pretrained` would write; a collective.

        Every bit is compared. All ranks get the answer, which is empty if there is no difference.
        """
        found: list[Any] = [[]]
        exported = self.export_weights(chunks, dtype)
        if dist.get_rank() == 0:
            try:
                found = [compare_files(exported, Path(directory))]
            except Exception as exception:
                found = [[f"{directory} cannot be read: {type(exception).__name__}: {exception}"]]
        for _ in exported:  # the other ranks' part of the collective
            pass
        dist.broadcast_object_list(found, src=0)
        return list(found[0])

    def save_adapter(self, chunks: list[Any], directory: str | Path, lora: LoRASettings) -> None:
        """Write the chunks' adapters as PEFT loads them: adapter_config.json and adapter_model.safetensors.

        A collective: all ranks call it, rank 0 writes. Raises `ValueError` on all ranks if the directory is not empty
        or cannot be written.
        """
        weights, experts = self.export_adapter(chunks)
        error = None
        if dist.get_rank() == 0:
            layers, mixture = self.config.num_hidden_layers, num_experts(self.config) > 0
            config = adapter_config(weights, lora, self.name_or_path, layers, experts=experts, mixture=mixture)
            try:
                write_adapter(Path(directory), weights | name_experts(experts), config)
            except Exception as exception:
                error = f"writing {directory} failed: {type(exception).__name__}: {exception}"
        raise_everywhere(error, FailedEverywhereError)

    def adapter_differences(self, chunks: list[Any], directory: str | Path) -> list[str]:
        """Return how the adapters in a directory differ from what `save_adapter` would write; a collective."""
        weights, experts = self.export_adapter(chunks)
        found: list[Any] = [[]]
        if dist.get_rank() == 0:
            named = prefixed(weights | name_experts(experts))
            try:
                found = [compare_files(named.items(), Path(directory), dict.fromkeys(named, WEIGHTS_FILE))]
            except Exception as exception:
                found = [[f"{directory} cannot be read: {type(exception).__name__}: {exception}"]]
        dist.broadcast_object_list(found, src=0)
        return list(found[0])

    def export_adapter(self, chunks: list[Any]) -> tuple[dict[str, Tensor], dict[str, tuple[Tensor, Tensor]]]:
        """Return the adapters whole, on the CPU: by name in PEFT, and A and B of experts by parameter; a collective."""
        from lightning_megatron_rl.models.adapter_weights import dense_adapters, expert_adapters

        with torch.no_grad():
            dense = dense_adapters(self._bridge, chunks, self.config.num_hidden_layers)
            weights = {name: tensor.to(copy=True).contiguous() for name, tensor in dense}  # projections share A
        experts = FAMILIES[self.config.model_type].experts
        interleaved = experts is not None and experts.interleaved
        return weights, stack_experts(expert_adapters(chunks), num_experts(self.config), interleaved=interleaved)


def compare_files(
    weights: Iterable[tuple[str, Tensor]], directory: Path, files: Mapping[str, str] | None = None
) -> list[str]:
    """Return one line per tensor that a directory of safetensors files lacks, has too many or has otherwise.

    Args:
        weights: What should be there; iterated to the end.
        directory: Of the files.
        files: The file of each tensor; by default as the directory's index or its files say.
    """
    from safetensors import safe_open

    files = weight_map(directory) if files is None else files
    expected = set()
    found = []
    for name, tensor in weights:
        expected.add(name)
        if name not in files:
            found.append(f"{name} is missing")
            continue
        with safe_open(directory / files[name], framework="pt") as stream:
            difference = describe_difference(stream.get_tensor(name), tensor.detach().cpu())
        if difference is not None:
            found.append(f"{name}: {difference}")
    return found + [f"{name} does not belong there" for name in files if name not in expected]


def describe_difference(have: Tensor, want: Tensor) -> str | None:
    """Return how two tensors differ, None if they are the same bit for bit.

    Example:
        ``describe_difference(torch.ones(2), torch.tensor([1.0, 2.0])) == "1 of 2 numbers differ, by up to 1"``
    """
    if have.dtype != want.dtype or have.shape != want.shape:
        return f"{have.dtype} {tuple(have.shape)} instead of {want.dtype} {tuple(want.shape)}"
    if torch.equal(_bytes(have), _bytes(want)):
        return None
    differ = (_bytes(have) != _bytes(want)).view(max(have.numel(), 1), -1).any(1)
    largest = (have.double() - want.double()).abs().max().item()
    return f"{int(differ.sum())} of {have.numel()} numbers differ, by up to {largest:.3g}"


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
