"""What the data modules share: named sets of encoded rows, global batches over data-parallel ranks, exact resume."""

import re
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Literal

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

from lightning_megatron_rl.data.loader import EvaluationLoader, GlobalBatches, ResumableLoader
from lightning_megatron_rl.data.sources import Row, Source, check_source, describe_source, load_rows, needs_download
from lightning_megatron_rl.data.templates import load_tokenizer
from lightning_megatron_rl.utilities.notices import tell_loss
from lightning_megatron_rl.utilities.ranges import COUNT, SEED, check_ranges
from lightning_megatron_rl.utilities.seeds import run_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Overlong = Literal["drop", "error"]


class RowDataModule[Item](L.LightningDataModule, ABC):
    """A data module whose rows are encoded once, in memory, and given out in lists.

    `test` and `predict` run on the validation sets.
    """

    def __init__(
        self,
        train: Source,
        val: dict[str, Source] | None,
        tokenizer: str,
        batch_size: int,
        val_batch_size: int | None,
        shuffle: bool,
        seed: int | None,
    ) -> None:
        super().__init__()
        check_ranges({"batch_size": COUNT, "val_batch_size": COUNT, "seed": SEED}, locals(), "data.")
        if not isinstance(val, dict | None):
            raise ValueError(f"data.val={val!r}: its metrics need a name; give a dict, such as {{'held_out': {val!r}}}")
        for name in val or {}:
            if name == "train":
                raise ValueError("a validation set cannot be named 'train': that is the name of the training set")
            if not re.fullmatch(r"[\w.-]+", name):
                raise ValueError(f"the validation set {name!r}: name it with letters, digits, '_', '.' and '-' alone")
        for source in (train, *(val or {}).values()):
            check_source(source)
        if not isinstance(tokenizer, str) or not tokenizer.strip():
            raise ValueError(
                f"data.tokenizer={tokenizer!r}: name the directory or hub name of the model's tokenizer, as text"
            )
        self.train_source = train
        self.val_sources = val or {}
        self.tokenizer_name = tokenizer
        self.batch_size = batch_size
        self.val_batch_size = batch_size if val_batch_size is None else val_batch_size
        self.shuffle = shuffle
        self.seed = seed
        if not self.val_sources:
            # Lightning asks whether the hook is overridden: a fit then has no validation, and `validate` is refused
            self.val_dataloader = super().val_dataloader  # type: ignore[method-assign]
        self.read_ahead = 0  # batches of prompts that a stream of rollouts takes early
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._sets: dict[str, list[Item]] = {}
        self._train_loader: ResumableLoader[Item] | None = None
        self._train_loader_owner: L.Trainer | None = None
        self._position: dict[str, Any] | None = None  # of a checkpoint, until the training loader exists

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> "RowDataModule[Any]":
        """Refuse: a checkpoint is a directory, and holds the position in the data, not how the data are made.

        Raises:
            ValueError: Always, with what to do in its place.
        """
        raise ValueError(
            f"{cls.__name__}.load_from_checkpoint({str(checkpoint_path)!r}): a checkpoint holds the position in the"
            " data alone. Build the data module as in the run's config, and resume with Trainer.fit(ckpt_path=...)."
        )

    @abstractmethod
    def encode(self, rows: list[Row], dataset: str, source_name: str) -> list[Item]:
        """The items of all rows that are not left out."""

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The tokenizer, loaded on first use."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.tokenizer_name)
        return self._tokenizer

    @property
    def order_seed(self) -> int:
        """Seed of the training set's orders: `seed`; unset, that of the run, or of the one that it goes on from."""
        if self.seed is not None:
            return self.seed
        return run_seed() if self._position is None else self._position["seed"]

    @property
    def val_names(self) -> list[str]:
        """Names of the validation sets, in the order of their `dataloader_idx`."""
        return list(self.val_sources)

    @property
    def train_items(self) -> list[Item]:
        """All encoded rows of the training set, in the source's order; there after `setup("fit")`."""
        return self._sets["train"]

    @property
    def items(self) -> dict[str, list[Item]]:
        """All encoded rows by data set, the training set's as "train"; those of the stage that was set up."""
        return self._sets

    def prepare_data(self) -> None:
        """Fill the download caches, in one process per node."""
        for source in [self.train_source, *self.val_sources.values()]:
            if needs_download(source):
                load_rows(source)

    def setup(self, stage: str | None = None) -> None:
        """Read and encode what the stage needs, and check the batch arithmetic, before any weights are loaded."""
        sources = dict(self.val_sources)
        if stage in (None, "fit"):
            sources = {"train": self.train_source, **sources}
        for name, source in sources.items():
            if name not in self._sets:
                self._sets[name] = self.encode(load_rows(source), name, describe_source(source))
        if "train" in sources:
            self.check_batches(self._sets["train"])

    def train_dataloader(self) -> ResumableLoader[Item] | EvaluationLoader[Item]:
        """Global batches of the training set; one loader for all of a trainer's epochs."""
        items = self._sets["train"]
        num_replicas, rank = self._data_parallel()
        if self.trainer is not None and self.trainer.overfit_batches:  # type: ignore[attr-defined]
            # the same first batches in every epoch
            return EvaluationLoader(items, self.training_batches(items, num_replicas, rank, shuffle=False))
        if self._train_loader is None or self._train_loader_owner is not self.trainer:
            self._train_loader = ResumableLoader(items, self.training_batches(items, num_replicas, rank, self.shuffle))
            self._train_loader_owner = self.trainer
        if self._position is not None:
            self._go_on(self._train_loader, self._position)
        return self._train_loader

    def forget_stream(self) -> None:
        """Serve a module that has read nothing: what another module's stream has read ahead ends with that."""
        if self.read_ahead:
            self.read_ahead, self._train_loader = 0, None

    def _go_on(self, loader: ResumableLoader[Item], position: dict[str, Any]) -> None:
        """Restore a loader, whose orders are those of the checkpoint if no `seed` is set."""
        self._position = position
        if self.order_seed != loader.batches.seed:
            loader.batches = self.training_batches(self._sets["train"], *self._data_parallel(), self.shuffle)
        loader.load_state_dict(position)
        self._position = None

    def training_batches(self, items: list[Item], num_replicas: int, rank: int, shuffle: bool) -> GlobalBatches:
        """The rows that a data-parallel rank takes of each training batch: `batch_size` over all ranks."""
        return GlobalBatches(
            len(items),
            self.batch_size,
            num_replicas=num_replicas,
            rank=rank,
            shuffle=shuffle,
            seed=self.order_seed,
            drop_last=True,
            read_ahead=self.read_ahead,
        )

    def val_dataloader(self) -> list[EvaluationLoader[Item]]:
        """One loader per validation set: every row once over all ranks; a rank's last batch may be an empty list."""
        num_replicas, rank = self._data_parallel()
        return [
            EvaluationLoader(
                self._sets[name],
                GlobalBatches(len(self._sets[name]), self.val_batch_size, num_replicas=num_replicas, rank=rank),
            )
            for name in self.val_names
        ]

    def test_dataloader(self) -> list[EvaluationLoader[Item]]:
        """The validation sets."""
        return self.val_dataloader()

    def predict_dataloader(self) -> list[EvaluationLoader[Item]]:
        """The validation sets."""
        return self.val_dataloader()

    def state_dict(self) -> dict[str, Any]:
        """The position in the training set, for the checkpoint."""
        return {} if self._train_loader is None else {"train": self._train_loader.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint's position.

        Lightning restores a loader only if it builds it after reading the checkpoint and takes the last epoch for
        unfinished, so the position is kept here. `validate(ckpt_path=…)` calls this too; it moves nothing.
        """
        if self.trainer is not None and self.trainer.state.fn != TrainerFn.FITTING:
            return
        if self._train_loader is not None and self._train_loader_owner is self.trainer:
            self._go_on(self._train_loader, state_dict["train"])
        else:
            self._position = state_dict["train"]

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Leave the records on the host: what the device needs is packed first."""
        return batch

    def drop_overlong(
        self,
        items: list[Item],
        names: list[str],
        lengths: list[int],
        limit: int,
        mode: Overlong,
        dataset: str,
        setting: str,
    ) -> list[Item]:
        """The items whose length is within the limit; the others are counted in a warning, or refused.

        Args:
            items: To choose from.
            names: Of the row that each comes from.
            lengths: Of each. # [tokens]
            limit: Most of these.
            mode: What becomes of a longer one.
            dataset: The set's name.
            setting: What the limit is called.

        Raises:
            ValueError: on the first overlong item if `mode` is "error", or if no item is left.
        """
        overlong = [row for row, length in enumerate(lengths) if length > limit]
        if overlong and mode == "error":
            raise ValueError(
                f"{names[overlong[0]]} has {lengths[overlong[0]]} tokens, {setting}={limit} ({len(overlong)} of "
                f"{len(items)} rows are too long): raise it to at least {max(lengths)}, or drop such rows"
            )
        if len(overlong) == len(items):
            raise ValueError(
                f"all {len(items)} rows of {dataset} have more than {setting}={limit} tokens (shortest: "
                f"{min(lengths)}): raise it"
            )
        if overlong:
            rank_zero_only(tell_loss)(
                f"{dataset}: {len(overlong)} of {len(items)} rows dropped: more than {setting}={limit} tokens"
            )
        return [item for item, length in zip(items, lengths, strict=True) if length <= limit]

    def _data_parallel(self) -> tuple[int, int]:
        """Data-parallel size and rank: the strategy's, or 1 and 0 on a single device and without a trainer."""
        kwargs = None if self.trainer is None else self.trainer.distributed_sampler_kwargs
        return (1, 0) if kwargs is None else (kwargs["num_replicas"], kwargs["rank"])

    def check_batches(self, items: list[Item]) -> None:
        """Refuse a training set that gives no batch, or batches that do not divide.

        Raises:
            ValueError: With the arithmetic.
        """
        num_rows = len(items)
        num_replicas, _ = self._data_parallel()
        if self.batch_size % num_replicas:
            lower = self.batch_size // num_replicas * num_replicas
            fitting = f"{lower} or {lower + num_replicas}" if lower else str(num_replicas)
            raise ValueError(
                f"batch_size({self.batch_size}) / data-parallel size({num_replicas}) = "
                f"{self.batch_size / num_replicas:g} is not whole: set batch_size to {fitting}"
            )
        if num_rows < self.batch_size:
            raise ValueError(
                f"the training set has {num_rows} rows, batch_size is {self.batch_size}: {num_rows} // "
                f"{self.batch_size} = 0 batches per epoch. Set batch_size to at most {num_rows}, or add rows"
            )
        if (left := num_rows % self.batch_size) and not self.shuffle:
            rank_zero_warn(
                f"data.shuffle=false: {num_rows} rows make {num_rows // self.batch_size} batches of {self.batch_size},"
                f" and the last {left} rows are trained on in no epoch. Set shuffle to true, or a batch_size that"
                f" divides {num_rows}"
            )
