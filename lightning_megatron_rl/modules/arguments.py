"""What a module that samples is given from Python: settings and an engine are objects, where YAML has mappings."""

from collections.abc import Mapping
from typing import Any

from lightning_megatron_rl.environments.base import EpisodeSettings
from lightning_megatron_rl.modules.dynamic_sampling import DynamicSampling
from lightning_megatron_rl.modules.evaluation import EvaluationSettings
from lightning_megatron_rl.modules.grpo_config import GRPOLossConfig
from lightning_megatron_rl.modules.reference import ReferenceSettings
from lightning_megatron_rl.modules.shaping import OverlongSettings
from lightning_megatron_rl.modules.streaming import StreamingSettings
from lightning_megatron_rl.rollout.protocol import SamplingParams
from lightning_megatron_rl.utilities.kinds import check_kinds

_KINDS: dict[str, type] = {
    "episodes": EpisodeSettings,
    "sampling": SamplingParams,
    "validation_sampling": SamplingParams,
    "loss": GRPOLossConfig,
    "reference": ReferenceSettings,
    "overlong": OverlongSettings,
    "dynamic_sampling": DynamicSampling,
    "streaming": StreamingSettings,
    "evaluation": EvaluationSettings,
}


def check_arguments(owner: str, arguments: Mapping[str, Any]) -> None:
    """Refuse settings of another class, such as a dict, and an engine that is none.

    Raises:
        TypeError: With the argument and what to give.
    """
    check_kinds(_KINDS, arguments, owner)
    engine = arguments["engine"]
    if engine is None:
        return
    if isinstance(engine, type) or not callable(getattr(engine, "generate", None)):
        raise TypeError(
            f"{owner}: engine={engine!r} is no rollout engine: give an object of one, such as"
            " VLLMEngine(max_model_len=2048)."
        )
