"""Reinforcement-learning post-training at Megatron scale from a plain Lightning `Trainer`."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_megatron_rl.parallel.leader import watch
from lightning_megatron_rl.utilities.garbage import importing
from lightning_megatron_rl.utilities.versions import __version__ as __version__

if TYPE_CHECKING:
    from lightning_megatron_rl.callbacks.hf_export import HFExport as HFExport
    from lightning_megatron_rl.callbacks.memory_snapshot import MemorySnapshot as MemorySnapshot
    from lightning_megatron_rl.callbacks.rollout_samples import RolloutSamples as RolloutSamples
    from lightning_megatron_rl.callbacks.run_progress import RunProgress as RunProgress
    from lightning_megatron_rl.callbacks.timeline import Timeline as Timeline
    from lightning_megatron_rl.callbacks.weight_average import WeightAverage as WeightAverage
    from lightning_megatron_rl.callbacks.weight_sync import WeightSync as WeightSync
    from lightning_megatron_rl.data.preference import PreferenceDataModule as PreferenceDataModule
    from lightning_megatron_rl.data.prompts import PromptDataModule as PromptDataModule
    from lightning_megatron_rl.data.sft import SFTDataModule as SFTDataModule
    from lightning_megatron_rl.modules.dpo import DPOModule as DPOModule
    from lightning_megatron_rl.modules.grpo import GRPOModule as GRPOModule
    from lightning_megatron_rl.modules.policy import PolicyModule as PolicyModule
    from lightning_megatron_rl.modules.ppo import PPOModule as PPOModule
    from lightning_megatron_rl.modules.reward_model import RewardModule as RewardModule
    from lightning_megatron_rl.modules.sft import SFTModule as SFTModule
    from lightning_megatron_rl.modules.streaming import StreamingSettings as StreamingSettings
    from lightning_megatron_rl.modules.training import TrainingSettings as TrainingSettings
    from lightning_megatron_rl.rollout.replay import ReplayEngine as ReplayEngine
    from lightning_megatron_rl.rollout.vllm.colocated import ColocatedVLLMEngine as ColocatedVLLMEngine
    from lightning_megatron_rl.rollout.vllm.engine import VLLMEngine as VLLMEngine
    from lightning_megatron_rl.sample import Prompt as Prompt
    from lightning_megatron_rl.sample import Sample as Sample
    from lightning_megatron_rl.strategy.megatron import MegatronStrategy as MegatronStrategy
    from lightning_megatron_rl.verify.runner import verify_layouts as verify_layouts

_HOMES = {
    "ColocatedVLLMEngine": "rollout.vllm.colocated",
    "DPOModule": "modules.dpo",
    "GRPOModule": "modules.grpo",
    "HFExport": "callbacks.hf_export",
    "MegatronStrategy": "strategy.megatron",
    "MemorySnapshot": "callbacks.memory_snapshot",
    "PPOModule": "modules.ppo",
    "PolicyModule": "modules.policy",
    "PreferenceDataModule": "data.preference",
    "Prompt": "sample",
    "PromptDataModule": "data.prompts",
    "ReplayEngine": "rollout.replay",
    "RewardModule": "modules.reward_model",
    "RolloutSamples": "callbacks.rollout_samples",
    "RunProgress": "callbacks.run_progress",
    "SFTDataModule": "data.sft",
    "SFTModule": "modules.sft",
    "Sample": "sample",
    "StreamingSettings": "modules.streaming",
    "Timeline": "callbacks.timeline",
    "TrainingSettings": "modules.training",
    "VLLMEngine": "rollout.vllm.engine",
    "WeightAverage": "callbacks.weight_average",
    "WeightSync": "callbacks.weight_sync",
    "verify_layouts": "verify.runner",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    # importing the package stays cheap: torch, Lightning and Megatron come with the first name that needs them
    if name in _HOMES:
        with importing():
            _register_strategy()
            return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _register_strategy() -> None:
    """Let `Trainer(strategy="megatron")` know its strategy."""
    import_module(f"{__name__}.strategy.megatron")


# --help and the engine's process skip the seconds that importing Lightning takes; others get the strategy
if "lightning.pytorch" in sys.modules:
    with importing():
        _register_strategy()

watch()  # before the imports that take long
