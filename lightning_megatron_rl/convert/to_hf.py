"""From a distributed checkpoint to a Hugging Face one, parameter by parameter."""

from pathlib import Path

import torch

from lightning_megatron_rl.convert.skeleton import Skeleton
from lightning_megatron_rl.convert.source import StoredModel
from lightning_megatron_rl.convert.stored import StoredTasks
from lightning_megatron_rl.convert.to_checkpoint import load_unmapped
from lightning_megatron_rl.models.adapter_weights import MergedTasks
from lightning_megatron_rl.models.hf.model import KEPT_IN_FP32
from lightning_megatron_rl.models.hf.save import MAX_SHARD_SIZE, describe_difference
from lightning_megatron_rl.models.hf.writer import check_space
from lightning_megatron_rl.models.value_model import HEAD
from lightning_megatron_rl.utilities.files import check_writable


class HFConversion:
    """A stored model on its way to Hugging Face's format; inside `single_process`.

    Args:
        stored: The model.
        dtype: Of the tensors; by default that of the model which training started from.

    Raises:
        ValueError: The checkpoint is of another model.
    """

    def __init__(self, stored: StoredModel, dtype: torch.dtype | None = None) -> None:
        self.stored = stored
        self.model = stored.model
        self.dtype = dtype or self.model.dtype
        # adapters are added to the weights in fp32; what is only copied keeps the precision that it has
        self.skeleton = Skeleton(self.model, torch.float32, lora=stored.lora, prefix=stored.prefix)
        self._check()
        load_unmapped(self.skeleton, stored.tensors)

    def _check(self) -> None:
        """Refuse a checkpoint of another model than the config's."""
        shapes = self.stored.shapes
        wanted = {piece.key: piece for _, tensor in self.skeleton.saved for piece in self.skeleton.pieces(tensor)}
        wrong = [f"{key} is missing" for key in wanted if key not in shapes]
        wrong += [f"{key} is not in the model" for key in shapes if key not in wanted]
        wrong += [
            f"{key} has shape {shapes[key]} instead of {piece.global_shape}"
            for key, piece in wanted.items()
            if key in shapes and not piece.fits(shapes[key])
        ]
        if wrong:
            first = "; ".join(wrong[:3]) + ("; ..." if len(wrong) > 3 else "")
            raise ValueError(
                f"checkpoint {self.stored.name} is of another model than {self.model.path}: of {len(wanted)} tensors"
                f" {len(wrong)} differ ({first}). Give the model that it was trained from with --model."
            )

    @property
    def bytes(self) -> int:
        """Size of all tensors in Hugging Face's format."""
        size = sum(task.param_weight.numel() for task in self.skeleton.tasks if task.param_weight is not None)
        return size * self.dtype.itemsize

    def write(self, destination: Path, max_shard_size: int = MAX_SHARD_SIZE) -> None:
        """Write the model, adapters merged.

        Raises:
            ValueError: `destination` is not empty or cannot be written.
            OSError: There is no room for it, or its directory takes no files.
        """
        check_space(destination, self.bytes, f"the weights in {str(self.dtype).removeprefix('torch.')}")
        check_writable(destination)
        tasks = StoredTasks(self.skeleton, self.stored.tensors)
        self.model.save_pretrained(self.skeleton.chunks, destination, self.dtype, max_shard_size, tasks)

    def verify(self, destination: Path) -> list[str]:
        """Convert what was written back, tensor by tensor, and return how it differs from the checkpoint."""
        written = type(self.model)(str(destination)).open_weights(self.skeleton.chunks)
        of_name = {task.global_param_name.replace(".to_wrap.", "."): task for task in written.tasks}
        tasks = StoredTasks(self.skeleton, self.stored.tensors)
        found = []
        with torch.no_grad():
            for task in MergedTasks(tasks, self.skeleton.chunks):
                name = task.global_param_name
                if name not in of_name:
                    found.append(f"{name} is missing")
                    continue
                kept = str(task.mapping.hf_param).endswith(KEPT_IN_FP32)
                want = task.param_weight.to(torch.float32 if kept else self.dtype)
                difference = describe_difference(written.read(of_name[name]), want.float())
                if difference is not None:
                    found.append(f"{name}: {difference}")
        if self.stored.has_value_head:
            head = self.skeleton.chunks[0].output_layer.weight.detach()
            difference = describe_difference(written.tensor(HEAD), head.to(self.dtype))
            if difference is not None:
                found.append(f"{HEAD}: {difference}")
        return found

    def write_adapter(self, destination: Path) -> None:
        """Write the adapters alone, in PEFT's format.

        Raises:
            ValueError: There are none, they are not all that was trained, or `destination` is not empty.
        """
        if self.stored.lora is None:
            raise ValueError(
                f"checkpoint {self.stored.name} holds a whole model, no adapters: leave --adapter peft out."
            )
        if self.stored.has_value_head:
            raise ValueError(
                f"checkpoint {self.stored.name} holds a value head beside its adapters, which PEFT's format would leave"
                " out: convert with --adapter merged."
            )
        check_writable(destination)
        self.model.save_adapter(self.skeleton.chunks, destination, self.stored.lora)

    def verify_adapter(self, destination: Path) -> list[str]:
        """Return how written adapters differ from the checkpoint's."""
        return self.model.adapter_differences(self.skeleton.chunks, destination)
