"""Data: prompts for rollouts, sequences for fine-tuning, preference pairs, and their packing into micro-batches."""

from lightning_megatron_rl.data.arithmetic import ArithmeticPairs, ArithmeticRows, arithmetic_rows
from lightning_megatron_rl.data.packing import (
    MicroBatch,
    TokenSequence,
    context_parallel_share,
    make_microbatches,
    padding_fraction,
    scatter_to_sequences,
)
from lightning_megatron_rl.data.planning import MicroBatchRules, SequenceCost, plan_microbatches, plan_replicas
from lightning_megatron_rl.data.preference import PreferenceDataModule, PreferencePair
from lightning_megatron_rl.data.prompts import PromptDataModule
from lightning_megatron_rl.data.sft import SFTDataModule
from lightning_megatron_rl.data.sources import DataSource

__all__ = [
    "ArithmeticPairs",
    "ArithmeticRows",
    "DataSource",
    "MicroBatch",
    "MicroBatchRules",
    "PreferenceDataModule",
    "PreferencePair",
    "PromptDataModule",
    "SFTDataModule",
    "SequenceCost",
    "TokenSequence",
    "arithmetic_rows",
    "context_parallel_share",
    "make_microbatches",
    "padding_fraction",
    "plan_microbatches",
    "plan_replicas",
    "scatter_to_sequences",
]
