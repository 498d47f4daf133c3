"""Warm gloo workers for the suite: those that `verify-layout` runs its layouts on."""

from pathlib import Path

from lightning_megatron_rl.verify.pool import WorkerError, WorkerPool, free_port

ROOT = Path(__file__).resolve().parents[1]

__all__ = ["ROOT", "WorkerError", "WorkerPool", "free_port"]
