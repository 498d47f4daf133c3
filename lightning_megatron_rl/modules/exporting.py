"""How a policy's weights leave the trainer: to an engine, as a Hugging Face directory, as an adapter."""

import weakref
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_megatron_rl.data.packing import TokenSequence
from lightning_megatron_rl.modules.training import TrainingSettings
from lightning_megatron_rl.weights.source import WeightSource

if TYPE_CHECKING:
    from lightning_megatron_rl.models.hf.model import HFModel
    from lightning_megatron_rl.strategy.megatron import MegatronStrategy
    from lightning_megatron_rl.weights.export_views import ExportViews
    from lightning_megatron_rl.weights.sharded_views import ShardedViews


class ExportsWeights(pl.LightningModule):
    """A module whose `model` holds the chunks of a Hugging Face model, with adapters or without."""

    model: nn.ModuleList
    train_settings: TrainingSettings
    temperature: float = 1.0  # of the distribution that is scored: logits are divided by it in every pass
    # with its chunks: an address may be another chunk's later, on one rank and not on the next
    _planned_views: "tuple[list[weakref.ref[nn.Module]], ExportViews | ShardedViews | None] | None" = None
    exports_classifier: bool = False  # whether exports are Transformers' sequence classifiers, else language models

    @property
    @abstractmethod
    def hf_model(self) -> "HFModel":
        """The Hugging Face side of the model: config, tokenizer, conversion."""

    @property
    @abstractmethod
    def strategy(self) -> "MegatronStrategy":
        """The Trainer's strategy."""

    @abstractmethod
    def export_outputs(self, sequences: list[TokenSequence]) -> list[Tensor]:
        """Return per sequence what an export, loaded back, must compute as well; a collective."""

    def export_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield the policy's weights under Hugging Face names in `dtype` (default: the checkpoint's); a collective."""
        self.strategy.gather_parameters()
        return self.hf_model.export_weights(list(self.model), dtype)

    def weights_to_push(self) -> WeightSource:
        """Return the policy's weights for an engine, which takes them in any precision: in that of training.

        Where this rank has the whole model, views of its parameters; otherwise a push that all ranks take part in.
        Both are planned at the first call, a collective of the world; what cannot be planned, and adapters, come as
        `export_weights` yields them. Biases that balance experts are in fp32 in any case.
        """
        self.strategy.gather_parameters()
        chunks = list(self.model)
        views = None if self.train_settings.lora is not None else self._plan_views(chunks)
        if views is None:
            exported = self.hf_model.export_weights(chunks, self.strategy.precision_plugin.params_dtype)
            return WeightSource.streamed(exported, next(self.model.parameters()).device)
        return views.weights(stays="parameters" not in self.strategy.offloads)

    def _plan_views(self, chunks: list[nn.Module]) -> "ExportViews | ShardedViews | None":
        """Return the plan of these chunks, made once; None if there can be none."""
        planned = self._planned_views
        if planned is None or [chunk() for chunk in planned[0]] != chunks:
            whole = self.strategy.layout.is_whole
            plan = self.hf_model.plan_export_views if whole else self.hf_model.plan_sharded_views
            planned = self._planned_views = ([weakref.ref(chunk) for chunk in chunks], plan(chunks))
        return planned[1]

    def teardown(self, stage: str) -> None:
        """Give the memory of pushes back; the plan stays."""
        super().teardown(stage)
        if self._planned_views is not None and self._planned_views[1] is not None:
            self._planned_views[1].let_go()

    def save_pretrained(self, directory: Path, max_shard_size: int = 5_000_000_000) -> None:
        """Write the policy as a Hugging Face directory, adapters merged; a collective of all ranks.

        Args:
            directory: New, or empty.
            max_shard_size: Of a file of weights, in bytes.
        """
        self.strategy.gather_parameters()
        self.hf_model.save_pretrained(list(self.model), directory, max_shard_size=max_shard_size)

    def export_differences(self, directory: Path) -> list[str]:
        """Return how the tensors of a directory differ from what `save_pretrained` would write now; a collective."""
        self.strategy.gather_parameters()
        return self.hf_model.differences(list(self.model), directory)

    def adapter_differences(self, directory: Path) -> list[str]:
        """Return how the adapters of a directory differ from what `save_adapter` would write now; a collective."""
        self.strategy.gather_parameters()
        return self.hf_model.adapter_differences(list(self.model), directory)

    def save_adapter(self, directory: Path) -> None:
        """Write the adapters in PEFT's format; a collective of all ranks.

        Raises:
            ValueError: The policy has none, or the directory cannot be written.
        """
        if self.train_settings.lora is None:
            raise ValueError(
                f"{type(self).__name__}(train.lora=None) has no adapters: save_pretrained writes its weights."
            )
        self.strategy.gather_parameters()
        self.hf_model.save_adapter(list(self.model), directory, self.train_settings.lora)

    def to_onnx(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: the chunks are parts of a model.

        Raises:
            ValueError: Always, with what to do in its place.
        """
        raise ValueError(
            f"{type(self).__name__} holds this rank's part of a model, without a forward pass of its own: to_onnx,"
            " to_torchscript and to_tensorrt convert a whole one. Export it with the HFExport callback or"
            " module.save_pretrained(directory), and convert that."
        )

    to_torchscript = to_tensorrt = to_onnx

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> "ExportsWeights":
        """Refuse: a checkpoint is a directory of shards that only a Trainer with process groups can read.

        Raises:
            ValueError: Always, with what to do in its place.
        """
        raise ValueError(
            f"{cls.__name__}.load_from_checkpoint({str(checkpoint_path)!r}): a checkpoint of MegatronStrategy is a"
            " directory of shards, which a Trainer reads: Trainer.fit(module, ckpt_path=...), and so validate, test and"
            " predict. To load the weights elsewhere, export them with the HFExport callback or"
            f" module.save_pretrained(directory), then {cls.__name__}(model=directory) or from_pretrained."
        )
