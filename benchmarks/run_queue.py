"""Many benchmarks in one go, on a machine that is lent by the hour.

    python benchmarks/run_queue.py benchmarks/queues/four_gpus.txt --out DIR --seconds 1700

A line of the file is a command: its name, the GPUs that it needs, the seconds that it takes at most, and the command
itself, in which ``{out}`` is the directory of results. Commands start in the order of the file, each on GPUs and CPU
cores of its own, as soon as there are enough; one that needs 0 finds GPUs itself (``--at-once``). What would take
longer than ``--seconds`` from the start is left, and what has been done is not done again.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import gpus
from common import LOGS, ROOT

FIELDS = 4
MOST_AT_ONCE = 32


@dataclass(frozen=True)
class Job:
    """A line of the file."""

    name: str
    gpus: int  # 0: it takes them itself
    seconds: float  # at most
    command: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the commands, a line each")
    parser.add_argument("--out", type=Path, required=True, help="directory of results, logs and what has been done")
    parser.add_argument("--only", default="", help="names, with commas between them")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="until the machine is gone")
    parser.add_argument("--list", action="store_true", help="say what would be run")
    options = parser.parse_args()
    try:
        jobs = chosen(read_jobs(options.file), [name for name in options.only.split(",") if name])
        check_gpus(jobs, len(gpus.visible()))
    except ValueError as error:
        parser.error(str(error))
    if options.list:
        print("\n".join(f"{job.name}  {job.gpus} GPUs, {job.seconds:g} s: {job.command}" for job in jobs))
        return
    queue = Queue(options.out, options.seconds)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        answers = queue.run(jobs)
    finally:
        queue.end()
    sys.exit(any(answer not in ("done", "done before") for answer in answers.values()))


def read_jobs(path: Path) -> list[Job]:
    """Read a file of commands; lines that begin with # are words, and a backslash at the end goes on.

    Raises:
        ValueError: A line is no command, or two have one name; with the line's number.
    """
    jobs: list[Job] = []
    start, text = 1, ""
    for number, line in enumerate([*path.read_text().splitlines(), ""], 1):
        if line.startswith("#"):
            continue
        start = start if text else number
        text += line.rstrip("\\")
        if line.endswith("\\"):
            continue
        fields, text = text.split(maxsplit=FIELDS - 1), ""
        if not fields:
            continue
        try:
            name, count, seconds, command = fields
            job = Job(name, int(count), float(seconds), command)
        except ValueError as error:
            raise ValueError(
                f"{path}:{start}: {' '.join(fields)!r} is not a name, a number of GPUs, seconds, and a command"
            ) from error
        if any(job.name == other.name for other in jobs):
            raise ValueError(f"{path}:{start}: {job.name} is there twice")
        jobs.append(job)
    return jobs


def chosen(jobs: Sequence[Job], names: Sequence[str]) -> list[Job]:
    """Return the jobs with the given names, all without any.

    Raises:
        ValueError: There is none of that name.
    """
    if unknown := set(names) - {job.name for job in jobs}:
        raise ValueError(f"--only {','.join(sorted(unknown))}: there are {', '.join(job.name for job in jobs)}")
    return [job for job in jobs if not names or job.name in names]


def check_gpus(jobs: Sequence[Job], count: int) -> None:
    """Refuse what the machine is too small for.

    Raises:
        ValueError: With the jobs' names.
    """
    if too_large := [f"{job.name} needs {job.gpus}" for job in jobs if job.gpus > count]:
        raise ValueError(f"{', '.join(too_large)}, and there are {count} GPUs: leave them out with --only")


class Queue:
    """Runs jobs.

    Args:
        out: Directory of results; it gets a log of each job, and a file that says that it is done.
        seconds: Until everything must have ended.
        say: Told when a job starts and ends.
    """

    def __init__(self, out: Path, seconds: float, say: Callable[[str], None] = print) -> None:
        self.out = out.absolute()
        self.say = say
        self._began = time.monotonic()
        self._seconds = seconds
        self._running: set[subprocess.Popen[bytes]] = set()
        self._is_over = False

    def run(self, jobs: Sequence[Job]) -> dict[str, str]:
        """Run jobs and return what became of each: "done", "done before", "left", or how it failed."""
        self.out.mkdir(parents=True, exist_ok=True)
        futures: dict[str, Future[str]] = {}
        with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
            try:
                for job in jobs:
                    has_started = threading.Event()
                    futures[job.name] = pool.submit(self._run, job, has_started)
                    has_started.wait()
                return {name: future.result() for name, future in futures.items()}
            finally:
                self.end()

    def end(self) -> None:
        """End what runs, with all that it started; nothing starts any more."""
        self._is_over = True
        for process in list(self._running):
            _kill(process)

    def _run(self, job: Job, has_started: threading.Event) -> str:
        try:
            mark = self.out / f"{job.name}.done"
            if mark.exists():
                return self._told(job, "done before")
            with gpus.own_gpus(job.gpus) if job.gpus else nullcontext(None) as names:
                if self._is_over or self._now + job.seconds > self._seconds:
                    return self._told(job, "left")
                answer, seconds = self._command(job, names, has_started)
            if answer == "done":
                mark.write_text(f"{seconds:.1f} s: {job.command}\n")
            return self._told(job, answer)
        finally:
            has_started.set()

    def _command(self, job: Job, names: str | None, has_started: threading.Event) -> tuple[str, float]:
        command = job.command.replace("{out}", shlex.quote(str(self.out)))
        environment = {**os.environ, LOGS: str(self.out)}  # of what is ended, too, it is known how far it came
        if names is not None:
            environment["CUDA_VISIBLE_DEVICES"] = names
        self.say(f"{self._now:7.1f} s  {job.name}: starts on {'GPUs of its own' if names is None else names}")
        began = time.monotonic()
        with (self.out / f"{job.name}.log").open("wb") as log:
            process = subprocess.Popen(
                ["bash", "-c", command],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._running.add(process)
            has_started.set()
            if self._is_over:
                _kill(process)
            try:
                code = process.wait(job.seconds)
                answer = "done" if code == 0 else f"failed with {code}"
            except subprocess.TimeoutExpired:
                answer = f"failed: not done after {job.seconds:g} s"
            finally:
                _kill(process)  # and what it may have left
                self._running.discard(process)
        return answer, time.monotonic() - began

    @property
    def _now(self) -> float:
        return time.monotonic() - self._began

    def _told(self, job: Job, answer: str) -> str:
        self.say(f"{self._now:7.1f} s  {job.name}: {answer}")
        return answer


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    main()
