"""What is to be converted: a Hugging Face model, or one of the models in a distributed checkpoint."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_megatron_rl.checkpoints.format import SHARDED
from lightning_megatron_rl.checkpoints.manifest import check_files, read_manifest
from lightning_megatron_rl.convert.stored import StoredTensors
from lightning_megatron_rl.models.hf.files import INDEX_FILE, check_settings, local_checkpoint, origin
from lightning_megatron_rl.models.hf.model import HFModel
from lightning_megatron_rl.models.layers.lora import LoRASettings
from lightning_megatron_rl.models.value_model import ValueModel

_LAST_NORM = "decoder.final_layernorm.weight"  # every model has one
_HEAD = "output_layer.weight"
_OPTIMIZER = "optimizer."  # begins the names of its state's tensors


def open_model(name_or_path: str) -> HFModel:
    """Return a Hugging Face model with its weights: a language model, or a classifier with one label.

    Raises:
        ValueError: There is no such model, or it cannot be trained here.
    """
    directory = local_checkpoint(name_or_path)
    architectures = json.loads((directory / "config.json").read_text()).get("architectures") or [""]
    kind = ValueModel if architectures[0].endswith("ForSequenceClassification") else HFModel
    return kind(name_or_path)


class _SettingsOnly(HFModel):
    """A Hugging Face model whose directory may lack the weights, but not their names."""

    def _find(self, name_or_path: str) -> Path:
        directory = Path(name_or_path).expanduser()
        if (directory / "config.json").is_file() and (directory / INDEX_FILE).is_file():
            check_settings(directory)
            return directory
        return super()._find(name_or_path)

    def _check_weights(self) -> None:
        """Nothing: its weights are the distributed checkpoint's."""


class _ValueSettingsOnly(_SettingsOnly, ValueModel):
    """The same of a model with a value head."""


@dataclass(frozen=True)
class StoredModel:
    """One of the models in a distributed checkpoint, with what its conversion needs."""

    path: Path  # the checkpoint
    description: dict[str, Any]  # of the checkpoint
    tensors: StoredTensors
    model: HFModel
    prefix: str  # of its tensors' names
    lora: LoRASettings | None
    has_value_head: bool

    @classmethod
    def find(
        cls,
        path: Path,
        *,
        part: str | None = None,
        model: str | None = None,
        verify: bool = True,
    ) -> "StoredModel":
        """Find a model in a checkpoint.

        Args:
            path: The checkpoint.
            part: Name of a model that was saved beside the trained one: "critic", "reference".
            model: Hugging Face model whose config and tokenizer it has; by default those that training saved with it.
            verify: Compare the checksums of its files, not only their sizes.

        Raises:
            ValueError: It is not there, is damaged, or nothing tells its config.
        """
        description = read_manifest(path)
        check_files(path, description, verify=verify)
        tensors = StoredTensors(path / SHARDED)
        prefix = "" if part is None else f"{part}."
        others = other_models(tensors)
        if part is not None and part not in others:
            raise ValueError(
                f"checkpoint {path} has no model {part!r} beside the trained one: it has {', '.join(others) or 'none'}."
            )
        identity = None if part is not None else description.get("trained_on_top_of")
        has_value_head = tensors.shapes.get(f"{prefix}{_HEAD}", (0,))[0] == 1
        saved = path / ("hf_critic" if part == "critic" else "hf")
        if identity is not None:
            found = _open_base(path, model or origin(saved), identity, has_value_head)
        elif model is None and not saved.is_dir():
            raise ValueError(
                f"checkpoint {path} has no {saved.name}/ with config and tokenizer (a module that is no ModelModule"
                " wrote it): give --model, the Hugging Face model that training started from."
            )
        else:
            kind = _ValueSettingsOnly if has_value_head else _SettingsOnly
            found = kind(model or str(saved))
        lora = None if identity is None else _adapter_settings(identity)
        return cls(path, description, tensors, found, prefix, lora, has_value_head)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the model's own tensors, without those of optimizers and of other models."""
        others = () if self.prefix else tuple(f"{name}." for name in other_models(self.tensors))
        return {
            key: shape
            for key, shape in self.tensors.shapes.items()
            if key.startswith(self.prefix) and not key.startswith((*others, _OPTIMIZER))
        }

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"{self.path}" + (f" ({self.prefix.rstrip('.')})" if self.prefix else "")


def other_models(tensors: StoredTensors) -> list[str]:
    """Return the names of models in a checkpoint that were saved beside the trained one."""
    found = [key.removesuffix(f".{_LAST_NORM}") for key in tensors.shapes if key.endswith(f".{_LAST_NORM}")]
    return sorted(name for name in found if not name.startswith(_OPTIMIZER))


def _open_base(path: Path, model: str | None, identity: dict[str, Any], has_head: bool) -> HFModel:
    """The model that a checkpoint's adapters are on."""
    if model is None:
        raise ValueError(
            f"checkpoint {path} holds adapters only, and does not say of which model: give it with --model."
        )
    try:
        base = (ValueModel if has_head else HFModel)(model)
    except ValueError as error:
        raise ValueError(f"checkpoint {path} holds adapters on {model!r}: {error}; or give it with --model.") from error
    if base.fingerprint != identity["base model"]:
        raise ValueError(
            f"checkpoint {path} holds adapters on other weights than those of {model!r} (their fingerprints are"
            f" {identity['base model'][:12]} and {base.fingerprint[:12]}): give the model that they were trained on"
            " with --model."
        )
    return base


def _adapter_settings(identity: dict[str, Any]) -> LoRASettings:
    return LoRASettings(
        rank=identity["lora.rank"], alpha=identity["lora.alpha"], target_modules=identity["lora.target_modules"]
    )


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
