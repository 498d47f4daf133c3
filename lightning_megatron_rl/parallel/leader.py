"""Ends a rank soon after the rank that started it, whatever it waits for."""

import os
import sys
import threading
import time

LEADER = "LIGHTNING_MEGATRON_RL_LEADER"  # process id of the rank that starts the others
LOOK_S = 0.5
GRACE_S = 5.0  # for the rank's own error, which says more

_wanted = threading.Event()
_leader: int | None = None
_thread: threading.Thread | None = None


def watch() -> None:
    """End this process `GRACE_S` seconds after the rank that started it; nothing where no rank has.

    A rank may wait for the others for half an hour: at the rendezvous, or in a collective.
    """
    global _leader, _thread
    if LEADER in os.environ:
        # not for what this process starts (its sampler), whose parent it is
        _leader = int(os.environ.pop(LEADER))
    if _leader is None:
        return
    _wanted.set()
    if _thread is None:
        _thread = threading.Thread(target=_watch, args=(_leader,), name="leader", daemon=True)
        _thread.start()


def rest() -> None:
    """Let this process outlive the other until the next `watch`: its run has ended."""
    _wanted.clear()


def _watch(leader: int) -> None:
    while os.getppid() == leader:
        time.sleep(LOOK_S)
    time.sleep(GRACE_S)
    _wanted.wait()
    rank = os.environ.get("LOCAL_RANK", "?")
    print(
        f"local rank {rank} (process {os.getpid()}) ends: rank 0 (process {leader}), which started it, is gone; its"
        " own error is above, if it had one",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)
