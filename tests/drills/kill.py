"""Kills a run at named points, resumes it, and compares it with the undisturbed one: ``python -m tests.drills.kill``.

Ranks are forks of this process, which has imported everything and started nothing, so an attempt takes seconds.
"""

import argparse
import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from lightning.pytorch.trainer.trainer import Trainer
from megatron.core import dist_checkpointing
from megatron.core.distributed import finalize_model_grads

from lightning_megatron_rl.checkpoints.manifest import check_files, read_manifest
from lightning_megatron_rl.models.hf.model import HFModel
from lightning_megatron_rl.strategy.megatron import MegatronStrategy
from lightning_megatron_rl.verify.pool import free_port
from tests.drills.facts import facts
from tests.drills.faults import Point
from tests.drills.job import STEPS, Job, differences, history, run_rank
from tests.drills.points import DRILLS, SHORT, VLLM_DRILLS, Drill
from tests.policing import shared_memory
from tests.tiny_models import save_tiny_model

WORLD_SIZE = 2
ATTEMPT_TIMEOUT = 120.0  # seconds; with vLLM twice that
END_OF_OTHERS = 30.0  # seconds after which no other rank may live when one is gone
FAILED = 70  # code of a rank that ended with an exception
GRACE = 5.0  # seconds for what a killed process had started
GRACE_OF_START = 30.0  # where that may be vLLM's process, which looks for its parent once it has imported torch
_IMPORTED = (Trainer, dist_checkpointing, finalize_model_grads, HFModel, MegatronStrategy)  # before the first fork
_PR_SET_CHILD_SUBREAPER = 36


@dataclass
class Attempt:
    """How one attempt ended: exit codes by rank (negative: by that signal), and what was left of it."""

    codes: list[int]
    seconds_after_first_death: float
    left: list[str]
    output: str


def attempt(job: Job, timeout: float = ATTEMPT_TIMEOUT, world_size: int = WORLD_SIZE) -> Attempt:
    """Run all ranks of `job` to their ends."""
    memory = shared_memory()
    log = job.directory / "output.log"
    log.unlink(missing_ok=True)
    port = free_port()
    ranks = {fork(partial(run_rank, job, rank, world_size, port), log): rank for rank in range(world_size)}
    codes: dict[int, int] = {}
    deadline, first_death = time.monotonic() + timeout, 0.0
    while len(codes) < world_size:
        for pid in [pid for pid, rank in ranks.items() if rank not in codes]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[ranks[pid]] = os.waitstatus_to_exitcode(status)
                if codes[ranks[pid]] and not first_death:
                    first_death = time.monotonic()
                    deadline = min(deadline, first_death + END_OF_OTHERS)
        if time.monotonic() > deadline:
            for pid in [pid for pid, rank in ranks.items() if rank not in codes]:
                os.kill(pid, signal.SIGABRT)  # with the stack of every thread in the log
                codes[ranks[pid]] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        time.sleep(0.02)
    seconds = time.monotonic() - first_death if first_death else 0.0
    left = left_behind(memory, GRACE_OF_START if job.vllm else GRACE)
    return Attempt([codes[rank] for rank in range(world_size)], seconds, left, log.read_text()[-1500:])


def adopt_orphans() -> None:
    """Become the parent of what killed ranks have started, so that `left_behind` sees it."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def fork(function: Callable[[], int], log: Path) -> int:
    """Run `function` in a fork of this process, which ends with the code that it returns; returns the fork's id."""
    pid = os.fork()
    if pid:
        return pid
    code = FAILED
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        faulthandler.enable()
        code = function()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # nothing of the parent's is to be torn down here


def make_model(path: Path) -> int:
    """Save the tiny model."""
    save_tiny_model(path, "qwen3")
    return 0


def left_behind(memory: frozenset[str], grace: float = GRACE) -> list[str]:
    """Return processes and shared memory that outlive the attempt by so many seconds, and end the processes."""
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # orphans come here: this process is their reaper
                pass
        alive = [process for process in psutil.Process().children(recursive=True) if _is_alive(process)]
        new = shared_memory() - memory
        if not alive and not new:
            return []
        time.sleep(0.05)
    found = [f"process {process.pid}: {' '.join(process.cmdline())[:150]}" for process in alive]
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return found + [f"/dev/shm/{name}" for name in sorted(new)]


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def broken_checkpoints(directory: Path) -> list[str]:
    """Return what has a checkpoint's name and files, and is none; an empty directory keeps a name for one to come."""
    broken = []
    for path in sorted(directory.glob("*/*.ckpt")):
        if path.name.startswith(".") or not any(path.iterdir()):
            continue
        try:
            check_files(path, read_manifest(path), verify=True)
        except (OSError, ValueError) as error:
            broken.append(str(error))
    return broken


def unfinished(directory: Path) -> list[str]:
    """Return what killed runs have left and the last one has not removed."""
    paths = [*directory.glob("checkpoints/*"), *directory.glob("best/*")]
    return [f"left: {path}" for path in paths if path.name.startswith(".") or not any(path.iterdir())]


def compare(directory: Path, undisturbed: Path) -> list[str]:
    """Return in what a finished run differs from the undisturbed one."""
    found = differences(history(directory, WORLD_SIZE), history(undisturbed, WORLD_SIZE), "seen")
    for rank in range(WORLD_SIZE):
        mine, theirs = (torch.load(path / f"final-{rank}.pt", weights_only=False) for path in (directory, undisturbed))
        found += differences(mine, theirs, f"rank {rank}")
    return found


def drill(wanted: Drill, model: Path, root: Path, undisturbed: Path, vllm: bool) -> dict[str, Any]:
    """Kill, resume and compare; returns the line of the report."""
    directory = root / wanted.name.replace(" ", "_").replace("/", "_")
    directory.mkdir()
    started, problems = time.monotonic(), list[str]()
    timeout = ATTEMPT_TIMEOUT * (2 if vllm else 1)
    codes, slowest = [], 0.0
    for number, fault in enumerate([*wanted.faults, None]):
        ended = attempt(Job(model, directory, fault=fault, resumes=number > 0, vllm=vllm), timeout)
        codes.append(ended.codes)
        slowest = max(slowest, ended.seconds_after_first_death)
        problems += [f"left behind: {thing}" for thing in ended.left] + broken_checkpoints(directory)
        problems += _unexpected(fault, ended)
    steps = [json.loads(line) for line in (directory / "seen-0.jsonl").read_text().splitlines()]
    batches = [line["step"] for line in steps if "rows" in line]
    if not problems:
        problems = compare(directory, undisturbed)
        problems += unfinished(directory)
    return {
        "point": wanted.name,
        "ranks": list(wanted.faults[0].ranks),
        "exit_codes": codes,
        "steps_done_again": len(batches) - STEPS,
        "others_ended_after_s": round(slowest, 1),
        "seconds": round(time.monotonic() - started, 1),
        "problems": problems,
    }


def _unexpected(fault: Point | None, ended: Attempt) -> list[str]:
    if fault is None:
        return [] if ended.codes == [0, 0] else [f"the resumed run ended with {ended.codes}: {ended.output}"]
    found = []
    for rank, code in enumerate(ended.codes):
        if rank in fault.ranks and code != -signal.SIGKILL:
            found.append(f"rank {rank} was to be killed at {fault.name!r}, and ended with {code}: {ended.output}")
        if rank not in fault.ranks and code in (0, -signal.SIGABRT):
            found.append(f"rank {rank} {'ended well' if code == 0 else 'hung'} without its peer: {ended.output}")
    return found


def report(lines: list[dict[str, Any]], *, vllm: bool) -> dict[str, Any]:
    """Return the content of the report: what was found, and of what."""
    return {
        **facts("kill --vllm" if vllm else "kill"),
        "steps": STEPS,
        "ranks": WORLD_SIZE,
        "drills": lines,
    }


def main() -> int:
    """Run the drills and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="a few points only")
    parser.add_argument("--only", nargs="*", help="names of points")
    parser.add_argument("--vllm", action="store_true", help="the points with vLLM as the sampler, and no others")
    parser.add_argument("--out", type=Path, help="where the report goes, JSON")
    options = parser.parse_args()
    adopt_orphans()
    drills = VLLM_DRILLS if options.vllm else SHORT if options.short else DRILLS
    drills = [one for one in drills if not options.only or one.name in options.only]
    with tempfile.TemporaryDirectory() as root:
        model = Path(root) / "model"
        # in a fork: it starts threads, and a process with threads is not to be forked
        if os.waitpid(fork(partial(make_model, model), Path(root) / "model.log"), 0)[1]:
            raise RuntimeError((Path(root) / "model.log").read_text())
        undisturbed = Path(root) / "undisturbed"
        undisturbed.mkdir()
        first = attempt(Job(model, undisturbed, vllm=options.vllm), 2 * ATTEMPT_TIMEOUT)
        if first.codes != [0, 0] or first.left:
            raise RuntimeError(f"the undisturbed run ended with {first.codes}, left {first.left}: {first.output}")
        lines = []
        for wanted in drills:
            lines.append(drill(wanted, model, Path(root), undisturbed, options.vllm))
            print(json.dumps(lines[-1]), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(report(lines, vllm=options.vllm), indent=2) + "\n")
    return int(any(line["problems"] for line in lines))


if __name__ == "__main__":
    sys.exit(main())
