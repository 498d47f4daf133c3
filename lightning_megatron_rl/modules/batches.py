"""What a module refuses by name before anything is made of it: a DataLoader's batch, and rows that do not fit it."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from lightning_megatron_rl.data.base import RowDataModule
from lightning_megatron_rl.data.packing import TokenSequence
from lightning_megatron_rl.modules.sharing import microbatch_rules

if TYPE_CHECKING:
    from lightning_megatron_rl.modules.model import ModelModule


def check_batch(module: object, batch: Any, item: type, maker: type[RowDataModule]) -> None:
    """Refuse a batch that is no list of `item`.

    Args:
        module: Whose step gets it.
        batch: Of a DataLoader.
        item: What the step works on.
        maker: The data module that makes those.

    Raises:
        TypeError: With what came, and what gives the right batches.
    """
    if isinstance(batch, list | tuple):
        found = {type(one).__name__ for one in batch if not isinstance(one, item)}
        if not found:
            return
        what = f"{type(batch).__name__} of {', '.join(sorted(found))}"
    else:
        what = type(batch).__name__
    raise TypeError(
        f"batches of {type(module).__name__} are lists of {item.__name__}, which {maker.__name__} makes; got a {what}."
        f" Give trainer.fit(...) a {maker.__name__}, or a DataLoader over {item.__name__}s with collate_fn=list."
    )


def check_rows[Item](
    module: "ModelModule", item: type[Item], sequences_of: Callable[[Item], Iterable[TokenSequence]]
) -> None:
    """Refuse rows of a data module that no micro-batch has room for, or that are not of the model's vocabulary.

    Args:
        module: Set up, so that model and budget are known.
        item: What the data module's rows are; others are refused with their batch.
        sequences_of: The sequences that are run of a row.

    Raises:
        ValueError: With the row, the arithmetic and the remedy.
    """
    data = module.trainer.datamodule  # type: ignore[attr-defined]
    if not isinstance(data, RowDataModule):
        return
    rules, budget = microbatch_rules(module.strategy.layout), module.train_settings.token_budget
    limit, vocab_size = budget // rules.row_multiple * rules.row_multiple, module.hf_model.config.vocab_size
    rows = [row for rows in data.items.values() for row in rows if isinstance(row, item)]
    long: list[TokenSequence] = []
    for sequence in (sequence for row in rows for sequence in sequences_of(row)):
        if (largest := int(sequence.token_ids.max())) >= vocab_size:
            raise ValueError(
                f"{sequence.origin} has the token id {largest}, the model's vocabulary ends at {vocab_size - 1}:"
                f" data.tokenizer={data.tokenizer_name!r} is not the tokenizer of this model"
            )
        if rules.place(len(sequence)) > limit:
            long.append(sequence)
    if long:
        longest = max(len(sequence) for sequence in long)
        raise ValueError(
            f"{long[0].origin} has {len(long[0])} tokens, which is more than train.max_tokens_per_microbatch={budget}"
            f" holds ({len(long)} sequences are too long, the longest has {longest}): raise it to at least"
            f" {-(-longest // rules.row_multiple) * rules.row_multiple}, or lower data.max_length"
        )
