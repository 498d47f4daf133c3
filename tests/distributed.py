"""Warm gloo workers for the suite: those that `verify-layout` runs its layouts on."""

import os
from pathlib import Path

from lightning_megatron_rl.verify.pool import WorkerError, WorkerPool, free_port

ROOT = Path(__file__).resolve().parents[1]
STARTUP = str(ROOT / "tests" / "startup")  # its sitecustomize.py is read by every process that has it on PYTHONPATH
CHILD_PATH = os.pathsep.join([STARTUP, str(ROOT)])  # PYTHONPATH of what tests start

__all__ = ["CHILD_PATH", "ROOT", "STARTUP", "WorkerError", "WorkerPool", "free_port"]
