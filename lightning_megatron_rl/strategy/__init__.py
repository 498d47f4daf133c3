"""The Lightning strategy that runs on Megatron-core."""

from lightning_megatron_rl.parallel.layout import ParallelLayout
from lightning_megatron_rl.strategy.megatron import MegatronStrategy

__all__ = ["MegatronStrategy", "ParallelLayout"]
