"""Data: prompts for rollouts, sequences for fine-tuning, and their packing into micro-batches."""

from lightning_megatron_rl.data.arithmetic import ArithmeticRows, arithmetic_rows
from lightning_megatron_rl.data.packing import (
    MicroBatch,
    TokenSequence,
    make_microbatches,
    padding_fraction,
    plan_microbatches,
    scatter_to_sequences,
)
from lightning_megatron_rl.data.prompts import PromptDataModule
from lightning_megatron_rl.data.sft import SFTDataModule
from lightning_megatron_rl.data.sources import DataSource

__all__ = [
    "ArithmeticRows",
    "DataSource",
    "MicroBatch",
    "PromptDataModule",
    "SFTDataModule",
    "TokenSequence",
    "arithmetic_rows",
    "make_microbatches",
    "padding_fraction",
    "plan_microbatches",
    "scatter_to_sequences",
]
