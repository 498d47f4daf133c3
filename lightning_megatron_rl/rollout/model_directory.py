"""Names and shapes of a Hugging Face model directory's weights, read without loading them."""

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

from lightning_megatron_rl.models.hf.files import stored_tensors
from lightning_megatron_rl.utilities.text_files import read_json
from lightning_megatron_rl.weights.source import WeightSource, WeightViews

OUTPUT_EMBEDDING = "lm_head.weight"  # absent, or a copy of the input embedding, where the two are tied
RECOMPUTED = ".rotary_emb.inv_freq"  # in the first Llama checkpoints: computed from the config, never trained


class Shaped(Protocol):
    """What has a shape: a tensor, or what stands for one."""

    @property
    def shape(self) -> Any:
        """Sizes of the dimensions."""


S = TypeVar("S", bound=Shaped)


@dataclass(frozen=True)
class CheckpointLayout:
    """The tensors that a complete set of weights must hold."""

    shapes: dict[str, tuple[int, ...]]  # by Hugging Face name
    dtype: str  # dtype of the stored weights, such as "bfloat16"
    is_tied: bool  # output embedding = input embedding
    architectures: tuple[str, ...] = ()  # classes of transformers that the config names

    @classmethod
    def read(cls, model_path: str | Path) -> "CheckpointLayout":
        """Read the names and shapes from the headers of the safetensors files.

        Raises:
            ValueError: The directory has no config.json or no safetensors weights, or its files are damaged.
        """
        directory = Path(model_path)
        if not (directory / "config.json").is_file():
            raise ValueError(f"{directory} is no Hugging Face model directory: it has no config.json")
        config = read_json(directory / "config.json")
        stored = stored_tensors(directory)
        if not stored:
            raise ValueError(
                f"{directory} has no model.safetensors and no model.safetensors.index.json; "
                "save the model with `save_pretrained` of transformers, which writes them"
            )
        is_tied = _is_tied(config)
        shapes = {name: tensor.shape for name, tensor in stored.items() if not name.endswith(RECOMPUTED)}
        if is_tied:
            shapes.pop(OUTPUT_EMBEDDING, None)
        dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
        return cls(shapes, dtype, is_tied, tuple(config.get("architectures") or ()))

    @property
    def num_parameters(self) -> int:
        """Weights of the model; a tied output embedding counts once."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def check(self, weights: Iterable[tuple[str, S]]) -> Iterator[tuple[str, S]]:
        """Yield `weights` one by one, each checked against the layout; a tied output embedding is dropped.

        vLLM keeps the old values of whatever an update leaves out, with a line in its log and no error.

        Raises:
            ValueError: A name is unknown, repeated or missing, or a shape differs.
        """
        seen: set[str] = set()
        for name, tensor in weights:
            if self._is_wanted(name, tensor.shape, seen):
                yield name, tensor
        self._check_complete(seen)

    def check_source(self, source: WeightSource) -> WeightSource:
        """Return a source whose weights are checked against the layout: whole ones now, others as they are taken.

        Raises:
            ValueError: As `check`; of weights that come one by one, the first is looked at, which may be a collective.
        """
        if source.whole is not None:
            whole = self.check_whole(source.whole)
            return replace(source, whole=whole, tensors=whole.__iter__)
        buckets = source.buckets
        if buckets is not None:
            return replace(
                source,
                tensors=lambda: self.check(source.tensors()),
                buckets=lambda: self.check_buckets(buckets()),
            )
        tensors = self.check(source.tensors())
        all_of_them = chain(list(islice(tensors, 1)), tensors)
        return replace(source, tensors=lambda: all_of_them)

    def check_whole(self, weights: WeightViews) -> WeightViews:
        """Check all weights against the layout, without a copy of those whose rows lie apart."""
        found = [view for _, view in self.check((view.name, view) for view in weights.views)]
        return WeightViews(found, stays=weights.stays)

    def check_buckets(self, buckets: Iterable[WeightViews]) -> Iterator[WeightViews]:
        """Yield buckets one by one, their weights checked as in `check`.

        Yields one for each that comes, empty if nothing of it is wanted.
        """
        seen: set[str] = set()
        for bucket in buckets:
            wanted = [view for view in bucket.views if self._is_wanted(view.name, view.shape, seen)]
            is_whole = len(wanted) == len(bucket.views)
            yield bucket if is_whole else WeightViews(wanted, stays=bucket.stays, memory=bucket.memory)
        self._check_complete(seen)

    def _is_wanted(self, name: str, shape: Iterable[int], seen: set[str]) -> bool:
        """Whether a weight is one of the layout's, which is added to `seen`; False of a tied output embedding."""
        if self.is_tied and name == OUTPUT_EMBEDDING:
            return False
        if name not in self.shapes:
            raise ValueError(f"weight {name!r} is not in the model's checkpoint; are these Hugging Face names?")
        if name in seen:
            raise ValueError(f"weight {name!r} was given twice")
        if tuple(shape) != self.shapes[name]:
            raise ValueError(
                f"weight {name!r} has shape {tuple(shape)}, the model's checkpoint has {self.shapes[name]}; "
                "was padding of the vocabulary or a tensor-parallel shard left in?"
            )
        seen.add(name)
        return True

    def _check_complete(self, seen: set[str]) -> None:
        missing = sorted(self.shapes.keys() - seen)
        if missing:
            names = ", ".join(missing[:5]) + (", …" if len(missing) > 5 else "")
            raise ValueError(f"{len(missing)} of {len(self.shapes)} weights are missing from the update: {names}")


def _is_tied(config: Mapping[str, Any]) -> bool:
    """Whether a config.json means that the embeddings are one; Gemma's leaves it out, and Transformers' default is."""
    if "tie_word_embeddings" in config:
        return bool(config["tie_word_embeddings"])
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type")
    return kind in CONFIG_MAPPING and bool(CONFIG_MAPPING[kind]().tie_word_embeddings)


class SourceCheck:
    """Checks the weights of each update; whole ones once, for as long as they are the same object.

    Args:
        layout: What a complete set of weights is.
    """

    def __init__(self, layout: CheckpointLayout) -> None:
        self._layout = layout
        self._last: tuple[weakref.ref[WeightViews], WeightSource] | None = None

    def __call__(self, source: WeightSource) -> WeightSource:
        """Return the same weights, checked: whole ones now, others as they are taken.

        Raises:
            ValueError: As `CheckpointLayout.check_source`.
        """
        if source.whole is None:
            return self._layout.check_source(source)
        if self._last is None or self._last[0]() is not source.whole:
            self._last = weakref.ref(source.whole), self._layout.check_source(source)
        return self._last[1]
