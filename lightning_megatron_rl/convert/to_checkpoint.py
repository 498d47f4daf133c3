"""From a Hugging Face checkpoint to a distributed one, parameter by parameter."""

from dataclasses import asdict
from functools import partial
from pathlib import Path

import lightning
import torch
from torch import Tensor

from lightning_megatron_rl.checkpoints import format as checkpoint_io
from lightning_megatron_rl.convert.skeleton import Skeleton
from lightning_megatron_rl.convert.stored import StoredTasks, StoredTensors
from lightning_megatron_rl.convert.streamed import stage_streamed
from lightning_megatron_rl.models.hf.model import HFModel
from lightning_megatron_rl.models.hf.save import describe_difference
from lightning_megatron_rl.models.hf.writer import check_space
from lightning_megatron_rl.models.value_model import HEAD, ValueModel
from lightning_megatron_rl.parallel.layout import ParallelLayout
from lightning_megatron_rl.utilities.files import check_writable
from lightning_megatron_rl.utilities.finite import describe_nonfinite, nonfinite_names, not_finite


class _Maker:
    """Makes parts of parameters out of Hugging Face tensors; a parameter with two parts is made once."""

    def __init__(self, skeleton: Skeleton) -> None:
        self._skeleton = skeleton
        self._tasks = {id(skeleton.owner(task.param_weight)): task for task in skeleton.weights.tasks}
        self._head: Tensor | None = None  # a value head's parameter
        if isinstance(skeleton.model, ValueModel) and HEAD in skeleton.weights.names:
            self._head = dict(skeleton.saved)["output_layer.weight"]
        self._last: tuple[Tensor, Tensor] | None = None

    def check(self) -> None:
        """Refuse a checkpoint without the weights of some parameter.

        Raises:
            ValueError: With the parameters' names.
        """
        missing = [
            name for name, tensor in self._skeleton.saved if id(tensor) not in self._tasks and tensor is not self._head
        ]
        if missing:
            names = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            raise ValueError(f"checkpoint {self._skeleton.model.path} has no weights for {names}")

    def __call__(self, part: Tensor) -> Tensor:
        """Return the numbers of a part, which is given on the meta device."""
        parameter = self._skeleton.owner(part)
        if self._last is None or self._last[0] is not parameter:
            self._last = None  # before the next is made
            if parameter is self._head:
                weight = self._skeleton.weights.tensor(HEAD).to(parameter.dtype)
                if nonfinite_names([(HEAD, weight)]):
                    raise ValueError(not_finite([f"{HEAD} has {describe_nonfinite(weight)}"]))
            else:
                weight = self._skeleton.weights.read(self._tasks[id(parameter)])
            self._last = (parameter, weight.contiguous())
        weight = self._last[1]
        return weight.as_strided(part.size(), part.stride(), weight.storage_offset() + part.storage_offset())


def write_checkpoint(model: HFModel, destination: Path, dtype: torch.dtype | None = None) -> Skeleton:
    """Write the weights of a model as a checkpoint that any layout can start from; inside `single_process`.

    Args:
        model: With its weights.
        destination: Appears when it is complete.
        dtype: Of the parameters; by default the checkpoint's.

    Returns:
        What was written.

    Raises:
        ValueError: `destination` is not empty, or the model lacks weights.
        OSError: There is no room for it, or it cannot be written.
    """
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ValueError(f"{destination} exists and is not empty: remove it or choose another directory")
    dtype = dtype or model.dtype
    skeleton = Skeleton(model, dtype)
    maker = _Maker(skeleton)
    maker.check()
    check_space(destination, skeleton.bytes, f"the parameters in {str(dtype).removeprefix('torch.')}")
    check_writable(destination)
    trainer_state = {
        "epoch": 0,
        "global_step": 0,
        "pytorch-lightning_version": lightning.__version__,
        "state_dict": {},
    }
    description = {
        "layout": asdict(ParallelLayout()),
        "world_size": 1,
        "global_step": 0,
        "has_optimizer": False,
        "use_distributed_optimizer": True,
        "trained_on_top_of": None,
    }
    pending = checkpoint_io.PendingCheckpoint(
        destination,
        {"model0": skeleton.state},
        trainer_state,
        description,
        later=False,
        beside=model.settings_files("hf"),
        stage=partial(stage_streamed, make=maker),
    )
    pending.write()
    return skeleton


def verify_checkpoint(skeleton: Skeleton, destination: Path) -> list[str]:
    """Convert a written checkpoint back, tensor by tensor, and return how it differs from its source.

    Tensors that the source has in another form (quantised, or one for all experts) are left out.
    """
    stored = StoredTensors(destination / checkpoint_io.SHARDED)
    load_unmapped(skeleton, stored)
    found = []
    exported = skeleton.model.export_weights(skeleton.chunks, skeleton.dtype, StoredTasks(skeleton, stored))
    compared = 0
    for name, tensor in exported:
        if name in skeleton.weights.names:
            compared += 1
            difference = describe_difference(tensor, skeleton.weights.tensor(name).to(tensor.dtype))
            if difference is not None:
                found.append(f"{name}: {difference}")
    if not compared:
        found.append(f"{destination}: nothing could be compared, {skeleton.model.path} has its tensors in another form")
    return found


def load_unmapped(skeleton: Skeleton, stored: StoredTensors) -> None:
    """Give the skeleton the numbers of what is not converted: a value head, adapters."""
    for name, parameter in [*skeleton.unmapped]:
        skeleton.put(name, stored.read(parameter, skeleton.pieces(parameter)))
