"""`TrainingSettings`: how a model is built and trained, the same for every module."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, Optional

from lightning.pytorch.cli import LRSchedulerCallable

from lightning_megatron_rl.models.layers.lora import LoRASettings
from lightning_megatron_rl.models.layers.moe import MoESettings
from lightning_megatron_rl.models.verification.verify import VerifyModel, check_mode
from lightning_megatron_rl.planner.budget import WITHOUT_GPU
from lightning_megatron_rl.strategy.megatron_configs import check_optimizer_numbers
from lightning_megatron_rl.utilities.kinds import check_kinds
from lightning_megatron_rl.utilities.ranges import COUNT, check_ranges

if TYPE_CHECKING:
    from megatron.core.optimizer import OptimizerConfig

AUTO = "auto"
FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
Recompute = Literal["none", "full", "auto"] | int
_WORDS = ("none", "full", AUTO)
_TOKENS = COUNT.called("it is a number of tokens")
_BUDGET = COUNT.called('it is a number of tokens, or "auto"')


@dataclass(frozen=True)
class TrainingSettings:
    """How a module builds and trains its model; the argument `train` of every module.

    Args:
        optimizer: Megatron's own `OptimizerConfig` (lr, weight_decay, adam_beta2, ...).
        lr_scheduler: Called with the optimizer; stepped once per `global_step`. `ReduceLROnPlateau` is refused.
        max_tokens_per_microbatch: Token budget of one micro-batch, padding included; "auto" takes the one with which
            the planner expects the fastest update of those that fit the GPU (docs/planning.md).
        packing: Lay sequences end to end in a micro-batch instead of padding each to the longest.
        layer_backend: "auto", "torch" or "transformer_engine"; auto takes TransformerEngine on CUDA if installed.
        recompute: "full" computes the activations of all layers again in the backward pass, a number those of so many
            layers of each pipeline stage (of each of its chunks); "auto" takes what the planner expects the fastest
            update from; "none" leaves it to `model_config`.
        model_config: Overrides of Megatron's `TransformerConfig`, e.g. ``{"moe_grouped_gemm": True}``.
        verify_model: "auto" compares a miniature of the model with Transformers unless a shipped proof covers it,
            "always" does so anyway, "never" refuses models without a proof; docs/models.md.
        logprob_chunk_size: Tokens whose logits exist at one time; a reward model has none. Logits of a
            micro-batch with no more tokens are kept for its backward pass; others are made again there.
        moe: How the routers of a mixture-of-experts model are trained.
        lora: Train low-rank adapters and leave the model's own weights as they are.

    Raises:
        ValueError: A number out of range, an unknown word, a `model_config` that is no mapping, or one that says
            something else of recomputation.
    """

    optimizer: Optional["OptimizerConfig"] = None
    lr_scheduler: LRSchedulerCallable | None = None
    max_tokens_per_microbatch: int | Literal["auto"] = 8192
    recompute: Recompute = "none"
    packing: bool = True
    layer_backend: Literal["auto", "torch", "transformer_engine"] = "auto"
    model_config: dict[str, Any] = field(default_factory=dict)
    verify_model: VerifyModel = "auto"
    logprob_chunk_size: int = 2048
    moe: MoESettings | None = None
    lora: LoRASettings | None = None

    def __post_init__(self) -> None:
        numbers = {"max_tokens_per_microbatch": _BUDGET, "logprob_chunk_size": _TOKENS}
        if self.max_tokens_per_microbatch == AUTO:
            del numbers["max_tokens_per_microbatch"]
        check_ranges(numbers, vars(self), "train.")
        check_kinds({"moe": MoESettings, "lora": LoRASettings}, vars(self), "train")
        check_optimizer_numbers(self.optimizer, "train.optimizer.")
        if self.lr_scheduler is not None and not callable(self.lr_scheduler):
            raise ValueError(
                f"train.lr_scheduler={self.lr_scheduler!r} cannot be called with the optimizer: give a function that"
                " makes the scheduler, such as functools.partial(torch.optim.lr_scheduler.LinearLR, total_iters=20)"
            )
        check_mode(self.verify_model)
        if not isinstance(self.model_config, Mapping):
            raise ValueError(
                f"train.model_config: {self.model_config!r} is no mapping of fields to values; {{}} changes none"
            )
        is_count = isinstance(self.recompute, int) and not isinstance(self.recompute, bool)
        if not (self.recompute >= 1 if is_count else self.recompute in _WORDS):  # type: ignore[operator]
            raise ValueError(
                f"train.recompute={self.recompute!r}: choose one of {', '.join(_WORDS)}, or a number of layers of each"
                " pipeline stage, at least 1"
            )
        if self.recompute != "none":
            fields = {name: value for name, value in self.model_config.items() if name.startswith("recompute_")}
            if fields and (self.recompute == AUTO or fields != self._recompute_fields):
                raise ValueError(
                    f"train.recompute={self.recompute!r} with train.model_config={fields}: both say what is"
                    " recomputed; leave one of them out"
                )
        object.__setattr__(self, "model_config", {**self.model_config, **self._recompute_fields})

    @property
    def _recompute_fields(self) -> dict[str, Any]:
        """What `recompute` says in Megatron's terms."""
        if isinstance(self.recompute, int):
            return {**FULL_RECOMPUTE, "recompute_method": "block", "recompute_num_layers": self.recompute}
        return FULL_RECOMPUTE if self.recompute == "full" else {}

    @property
    def is_open(self) -> bool:
        """Whether the planner has to choose something."""
        return AUTO in (self.max_tokens_per_microbatch, self.recompute)

    @property
    def token_budget(self) -> int:
        """Tokens of one micro-batch; where nothing was planned, those of a run on a CPU."""
        tokens = self.max_tokens_per_microbatch
        return tokens if isinstance(tokens, int) else WITHOUT_GPU

    @property
    def is_fp8(self) -> bool:
        """Whether layers compute in fp8, which asks for more of micro-batches."""
        return bool(self.model_config.get("fp8"))

    def recomputed(self, layers: int) -> float:
        """Return the share of the layers of a pipeline stage (of one of its chunks) that are computed again.

        Example:
            Of 12 layers: ``TrainingSettings(recompute=3).recomputed(12) == 0.25``
        """
        fields = self.model_config
        if fields.get("recompute_granularity") != "full":
            return 0.0
        count = fields.get("recompute_num_layers") if fields.get("recompute_method") == "block" else layers
        return min(1.0, count / layers) if isinstance(count, int) else 1.0  # what is incomplete is refused later

    def settle(self, tokens: int, *, recompute: Recompute) -> "TrainingSettings":
        """Return these settings with what is chosen in the place of "auto"."""
        chosen = self
        if self.max_tokens_per_microbatch == AUTO:
            chosen = replace(chosen, max_tokens_per_microbatch=tokens)
        if self.recompute == AUTO:
            chosen = replace(chosen, recompute=recompute)
        return chosen

    def describe_microbatch(self) -> tuple[str, str]:
        """Return a row for the table at start: the token budget."""
        layout = "packed" if self.packing else "padded"
        return "tokens per micro-batch", f"at most {self.token_budget}, {layout}"


MOVED = {name: f"train.{name}" for name in signature(TrainingSettings).parameters}
"""Arguments of modules of 0.1 and their place today."""


def describe_moved(names: Iterable[str]) -> str:
    """Return for each old argument of modules among `names` a sentence with its new place."""
    return " ".join(f"`{name}` is now `{MOVED[name]}`." for name in names if name in MOVED)


class RefusesMovedArguments:
    """Answers an old flat argument of a module with its new place, where Python would only call it unexpected.

    It stands behind a module's other bases: the signature of a class is that of the `__new__` or `__init__` before it.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        moved = describe_moved(kwargs.keys() - signature(cls.__init__).parameters.keys())
        if moved:
            raise TypeError(f"{cls.__name__}: {moved} Give {cls.__name__}(..., train=TrainingSettings(...)).")
        return super().__new__(cls)
