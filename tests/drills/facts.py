"""What a drill's report says of the machine and of the programs."""

import os
import platform
import time
from importlib.metadata import version
from typing import Any

PACKAGES = ("torch", "lightning", "megatron-core", "megatron-bridge")


def facts(drill: str) -> dict[str, Any]:
    """Return command, device, versions and date of ``python -m tests.drills.<drill>``."""
    return {
        "command": f"python -m tests.drills.{drill}",
        "device": f"CPU, {platform.machine()}",
        "cpu_cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "date": time.strftime("%Y-%m-%d"),
    }
