"""The Trainer's `precision=` in Megatron's terms: Megatron's own modules own the dtypes, there is no autocast."""

from typing import Literal, get_args

import torch
from lightning.fabric.utilities.types import Steppable
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType

from lightning_megatron_rl.strategy.optimizer import MegatronOptimizer

PrecisionName = Literal["32-true", "bf16-mixed", "bf16-true", "16-mixed"]
_PARAMS_DTYPES = {
    "32-true": torch.float32,
    "bf16-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
    "16-mixed": torch.float16,
}
CLIPS_BY_NORM = (
    "gradient_clip_algorithm='value': Megatron's optimizer clips by the global norm only. Remove"
    " gradient_clip_algorithm or set it to 'norm'."
)


class MegatronPrecision(Precision):
    """Which dtype parameters and main parameters have, and clipping through Megatron's own optimizer.

    Args:
        precision: ``"32-true"``: everything in fp32. ``"bf16-mixed"``: parameters and activations in bf16, main
            parameters, gradients and optimizer state in fp32. ``"16-mixed"``: the same with fp16, and a dynamic loss
            scale. ``"bf16-true"``: parameters, gradients and optimizer state all in bf16.

    Raises:
        ValueError: Another precision.

    Example:
        ``Trainer(strategy=MegatronStrategy(), precision="bf16-mixed")`` makes it; on a CPU, where Lightning turns
        ``"16-mixed"`` into ``"bf16-mixed"``, fp16 is ``Trainer(plugins=MegatronPrecision("16-mixed"))``.
    """

    def __init__(self, precision: PrecisionName = "32-true") -> None:
        if precision not in _PARAMS_DTYPES:
            raise _unsupported(precision, type(self).__name__)
        self.precision = precision  # type: ignore[assignment]

    @classmethod
    def from_lightning(cls, plugin: Precision) -> "MegatronPrecision":
        """Translate the plugin that the Trainer made from its `precision` argument.

        Lightning's gradient scaler for fp16 is not used: Megatron's optimizer has one, which knows its gradients.

        Raises:
            ValueError: A precision that this strategy does not run, naming those it does.
        """
        if isinstance(plugin, cls):
            return plugin
        if type(plugin) in (Precision, MixedPrecision, HalfPrecision) and plugin.precision in _PARAMS_DTYPES:
            return cls(plugin.precision)  # type: ignore[arg-type]
        raise _unsupported(plugin.precision, type(plugin).__name__)

    @property
    def params_dtype(self) -> torch.dtype:
        """Dtype of the parameters and activations."""
        return _PARAMS_DTYPES[self.precision]

    @property
    def is_16bit(self) -> bool:
        """Whether parameters and activations are in a 16-bit format."""
        return self.params_dtype != torch.float32

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
            raise ValueError(CLIPS_BY_NORM)
        assert isinstance(optimizer, MegatronOptimizer)
        optimizer.set_clip_grad(float(clip_val))


def _unsupported(precision: str, plugin: str) -> ValueError:
    *others, last = (repr(name) for name in get_args(PrecisionName))
    return ValueError(
        f"precision={precision!r} ({plugin}) is not supported by MegatronStrategy: use precision={', '.join(others)} or"
        f" {last}."
    )
