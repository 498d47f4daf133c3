"""Training of routers in a mixture of experts: settings, their checks, and the formulas of balance."""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_megatron_rl.models.families.registry import FAMILIES
from lightning_megatron_rl.utilities.ranges import NOT_NEGATIVE, check_ranges, check_words

RouterDtype = Literal["fp32", "fp64"]
RouterReplay = Literal["none", "R2"]

# Fields of Megatron's `TransformerConfig` that follow from `MoESettings` -> the setting.
_DECIDED_HERE = {
    "moe_aux_loss_coeff": "aux_loss_coeff",
    "moe_router_load_balancing_type": "aux_loss_coeff",
    "moe_z_loss_coeff": "z_loss_coeff",
    "moe_router_dtype": "router_dtype",
    "moe_router_bias_update_rate": "expert_bias_update_rate",
    "moe_enable_routing_replay": "router_replay",
}


@dataclass
class MoESettings:
    """Training of the routers of a mixture-of-experts model. None of it is taken from the model's own files.

    Args:
        aux_loss_coeff: Weight of the load-balancing loss, docs/moe.md; not given: 0; 0.01 in `SFTModule` without LoRA.
        z_loss_coeff: Weight of the router z-loss.
        router_dtype: Precision of logits and routing weights; null computes in that of the activations.
        freeze_router: Do not train the routers' weights.
        expert_bias_update_rate: Step of the expert biases (models that have them) towards even load; 0 freezes them.
        router_replay: "R2" sends each token in the update to the experts of the pass for its old log-probs.

    Raises:
        ValueError: A negative coefficient or rate.
    """

    aux_loss_coeff: float | None = None
    z_loss_coeff: float = 0.0
    router_dtype: RouterDtype | None = "fp32"
    freeze_router: bool = False
    expert_bias_update_rate: float = 0.0
    router_replay: RouterReplay = "none"

    def __post_init__(self) -> None:
        names = ("aux_loss_coeff", "z_loss_coeff", "expert_bias_update_rate")
        check_ranges(dict.fromkeys(names, NOT_NEGATIVE.called("0 turns it off")), vars(self), "train.moe.")
        check_words({"router_replay": RouterReplay}, vars(self), "train.moe.")
        if self.router_dtype is not None:
            check_words({"router_dtype": RouterDtype}, vars(self), "train.moe.")

    def megatron_fields(self) -> dict[str, Any]:
        """Return the fields of Megatron's `TransformerConfig`; its own router losses are off, see `routers`."""
        values: dict[str, Any] = {
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_z_loss_coeff": None,
            "moe_router_dtype": self.router_dtype,
            "moe_router_bias_update_rate": self.expert_bias_update_rate,
        }
        if self.router_replay != "none":
            values |= {"moe_enable_routing_replay": True, "moe_router_fusion": False}
        return values

    def describe(self, *, has_expert_bias: bool, learns: bool = True) -> list[tuple[str, str]]:
        """Return rows for the table at start: everything in force; beside adapters no router learns."""
        if not has_expert_bias:
            bias = "no expert bias"
        elif self.expert_bias_update_rate:
            bias = f"expert bias updated by {self.expert_bias_update_rate:g} per step"
        else:
            bias = "expert bias frozen"
        state = "trained" if learns and not self.freeze_router else "frozen"
        return [
            ("router losses", f"aux_loss_coeff {self.aux_loss_coeff:g}, z_loss_coeff {self.z_loss_coeff:g}"),
            (
                "router",
                f"{state}, in {self.router_dtype or 'the precision of activations'}, {bias},"
                f" router_replay {self.router_replay}",
            ),
        ]


def resolve_moe_settings(
    settings: MoESettings | None,
    config: Any,
    model_config: dict[str, Any],
    *,
    default_aux_loss_coeff: float,
    has_old_logprobs: bool,
) -> MoESettings | None:
    """Return the settings in force for a model with experts, None for a dense one.

    Args:
        settings: What the user gave.
        config: The model's Hugging Face config.
        model_config: The user's overrides of Megatron's `TransformerConfig`.
        default_aux_loss_coeff: Of the training method.
        has_old_logprobs: Whether the method scores sequences before it updates on them.

    Raises:
        ValueError: A setting that the model, the method or another setting makes meaningless, with the remedy.
    """
    settings = settings or MoESettings()
    if FAMILIES[config.model_type].experts is None:
        _refuse_on_dense_model(settings, config.model_type)
        return None
    for name, setting in _DECIDED_HERE.items():
        if name in model_config:
            raise ValueError(
                f"train.model_config: {name}={model_config[name]!r}: routers have one place for their settings: set"
                f" train.moe.{setting} (MoESettings) in its place."
            )
    replaying = settings.router_replay != "none"
    if replaying and not has_old_logprobs:
        raise ValueError(
            f"train.moe.router_replay={settings.router_replay!r}: this method has no pass for old log-probs whose"
            " routing its update could replay: leave it at 'none'."
        )
    for name in ("moe_router_fusion", "overlap_moe_expert_parallel_comm"):
        if replaying and model_config.get(name):
            reason = {
                "moe_router_fusion": "the fused top-k chooses experts by itself and would ignore the replay in silence",
                "overlap_moe_expert_parallel_comm": "layers of two micro-batches take turns, and the replay would mix"
                " them up",
            }[name]
            raise ValueError(
                f"train.moe.router_replay={settings.router_replay!r} with train.model_config {name}=True: {reason}."
                f" Remove {name} or set router_replay='none'."
            )
    coeff = settings.aux_loss_coeff
    if settings.freeze_router:
        for name in ("aux_loss_coeff", "z_loss_coeff"):
            if getattr(settings, name):
                raise ValueError(
                    f"train.moe.freeze_router=True with train.moe.{name}={getattr(settings, name)}: the loss would act"
                    f" on a router that does not learn. Set {name}=0 or freeze_router=False."
                )
        coeff = 0.0
    return replace(settings, aux_loss_coeff=default_aux_loss_coeff if coeff is None else coeff)


def _refuse_on_dense_model(settings: MoESettings, model_type: str) -> None:
    """Refuse what was asked of the routers of a model that has none."""
    defaults = MoESettings()
    for field in fields(MoESettings):
        value = getattr(settings, field.name)
        if field.name != "router_dtype" and value and value != getattr(defaults, field.name):
            raise ValueError(
                f"moe.{field.name}={value!r}, but a {model_type} model is dense: it has no router and no experts."
                f" Remove moe.{field.name}."
            )


def balance_loss(chosen: Tensor, score_sums: Tensor, topk: int) -> Tensor:
    """Return the load-balancing loss ``E * sum_i f_i * P_i``, a scalar; 1 if load and scores are even.

    f_i is the fraction of choices that fell on expert i, P_i the mean score of expert i (Switch Transformer,
    arXiv:2101.03961, eq. 4-6, with K choices per token). No tokens give 0.

    Args:
        chosen: Tokens that have expert i among their best `topk`, ``[experts]``.
        score_sums: Sum of the normalised scores of expert i over the same tokens, ``[experts]``.
        topk: K.

    Example:
        ``balance_loss(tensor([2., 0.]), tensor([1.5, 0.5]), 1) == 1.5``: f = (1, 0), P = (0.75, 0.25).
    """
    tokens = (chosen.sum() / topk).clamp(min=1)
    return chosen.shape[-1] / (topk * tokens * tokens) * (chosen * score_sums).sum()


def z_loss(logits: Tensor, counted: Tensor) -> Tensor:
    """Return the sum over tokens of ``logsumexp(logits)**2`` (ST-MoE, arXiv:2202.08906, eq. 5), a scalar.

    Args:
        logits: ``[tokens, experts]``.
        counted: Tokens that are not padding, ``[tokens]`` bool.
    """
    return (torch.logsumexp(logits, dim=-1).square() * counted).sum()


def balance_metrics(routed: Tensor, chosen: Tensor, score_sums: Tensor, topk: int) -> dict[str, float]:
    """Return `moe/aux_loss` and `moe/load_imbalance`, means over the layers that saw tokens; see docs/metrics.md.

    Args:
        routed: Tokens that expert i of a layer got, ``[layers, experts]``.
        chosen: As in `balance_loss`, ``[layers, experts]``.
        score_sums: As in `balance_loss`, ``[layers, experts]``.
        topk: As in `balance_loss`.

    Example:
        Three tokens to one of two experts, one to the other: an imbalance of 3 / 2 = 1.5.
    """
    layers = [layer for layer in range(routed.shape[0]) if routed[layer].any()]
    if not layers:
        return {}
    imbalance = [(routed[layer].max() / routed[layer].mean()).item() for layer in layers]
    losses = [balance_loss(chosen[layer], score_sums[layer], topk).item() for layer in layers]
    return {"moe/aux_loss": sum(losses) / len(layers), "moe/load_imbalance": sum(imbalance) / len(layers)}
