"""How much memory a conversion takes."""

from pathlib import Path

_STATUS = Path("/proc/self/status")


def peak_memory_gb() -> float:
    """Return the most memory that this program has had in RAM, files that it has mapped included, in GB.

    `getrusage` would begin with the peak of the program that started this one.
    """
    (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024 / 1e9  # Linux counts KiB
