"""Warm gloo workers for the suite: those that `verify-layout` runs its layouts on."""

from lightning_megatron_rl.verify.pool import WorkerError, WorkerPool

__all__ = ["WorkerError", "WorkerPool"]
