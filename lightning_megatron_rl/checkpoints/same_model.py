"""Whether a checkpoint fits the model, by names and shapes, before tensors are read."""

from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_megatron_rl.parallel.distributed import run_on_all_ranks
from lightning_megatron_rl.utilities.notices import tell_loss

if TYPE_CHECKING:
    from lightning_megatron_rl.checkpoints.shards import SavedShards

_NAMES_BEGIN = ("decoder.", "embedding.", "output_layer.")  # of every model's tensors
_REFERENCE = "reference."  # of those of a reference that was given new weights
_LAST_LAYER = "output_layer.weight"  # a language model's, or with one row a value head


def check_same_model(path: Path, saved: "SavedShards", sharded: dict[str, Any], tensor_parallel_size: int) -> None:
    """Compare names and shapes of parameters; a collective.

    Args:
        path: Of the checkpoint.
        saved: What it has.
        sharded: What is asked for, by part.
        tensor_parallel_size: Under which it was saved.

    Raises:
        ValueError: Parameters that are missing, too many, or of another shape.
    """
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    parts = (state for part, state in sharded.items() if not part.startswith("optimizer"))
    own = {
        # a factory makes tensors when it is saved
        tensor.key: (tuple(tensor.global_shape), tensor.allow_shape_mismatch)
        if isinstance(tensor, ShardedTensor)
        else (None, False)
        for tensor in chain.from_iterable(nested_values(state) for state in parts)
        if isinstance(tensor, ShardedTensor | ShardedTensorFactory)
    }
    wanted = {key: shape for shapes in run_on_all_ranks(lambda: own) for key, shape in shapes.items()}
    splits = (tensor_parallel_size, parallel_state.get_tensor_model_parallel_world_size())
    missing = [key for key in wanted if key not in saved.shapes]
    # not those of a critic or a reference that this run may do without: their names begin with the model's
    extra = [key for key in saved.shapes if key not in wanted and key.startswith(_NAMES_BEGIN)]
    shapes = [
        f"{key} {saved.shapes[key]} != {shape}"
        for key, (shape, padded) in wanted.items()
        if shape is not None and not is_same_shape(saved.shapes.get(key, shape), shape, splits if padded else None)
    ]
    if missing or extra or shapes:
        last = (saved.shapes.get(_LAST_LAYER), wanted.get(_LAST_LAYER, (None,))[0])
        heads = [shape is not None and shape[0] == 1 for shape in last]
        remedy = "Use the checkpoint with the model it was trained from."
        if not extra and not shapes and not any(key.startswith(_NAMES_BEGIN) for key in missing):
            name = missing[0].partition(".")[0]
            remedy = (
                f"The run that saved it had no {name} to save: resume with its settings, or start a new run with the"
                " checkpoint's weights."
            )
        if any(heads) and not all(heads):
            remedy = "Only one of them has a value head: convert it to Hugging Face's format, and start from that."
        raise ValueError(
            f"checkpoint {path} is of another model: {len(missing)} of {len(wanted)} parameters are missing"
            f"{_first(missing)}, {len(extra)} are not in the model{_first(extra)}, {len(shapes)} have another shape"
            f" (checkpoint != model){_first(shapes)}. {remedy}"
        )

    trains = any(part.startswith("optimizer") for part in sharded)
    if trains and _has_reference(saved.shapes) and not _has_reference(wanted):
        rank_zero_only(tell_loss)(
            f"checkpoint {path} has a reference that was refreshed, and this run refreshes none: any KL is measured to"
            " the model that it was given. To go on from the checkpoint's, set reference.refresh_every_n_steps."
        )


def _has_reference(names: Iterable[str]) -> bool:
    return any(name.startswith(_REFERENCE) for name in names)


def check_same_optimizer(path: Path, saved: "SavedShards", sharded: dict[str, Any]) -> None:
    """Refuse a checkpoint without the optimizer's state of some parameter; a collective.

    Args:
        path: Of the checkpoint.
        saved: What it has.
        sharded: What is asked for, by part.

    Raises:
        ValueError: Names what is missing.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    parts = (state["tensors"] for part, state in sharded.items() if part.startswith("optimizer"))
    tensors = chain.from_iterable(nested_values(state) for state in parts)
    own = {tensor.key for tensor in tensors if isinstance(tensor, ShardedTensor)}
    wanted = sorted(set().union(*run_on_all_ranks(lambda: own)))
    missing = [key for key in wanted if key not in saved.shapes]
    if missing:
        raise ValueError(
            f"checkpoint {path} lacks {len(missing)} of {len(wanted)} tensors of this run's optimizer{_first(missing)}:"
            " it was saved with other parameters frozen, or by another optimizer. Resume with the same ones trained and"
            f" the same OptimizerConfig.optimizer, or start a new run with its weights: init_from={str(path)!r} of the"
            " module."
        )


def is_same_shape(saved: tuple[int, ...], own: tuple[int, ...], splits: tuple[int, int] | None = None) -> bool:
    """Whether two shapes are of one tensor.

    Args:
        saved: In the checkpoint.
        own: In the model.
        splits: Of a vocabulary, the sizes of tensor parallelism there and here: its rows are padded to multiples of
            them. Megatron compares no rows then, and would load as many as there are without a word.

    Example:
        127 tokens under TP2 and TP1: ``is_same_shape((128, 64), (127, 64), (2, 1))``; not with ``(1, 1)``.
    """
    if splits is None:
        return saved == own
    fewest = max(rows - split for rows, split in zip((saved[0], own[0]), splits, strict=True))
    return saved[1:] == own[1:] and fewest < min(saved[0], own[0])


def _first(items: list[str], count: int = 3) -> str:
    return f" ({', '.join(items[:count])}{', ...' if len(items) > count else ''})" if items else ""
