"""`ValueModel`: a Hugging Face checkpoint and its Megatron twin with a value head: reward models and critics."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron_rl.models.families.registry import FAMILIES
from lightning_megatron_rl.models.hf.check import check_weights
from lightning_megatron_rl.models.hf.model import HFModel
from lightning_megatron_rl.models.layers.value_head import new_weight, put_value_head, untie_output_layer
from lightning_megatron_rl.utilities.finite import describe_nonfinite, nonfinite_names, not_finite

HEAD = "score.weight"  # in checkpoints of AutoModelForSequenceClassification
_OUTPUT_LAYER = "output_layer."


class ValueModel(HFModel):
    """A language model, or a sequence classifier with one label, whose Megatron twin gives one value per token.

    A language model gets a new head; its output layer is not used. Exports load in Transformers'
    `AutoModelForSequenceClassification`, whose score is the value of the last token that is not padding.

    Raises:
        ValueError: As `HFModel`; or a classifier with several labels.

    Example:
        ``ValueModel("Qwen/Qwen3-0.6B")``, or the directory that a `RewardModule` was exported to.
    """

    def _read_config(self) -> Any:
        config = super()._read_config()
        family = FAMILIES.get(config.model_type)
        if family is not None and config.architectures == [_classifier(config)]:
            if config.num_labels != 1:
                raise ValueError(
                    f"model {self.name_or_path!r} is a classifier with num_labels={config.num_labels}: a reward model"
                    " or critic has one label, its score"
                )
            config.architectures = [family.architecture]
        return config

    def _check_weights(self) -> None:
        check_weights(self.path, self.config, head=HEAD)

    @property
    def export_config(self) -> Any:
        """The config of a sequence classifier with one label."""
        config = copy.deepcopy(self.config)
        config.architectures = [_classifier(config)]
        config.num_labels = 1
        config.pad_token_id = self.pad_token_id
        return config

    @property
    def pad_token_id(self) -> int | None:
        """The token that Transformers' classifiers skip at the end of a sequence; None if the checkpoint has none."""
        if self.config.pad_token_id is not None:
            return int(self.config.pad_token_id)
        return self.tokenizer.pad_token_id

    def build_chunks(self, **options: Any) -> list[Any]:
        """Build this rank's chunks as `HFModel.build_chunks` does, the last with the checkpoint's head or a new one."""
        chunks = super().build_chunks(**options)
        weight = self._head_weight(options.get("load_weights", True), options["params_dtype"])
        for chunk in chunks:
            untie_output_layer(chunk)
            if chunk.post_process:
                put_value_head(chunk, weight)
        return chunks

    def _head_weight(self, load_weights: bool, dtype: torch.dtype) -> Tensor:
        """The head's weight, read on every rank, so that all of them refuse one that is not finite in `dtype`."""
        state = self._bridge.hf_pretrained.state
        if not load_weights or HEAD not in state.source.get_all_keys():
            return new_weight(self.config.hidden_size)
        weight: Tensor = state[HEAD].to(dtype)
        if nonfinite_names([(HEAD, weight)]):
            raise ValueError(f"checkpoint {self.path}: {not_finite([f'{HEAD} has {describe_nonfinite(weight)}'])}")
        return weight

    def _is_loaded(self, name: str) -> bool:
        return not name.startswith(_OUTPUT_LAYER)

    def conversion_tasks(self, chunks: list[Any]) -> list[Any]:
        """Return Megatron-Bridge's plan for each weight but the head's."""
        tasks = super().conversion_tasks(chunks)  # None for the head where the family has no output layer of its own
        return [task for task in tasks if task is not None and self._is_loaded(task.global_param_name)]

    def export_weights(
        self, chunks: list[Any], dtype: torch.dtype | None = None, tasks: Sequence[Any] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight as `HFModel.export_weights` does, and then the head; a collective of all ranks."""
        yield from super().export_weights(chunks, dtype, tasks)
        yield HEAD, self._whole_head(chunks).to(dtype or self.dtype)

    @torch.no_grad()
    def _whole_head(self, chunks: list[Any]) -> Tensor:
        """The head's weight on every rank of the pipeline."""
        from megatron.core import parallel_state
        from megatron.core.utils import unwrap_model

        last = unwrap_model(chunks[-1])
        reference = next(last.parameters())
        weight = torch.empty(1, self.config.hidden_size, dtype=reference.dtype, device=reference.device)
        if last.post_process:
            weight.copy_(last.output_layer.weight)
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            dist.broadcast(
                weight,
                src=parallel_state.get_pipeline_model_parallel_last_rank(),
                group=parallel_state.get_pipeline_model_parallel_group(),
            )
        return weight


def _classifier(config: Any) -> str:
    """Name of Transformers' sequence classifier of the config's family; raises `ValueError` where it has none."""
    from transformers.models.auto import modeling_auto

    names = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    if config.model_type not in names:
        raise ValueError(
            f"a critic or reward model of type {config.model_type!r} is not supported: Transformers has no sequence"
            " classifier for it, as which value models are stored. Take a model of another family, such as Qwen3"
        )
    return str(names[config.model_type])
