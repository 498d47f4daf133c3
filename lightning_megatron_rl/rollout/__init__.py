"""Sampling from the policy: the engine protocol and vLLM behind it; nothing here knows a loss."""

from lightning_megatron_rl.rollout.engine import (
    Generation,
    GenerationRequest,
    RolloutEngine,
    SamplingParams,
    derive_seed,
)
from lightning_megatron_rl.rollout.process import EngineCallError, EngineDiedError, EngineTimeoutError
from lightning_megatron_rl.rollout.vllm import VLLMEngine

__all__ = [
    "EngineCallError",
    "EngineDiedError",
    "EngineTimeoutError",
    "Generation",
    "GenerationRequest",
    "RolloutEngine",
    "SamplingParams",
    "VLLMEngine",
    "derive_seed",
]
