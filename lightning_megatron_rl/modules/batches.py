"""`check_batch`: what a DataLoader of the user's own gives is refused by name before anything is made of it."""

from typing import Any

from lightning_megatron_rl.data.base import RowDataModule


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
