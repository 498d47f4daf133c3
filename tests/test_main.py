"""The process of the command line itself: what it sets before anything is imported."""

import importlib
import os
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from lightning_megatron_rl.__main__ import COMMANDS, TOOLS, main
from tests.distributed import CHILD_PATH

CODE = """
import os, signal, sys
from lightning_megatron_rl.__main__ import allow_interrupt
allow_interrupt()
os.kill(os.getpid(), signal.SIGINT)
print("not interrupted")
"""


CHILD = """
import signal, subprocess, sys
from lightning_megatron_rl.__main__ import allow_interrupt
allow_interrupt()
code = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
subprocess.run([sys.executable, "-c", code])
"""


def test_what_such_a_process_starts_can_be_interrupted():
    command = ["bash", "-c", 'trap "" INT; exec "$0" -c "$1"', sys.executable, CHILD]
    environment = {**os.environ, "PYTHONPATH": CHILD_PATH}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize("ignored", [True, False])
def test_interrupt_works_where_the_process_started_with_it_ignored(ignored):
    """As the background jobs of a shell script are, and the steps of some CI systems."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.getsignal(signal.SIGINT))
    try:
        done = subprocess.run(
            [sys.executable, "-c", CODE],
            env={**os.environ, "PYTHONPATH": CHILD_PATH},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.returncode == -signal.SIGINT  # Python ends an interrupted process so
    assert "KeyboardInterrupt" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("command", ["doctor", "report", "verify-layout"])  # others set variables of libraries
def test_a_command_that_is_interrupted_says_so(command: str, monkeypatch, capsys):
    """Without a traceback, with the exit code of shells."""
    module = importlib.import_module(TOOLS[command])

    def interrupted(_: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "main", interrupted)
    with pytest.raises(SystemExit) as ended:
        main([command])
    assert ended.value.code == 130
    assert capsys.readouterr().err == f"\nlightning-megatron-rl {command}: interrupted\n"


def test_a_run_that_is_interrupted_before_its_trainer_runs_says_so(monkeypatch, capsys):
    """While its libraries are imported, say: Lightning answers only when the Trainer runs."""

    def interrupted(_: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "lightning_megatron_rl.cli", SimpleNamespace(run=interrupted))  # not imported here
    monkeypatch.setattr("lightning_megatron_rl.utilities.console.begin", lambda: None)  # would handle this process's
    with pytest.raises(SystemExit) as ended:
        main(["fit"])
    assert ended.value.code == 130
    assert capsys.readouterr().err == "\nlightning-megatron-rl fit: interrupted\n"


def test_a_reader_that_has_enough_ends_a_command_without_a_traceback():
    """As `lightning-megatron-rl doctor | head -1` does."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "lightning_megatron_rl", "doctor", "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": CHILD_PATH}
    with os.fdopen(writer, "w") as output:
        done = subprocess.run(
            command, env=environment, stdout=output, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert done.returncode == 128 + signal.SIGPIPE
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("command", "said"), [("plam", "did you mean plan?"), ("recipes", f"known: {', '.join(COMMANDS)}")]
)
def test_an_unknown_command_is_told_the_others(command: str, said: str, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lightning_megatron_rl.cli", None)  # nothing is imported for it
    with pytest.raises(SystemExit) as exit_:
        main([command])
    assert exit_.value.code == 2
    assert capsys.readouterr().err == f"lightning-megatron-rl: error: unknown command {command}; {said}\n"


def test_commands_are_those_of_the_help(capsys):
    main(["--help"])
    listed = capsys.readouterr().out.partition("commands:")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"^  (\S+)", listed, re.MULTILINE)) == sorted(COMMANDS)


@pytest.mark.parametrize("command", ["plan", "verify-layout"])
def test_a_command_without_a_config_asks_for_one(command: str, capsys):
    module = importlib.import_module(TOOLS[command])
    with pytest.raises(SystemExit) as exit_:
        module.main([])
    assert exit_.value.code == 2
    assert capsys.readouterr().err == f"lightning-megatron-rl {command}: error: no config is given: --config FILE\n"
