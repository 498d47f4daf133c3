"""Sampling from the policy: the engine protocol, and vLLM as an engine."""

from lightning_megatron_rl.rollout.protocol import (
    Generation,
    GenerationRequest,
    RolloutEngine,
    SamplingParams,
    derive_seed,
)
from lightning_megatron_rl.rollout.vllm.engine import VLLMEngine
from lightning_megatron_rl.rollout.vllm.process import EngineCallError, EngineDiedError, EngineTimeoutError

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
