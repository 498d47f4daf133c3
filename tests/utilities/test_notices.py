"""What was lost or failed is heard: whatever warning filters say, once more at the end, and in the exit code."""

import os
import subprocess
import sys

import pytest

from lightning_megatron_rl.utilities import notices
from tests.notices import collected

PROGRAM = """
from lightning_megatron_rl.utilities.notices import finish, tell_failure, tell_loss
for _ in range(3):
    tell_loss("2 of 6 rows dropped")
tell_failure("the export runs/hf/last.failed is not the trained model")
print("training went on")
finish()
"""


@pytest.fixture(autouse=True)
def nothing_before():
    notices.forget()
    yield
    notices.forget()


def test_silenced_warnings_do_not_silence_it_and_the_exit_code_tells():
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "training went on" in done.stdout
    lines = done.stderr.splitlines()
    assert lines[:3] == ["2 of 6 rows dropped"] * 3
    assert lines[3] == "the export runs/hf/last.failed is not the trained model"
    assert "told 3 times that something was lost or skipped: 2 of 6 rows dropped (3 times)" in done.stderr
    assert "RunFailedError: the run ended, but 1 part(s) of it FAILED: the export runs/hf/last.failed" in lines[-1]


def test_a_run_ends_quietly_if_nothing_was_lost():
    with collected() as messages:
        notices.finish()
    assert messages == []


def test_a_run_does_not_answer_for_an_earlier_one():
    notices.tell_failure("old", aloud=False)
    notices.tell_loss("old")
    notices.forget()
    notices.finish()
    notices.tell_failure("new", aloud=False)
    with pytest.raises(notices.RunFailedError, match="new"):
        notices.finish()
    notices.finish()  # told once


def test_many_different_messages_take_bounded_memory_and_few_lines(caplog: pytest.LogCaptureFixture):
    for number in range(2000):
        notices.tell_loss(f"row {number} dropped")
    caplog.clear()
    notices.finish()
    (message,) = caplog.messages
    assert "this run told 2000 times" in message
    assert "messages after the first 1000 different ones (1000 times)" in message
    assert message.endswith("; and 996 more kinds")
