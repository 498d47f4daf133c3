"""A server's processes, which are one group: who belongs to it, what it shares, and its end."""

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# as Python's multiprocessing names shared memory, and vLLM's workers on a CPU theirs
_NAMED = re.compile(r"/dev/shm/(?:psm_\w+|\S+-cpushm_\d+)")
# the process of Python's that removes what others have left, semaphores too, when all of them have ended
_TRACKER = b"multiprocessing.resource_tracker"
TRACKER_S = 10.0  # for that, on a busy machine
LOOK_S = 0.05


def members(group: int) -> Iterator[int]:
    """Ids of the group's processes that still run."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended in between
            if os.getpgid(int(process.name)) == group and (process / "cmdline").read_bytes():
                yield int(process.name)


def shared_files(group: int) -> set[Path]:
    """Files of /dev/shm that the group's processes have mapped, and would leave there if they were killed."""
    found: set[Path] = set()
    for pid in members(group):
        with suppress(OSError):
            found |= {Path(name) for name in _NAMED.findall(Path(f"/proc/{pid}/maps").read_text())}
    return found


def end_group(group: int, shared: set[Path]) -> None:
    """Kill all processes of a group, the caller's own too, and remove what they shared.

    Args:
        group: Its number.
        shared: What is known already of what they share.
    """
    for path in shared | shared_files(group):
        path.unlink(missing_ok=True)
    own = os.getpid()
    found = [pid for pid in members(group) if pid != own]
    for pid in found:
        with suppress(OSError):
            if _TRACKER not in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
    if os.getpgid(0) == group:
        os.kill(own, signal.SIGKILL)
    deadline = time.monotonic() + TRACKER_S
    while any(members(group)) and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
