"""`TrainingSettings`: how a model is built and trained, the same for every module."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, Optional

from lightning.pytorch.cli import LRSchedulerCallable

from lightning_megatron_rl.models.layers.lora import LoRASettings
from lightning_megatron_rl.models.layers.moe import MoESettings
from lightning_megatron_rl.models.verification.verify import VerifyModel, check_mode
from lightning_megatron_rl.strategy.megatron_configs import check_optimizer_numbers
from lightning_megatron_rl.utilities.ranges import COUNT, check_ranges

if TYPE_CHECKING:
    from megatron.core.optimizer import OptimizerConfig

_TOKENS = COUNT.called("it is a number of tokens")


@dataclass(frozen=True)
class TrainingSettings:
    """How a module builds and trains its model; the argument `train` of every module.

    Args:
        optimizer: Megatron's own `OptimizerConfig` (lr, weight_decay, adam_beta2, ...).
        lr_scheduler: Called with the optimizer; stepped once per `global_step`.
        max_tokens_per_microbatch: Token budget of one micro-batch, padding included.
        packing: Lay sequences end to end in a micro-batch instead of padding each to the longest.
        layer_backend: "auto", "torch" or "transformer_engine"; auto takes TransformerEngine on CUDA if installed.
        model_config: Overrides of Megatron's `TransformerConfig`, e.g. ``{"recompute_granularity": "full"}``.
        verify_model: "auto" compares a miniature of the model with Transformers unless a shipped proof covers it,
            "always" does so anyway, "never" refuses models without a proof; docs/models.md.
        logprob_chunk_size: Tokens whose logits exist at one time; a reward model has none.
        moe: How the routers of a mixture-of-experts model are trained.
        lora: Train low-rank adapters and leave the model's own weights as they are.

    Raises:
        ValueError: A number out of range, an unknown `verify_model`, or a `model_config` that is no mapping.
    """

    optimizer: Optional["OptimizerConfig"] = None
    lr_scheduler: LRSchedulerCallable | None = None
    max_tokens_per_microbatch: int = 8192
    packing: bool = True
    layer_backend: Literal["auto", "torch", "transformer_engine"] = "auto"
    model_config: dict[str, Any] = field(default_factory=dict)
    verify_model: VerifyModel = "auto"
    logprob_chunk_size: int = 2048
    moe: MoESettings | None = None
    lora: LoRASettings | None = None

    def __post_init__(self) -> None:
        check_ranges({"max_tokens_per_microbatch": _TOKENS, "logprob_chunk_size": _TOKENS}, vars(self), "train.")
        check_optimizer_numbers(self.optimizer, "train.optimizer.")
        check_mode(self.verify_model)
        if not isinstance(self.model_config, Mapping):
            raise ValueError(
                f"train.model_config: {self.model_config!r} is no mapping of fields to values; {{}} changes none"
            )


MOVED = {name: f"train.{name}" for name in signature(TrainingSettings).parameters}
"""Arguments of modules of 0.1 and their place today."""


def describe_moved(names: Iterable[str]) -> str:
    """Return for each old argument of modules among `names` a sentence with its new place."""
    return " ".join(f"`{name}` is now `{MOVED[name]}`." for name in names if name in MOVED)


class RefusesMovedArguments:
    """Answers an old flat argument of a module with its new place, where Python would only call it unexpected."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        moved = describe_moved(kwargs.keys() - signature(cls.__init__).parameters.keys())
        if moved:
            raise TypeError(f"{cls.__name__}: {moved} Give {cls.__name__}(..., train=TrainingSettings(...)).")
        return super().__new__(cls)
