"""Output of system commands; imports the standard library only."""

import subprocess
from collections.abc import Sequence

COMMAND_TIMEOUT_S = 30.0


def capture(command: Sequence[str]) -> str | None:
    """Return what `command` prints, None if it cannot be run, fails or takes too long."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
