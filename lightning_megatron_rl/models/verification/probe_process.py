"""The probe in a process of its own: the caller's has Megatron's process groups of its run, and perhaps a GPU."""

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from lightning_megatron_rl.utilities.cpus import usable_cpus

if TYPE_CHECKING:
    from lightning_megatron_rl.models.verification.probe import Comparison

DEADLINE_S = 300.0  # some 15 s are usual, most of them for imports
_REQUEST, _ANSWER = "request.pickle", "answer.json"
_TAIL = 2000  # characters of a child's output that an error quotes
_MOST_THREADS = 4
_POLL_S = 5.0
# Of launchers and distributed jobs, which the child takes no part in.
_JOB_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "GROUP_",
    "ROLE_",
    "MASTER_",
    "TORCHELASTIC_",
    "SLURM_",
    "OMPI_",
    "PMI",
)


class ProbeError(Exception):
    """A config that one of the libraries cannot build or run, or a probe that did not come to an end."""


def run_probe(
    small: dict[str, Any],
    overrides: dict[str, Any],
    while_waiting: Callable[[], None] = lambda: None,
    deadline_s: float = DEADLINE_S,
) -> "Comparison":
    """Return what `compare` finds, in a child process that ends with this one.

    Args:
        small: Content of the miniature's config.json.
        overrides: Of Megatron's `TransformerConfig`.
        while_waiting: Called every few seconds until there is an answer.
        deadline_s: Seconds after which the child is ended.

    Raises:
        ProbeError: It failed, was killed, or ran past its deadline.
    """
    from lightning_megatron_rl.models.verification.probe import Comparison

    with TemporaryDirectory(prefix="model-probe-") as temporary:
        directory = Path(temporary)
        (directory / _REQUEST).write_bytes(pickle.dumps((small, overrides)))
        with (directory / "log").open("w+b") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", __name__, temporary],
                stdin=subprocess.PIPE,  # it watches the other end, which closes when this process ends in any way
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**_environment(), "TMPDIR": temporary},  # so that nothing stays of a child that is killed
                start_new_session=True,  # so that whatever it starts can be ended with it
            )
            try:
                code = _wait(child, deadline_s, while_waiting)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                assert child.stdin is not None
                child.stdin.close()
            answer = directory / _ANSWER
            if not answer.is_file():
                log.seek(0)
                raise ProbeError(f"it ended with code {code}:\n{log.read().decode(errors='replace')[-_TAIL:]}")
            found = json.loads(answer.read_text())
    if "error" in found:
        raise ProbeError(found["error"])
    return Comparison(**found)


def _wait(child: "subprocess.Popen[bytes]", deadline_s: float, while_waiting: Callable[[], None]) -> int:
    """Return the child's exit code."""
    end = time.monotonic() + deadline_s
    while (left := end - time.monotonic()) > 0:
        try:
            return child.wait(min(left, _POLL_S))
        except subprocess.TimeoutExpired:
            while_waiting()
    raise ProbeError(f"it did not end within {deadline_s:g} s")


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_JOB_VARIABLES)}
    kept["OMP_NUM_THREADS"] = str(min(_MOST_THREADS, usable_cpus().count))
    kept["HF_HUB_OFFLINE"] = "1"
    kept["CUDA_VISIBLE_DEVICES"] = ""  # the probe runs on the CPU, also beside GPUs, whose streams are no use there
    # what can be imported here can be imported there
    kept["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    return kept


def _end_with_parent() -> None:
    os.read(0, 1)
    os._exit(1)


def _main(directory: Path) -> None:
    """Answer the request in a directory."""
    threading.Thread(target=_end_with_parent, daemon=True).start()  # before imports, which take seconds
    from lightning_megatron_rl.compat.single_process import single_process
    from lightning_megatron_rl.models.verification.probe import compare

    small, overrides = pickle.loads((directory / _REQUEST).read_bytes())
    with single_process():
        try:
            found = asdict(compare(small, overrides))
        except Exception as error:
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
    partial = directory / f"{_ANSWER}.partial"
    partial.write_text(json.dumps(found))
    partial.rename(directory / _ANSWER)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
