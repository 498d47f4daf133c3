"""The queue of benchmarks for a machine that is lent, and the committed files of commands."""

import argparse
import importlib
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest

from tests.command_line import ROOT
from tests.distributed import CHILD_PATH

sys.path.insert(0, str(ROOT / "benchmarks"))
gpus: Any = importlib.import_module("gpus")
run_queue: Any = importlib.import_module("run_queue")
Job = run_queue.Job
FILES = sorted((ROOT / "benchmarks" / "queues").glob("*.txt"))


@pytest.fixture(autouse=True)
def two(monkeypatch, tmp_path: Path) -> None:
    """As on a machine with two GPUs; what runs here does not touch them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setattr(gpus.tempfile, "gettempdir", lambda: str(tmp_path))


class _StoppedError(Exception):
    pass


def parser_of(script: str, monkeypatch) -> argparse.ArgumentParser:
    """The parser that a benchmark makes."""

    def stop(parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        raise _StoppedError(parser)

    with monkeypatch.context() as patched:
        for name in ("parse_args", "parse_known_args"):
            patched.setattr(argparse.ArgumentParser, name, stop)
        with pytest.raises(_StoppedError) as caught:
            importlib.import_module(Path(script).stem).main()
    return caught.value.args[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_committed_commands_are_what_benchmarks_take(path: Path, monkeypatch):
    count = {"one_gpu": 1, "two_gpus": 2, "four_gpus": 4}[path.stem]
    for job in run_queue.read_jobs(path):
        assert job.gpus <= count
        python, script, *arguments = shlex.split(job.command)
        assert python == "python"
        if script == "-m":
            continue
        parser = parser_of(script, monkeypatch)
        known, more = parser.parse_known_args(arguments)
        assert not more or "recipe_run" in script, more  # which hands them to `fit`
        assert str(known.out).startswith("{out}/")
        timeout = getattr(known, "timeout", None)
        assert timeout is None or timeout < job.seconds or job.gpus == 0


def test_a_file_is_read(tmp_path: Path):
    path = tmp_path / "jobs.txt"
    path.write_text("# words\n\nfirst 1 10 echo a \\\n  b  # c\nsecond 0 1.5 true\n")
    assert run_queue.read_jobs(path) == [Job("first", 1, 10.0, "echo a   b  # c"), Job("second", 0, 1.5, "true")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a 1 10\n", "jobs.txt:1: 'a 1 10' is not a name, a number of GPUs, seconds, and a command"),
        ("a 1 10 true\n\nb one 10 true\n", "jobs.txt:3: 'b one 10 true' is not"),
        ("a 1 10 true\na 1 10 false\n", "jobs.txt:2: a is there twice"),
    ],
)
def test_a_line_that_is_no_command_is_named(text: str, words: str, tmp_path: Path):
    path = tmp_path / "jobs.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        run_queue.read_jobs(path)


def test_what_is_not_there_is_refused():
    jobs = [Job("a", 1, 1.0, "true"), Job("b", 4, 1.0, "true")]
    with pytest.raises(ValueError, match="b needs 4, and there are 2 GPUs: leave them out with --only"):
        run_queue.check_gpus(jobs, 2)
    with pytest.raises(ValueError, match="--only c: there are a, b"):
        run_queue.chosen(jobs, ["c"])
    assert run_queue.chosen(jobs, ["b"]) == jobs[1:]


def test_commands_run_side_by_side_on_gpus_of_their_own(tmp_path: Path):
    """The first two meet, which they could not one after the other; the third has both GPUs, and comes when they go."""
    out = tmp_path / "out"
    meet = "touch {out}/$ME; until [ -e {out}/$OTHER ]; do sleep 0.05; done; echo $CUDA_VISIBLE_DEVICES > {out}/$ME.gpu"
    jobs = [
        Job("a", 1, 30.0, f"ME=a OTHER=b; {meet}"),
        Job("b", 1, 30.0, f"ME=b OTHER=a; {meet}"),
        Job("c", 2, 30.0, "cat {out}/a.gpu {out}/b.gpu; echo $CUDA_VISIBLE_DEVICES"),
    ]
    assert run_queue.Queue(out, 60.0).run(jobs) == dict.fromkeys("abc", "done")
    assert sorted((out / f"{name}.gpu").read_text() for name in "ab") == ["4\n", "5\n"]
    assert (out / "c.log").read_text().endswith("4,5\n")
    (out / "c.done").unlink()
    said: list[str] = []
    assert run_queue.Queue(out, 60.0, said.append).run(jobs) == {"a": "done before", "b": "done before", "c": "done"}
    assert len(said) == 4


def is_gone(file: Path) -> bool:
    """Whether the process whose id is in a file ends soon, be it that nobody asks for its exit code."""
    for _ in range(100):
        try:
            if psutil.Process(int(file.read_text())).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def test_what_fails_or_hangs_costs_no_other(tmp_path: Path):
    jobs = [
        Job("hangs", 1, 1.0, "sleep 1000 & echo $! > {out}/pid; wait"),
        Job("fails", 1, 5.0, "echo why; exit 3"),
        Job("left", 1, 100.0, "true"),
        Job("finds", 0, 5.0, 'test "$CUDA_VISIBLE_DEVICES" = 4,5'),
    ]
    answers = run_queue.Queue(tmp_path, 50.0).run(jobs)
    assert answers == {
        "hangs": "failed: not done after 1 s",
        "fails": "failed with 3",
        "left": "left",
        "finds": "done",
    }
    assert (tmp_path / "fails.log").read_text() == "why\n"
    assert is_gone(tmp_path / "pid")


@pytest.mark.deadline(60)
def test_a_queue_that_is_ended_ends_its_commands(tmp_path: Path):
    path = tmp_path / "jobs.txt"
    path.write_text("a 1 100 sleep 1000 & echo $! > {out}/part; mv {out}/part {out}/pid; wait\nb 2 100 touch {out}/b\n")
    command = [sys.executable, str(ROOT / "benchmarks" / "run_queue.py"), str(path), "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": CHILD_PATH, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    while not (tmp_path / "pid").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143
    assert process.stdout is not None
    process.stdout.close()
    assert is_gone(tmp_path / "pid")
    assert not (tmp_path / "b").exists()
    assert not (tmp_path / "a.done").exists()
