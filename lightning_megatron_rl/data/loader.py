"""Loading: which rows each data-parallel rank takes of every global batch, and a loader that resumes exactly."""

import zlib
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import torch


class GlobalBatches:
    """The rows that one data-parallel rank takes of each global batch, in an endless sequence of epochs.

    A global batch is a slice of its epoch's order of all rows, which depends on seed and epoch only; rank `r` of `n`
    takes every `n`-th row of it from the `r`-th on. So the ranks together see the same batches for every `n`, no row is
    seen twice in an epoch, and all ranks have the same number of batches.

    Args:
        num_rows: Rows of the data set.
        batch_size: Rows of a batch, over all ranks.
        num_replicas: Data-parallel size.
        rank: Data-parallel rank.
        shuffle: Whether every epoch has an order of its own.
        seed: Seed of the orders; epoch `e` uses `seed + e`, as PyTorch's `DistributedSampler` does.
        drop_last: Whether to leave out a last batch that is not full. Kept, it may be uneven or empty on some ranks.
        read_ahead: Batches that an epoch's first one brings besides its own rows. Each later one brings those of the
            batch so many places ahead, and the last ones bring none, so an epoch has as many batches as without.

    Example:
        5 rows, ``batch_size=4``, 2 ranks, in order: rank 0 takes [0, 2] and [4], rank 1 takes [1, 3] and [].
    """

    def __init__(
        self,
        num_rows: int,
        batch_size: int,
        *,
        num_replicas: int = 1,
        rank: int = 0,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        read_ahead: int = 0,
    ) -> None:
        self.read_ahead = read_ahead
        self._resumed: tuple[int, int] | None = None  # an epoch that was begun with another read_ahead, and that
        self.num_rows = num_rows
        self.batch_size = batch_size
        self.max_tokens: int | None = None  # of a batch
        self.lengths: int | None = None  # checksum of the rows' tokens, where they decide which rows make a batch
        self.num_replicas = num_replicas
        self.rank = rank
        self.shuffle = shuffle
        self.seed = seed
        self.per_epoch = num_rows // batch_size if drop_last else -(-num_rows // batch_size)
        self._order_of: tuple[int, list[int]] | None = None  # the epoch last asked for, and its order

    def __getitem__(self, number: int) -> list[int]:
        """The rows of batch `number`, counted from the first batch of epoch 0."""
        epoch, in_epoch = divmod(number, self.per_epoch)
        ahead = self.ahead_in(epoch)
        first, last = in_epoch + ahead if in_epoch else 0, min(in_epoch + ahead, self.per_epoch - 1)
        order, rows = self._order(epoch), list[int]()
        for place in range(first, last + 1):
            start = place * self.batch_size
            rows += order[start : start + self.batch_size][self.rank :: self.num_replicas]
        return rows

    def ahead_in(self, epoch: int) -> int:
        """Return the batches that are read ahead in an epoch."""
        return self._resumed[1] if self._resumed is not None and self._resumed[0] == epoch else self.read_ahead

    def resume_in(self, epoch: int, read_ahead: int) -> None:
        """Go on within an epoch that was begun with another `read_ahead`, and keeps it to its end."""
        self._resumed = epoch, read_ahead

    def _order(self, epoch: int) -> Sequence[int]:
        if not self.shuffle:
            return range(self.num_rows)
        if self._order_of is None or self._order_of[0] != epoch:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            self._order_of = epoch, torch.randperm(self.num_rows, generator=generator).tolist()
        return self._order_of[1]


class TokenBudgetBatches(GlobalBatches):
    """Global batches of at most so many tokens, instead of so many rows; no row is left out.

    The batches are filled once, from the order of epoch 0; a shuffled epoch has an order of batches of its own. So all
    epochs have the same number of them.

    Args:
        lengths: Tokens of each row of the data set.
        max_tokens: Most tokens of a batch, over all ranks.
        batch_size: Most rows of a batch, over all ranks.
        num_replicas: Data-parallel size.
        rank: Data-parallel rank; its part of a batch may be empty.
        shuffle: Whether every epoch has an order of its own.
        seed: Seed of the orders.

    Raises:
        ValueError: A row has more tokens than a batch may have.

    Example:
        ``TokenBudgetBatches([3, 3, 4, 2], max_tokens=6, batch_size=8)`` gives [0, 1] and [2, 3].
    """

    def __init__(
        self,
        lengths: Sequence[int],
        max_tokens: int,
        batch_size: int,
        *,
        num_replicas: int = 1,
        rank: int = 0,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(len(lengths), batch_size, num_replicas=num_replicas, rank=rank, shuffle=shuffle, seed=seed)
        if max(lengths) > max_tokens:
            raise ValueError(
                f"the longest sequence has {max(lengths)} tokens, max_tokens_per_batch is {max_tokens}: raise it to at"
                f" least {max(lengths)}, or lower max_length"
            )
        self.max_tokens = max_tokens
        self.lengths = zlib.crc32(array("q", lengths).tobytes())
        self._batches: list[list[int]] = [[]]
        num_tokens = 0
        for row in self._order(0):
            if num_tokens + lengths[row] > max_tokens or len(self._batches[-1]) == batch_size:
                self._batches.append([])
                num_tokens = 0
            self._batches[-1].append(row)
            num_tokens += lengths[row]
        self.per_epoch = len(self._batches)
        self._sequence = GlobalBatches(self.per_epoch, 1, shuffle=shuffle, seed=seed)  # of batches

    def __getitem__(self, number: int) -> list[int]:
        """The rows of batch `number`, counted from the first batch of epoch 0."""
        (batch,) = self._sequence[number]
        return self._batches[batch][self.rank :: self.num_replicas]


class EvaluationLoader[Item]:
    """Lists of items, one epoch from its first batch each time.

    Neither loader is a `DataLoader`: the items are in memory already, and Lightning leaves other iterables alone
    instead of building them again around a sampler of its own.
    """

    def __init__(self, items: Sequence[Item], batches: GlobalBatches) -> None:
        self.items = items
        self.batches = batches

    def __len__(self) -> int:
        return self.batches.per_epoch

    def __iter__(self) -> Iterator[list[Item]]:
        for number in range(len(self)):
            yield [self.items[row] for row in self.batches[number]]


class ResumableLoader[Item]:
    """Lists of items without end, an epoch's number of them per iteration; a restored one gives the very next.

    What comes next depends only on how many batches came before, not on Lightning's count of epochs: after a
    checkpoint at an epoch's end, a run bounded by `max_steps` skips an epoch number. The state is the same on all ranks
    and for every data-parallel size. Lightning and the data module call `state_dict` and `load_state_dict`.

    Raises:
        ValueError: when restored within an epoch whose batches would be others than those of the checkpoint.
    """

    def __init__(self, items: Sequence[Item], batches: GlobalBatches) -> None:
        self.items = items
        self.batches = batches
        self._num_done = 0  # batches given out since the start of training

    def __len__(self) -> int:
        return self.batches.per_epoch

    def __iter__(self) -> Iterator[list[Item]]:
        for _ in range(len(self)):
            rows = self.batches[self._num_done]
            self._num_done += 1
            yield [self.items[row] for row in rows]

    def state_dict(self) -> dict[str, Any]:
        """The position, and what must not change for it to mean the same batch."""
        batches = self.batches
        epoch, in_epoch = divmod(self._num_done, batches.per_epoch)
        return {
            "num_done": self._num_done,
            "per_epoch": batches.per_epoch,
            "num_rows": batches.num_rows,
            "batch_size": batches.batch_size,
            "max_tokens_per_batch": batches.max_tokens,
            "lengths": batches.lengths,
            "shuffle": batches.shuffle,
            "seed": batches.seed,
            "read_ahead": batches.ahead_in(epoch) if in_epoch else 0,  # of the epoch that goes on
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved position; between two epochs the data may have changed."""
        now = self.state_dict()
        keys = ("num_rows", "batch_size", "max_tokens_per_batch", "shuffle", "seed")
        changed = [f"{key} was {state_dict[key]!r}, is {now[key]!r}" for key in keys if state_dict[key] != now[key]]
        if state_dict.get("lengths", now["lengths"]) != now["lengths"]:  # checkpoints of 0.1 have none
            changed.append("the rows have other numbers of tokens, by which batches of max_tokens_per_batch are filled")
        epoch, in_epoch = divmod(state_dict["num_done"], state_dict["per_epoch"])
        if changed and in_epoch:
            raise ValueError(
                f"the checkpoint stands after {in_epoch} of {state_dict['per_epoch']} batches of epoch {epoch}, and "
                f"the data changed since: {'; '.join(changed)}. The epoch cannot go on where it stopped: restore these "
                f"settings, or start from exported weights instead of ckpt_path"
            )
        if in_epoch:
            self.batches.resume_in(epoch, state_dict.get("read_ahead", 0))  # checkpoints of 0.1 have none
        self._num_done = epoch * len(self) + in_epoch
