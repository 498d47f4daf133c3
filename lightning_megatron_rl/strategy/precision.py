"""The Trainer's `precision=` in Megatron's terms: Megatron's own modules own the dtypes, there is no autocast."""

from typing import Literal

import torch
from lightning.fabric.utilities.types import Steppable
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType

from lightning_megatron_rl.strategy.optimizer import MegatronOptimizer


class MegatronPrecision(Precision):
    """Which dtype parameters and main parameters have, and clipping through Megatron's own optimizer.

    Args:
        precision: ``"32-true"``: everything in fp32. ``"bf16-mixed"``: parameters and activations in bf16, main
            parameters, gradients and optimizer state in fp32.
    """

    def __init__(self, precision: Literal["32-true", "bf16-mixed"] = "32-true") -> None:
        self.precision = precision  # type: ignore[assignment]

    @classmethod
    def from_lightning(cls, plugin: Precision) -> "MegatronPrecision":
        """Translate the plugin that the Trainer made from its `precision` argument.

        Raises:
            ValueError: A precision that this strategy does not run, naming those it does.
        """
        if isinstance(plugin, cls):
            return plugin
        if type(plugin) is Precision:
            return cls("32-true")
        if isinstance(plugin, MixedPrecision) and plugin.precision == "bf16-mixed":
            return cls("bf16-mixed")
        raise ValueError(
            f"precision={plugin.precision!r} ({type(plugin).__name__}) is not supported by MegatronStrategy:"
            " use precision='32-true' or 'bf16-mixed'."
        )

    @property
    def params_dtype(self) -> torch.dtype:
        """Dtype of the parameters and activations."""
        return torch.bfloat16 if self.precision == "bf16-mixed" else torch.float32

    @property
    def is_mixed(self) -> bool:
        """Whether the optimizer keeps fp32 main parameters beside the model's own."""
        return self.precision == "bf16-mixed"

    def clip_gradients(
        self,
        optimizer: Steppable,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Hand the threshold to Megatron, which clips by the global norm inside its step.

        Raises:
            ValueError: Clipping by value, which Megatron's optimizer does not do.
        """
        if gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            raise ValueError(
                "gradient_clip_algorithm='value': Megatron's optimizer clips by the global norm only."
                " Remove gradient_clip_algorithm or set it to 'norm'."
            )
        assert isinstance(optimizer, MegatronOptimizer)
        optimizer.set_clip_grad(float(clip_val))
