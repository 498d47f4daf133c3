"""What is shown on the console, and what is in the log file."""

import io
import logging
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

import lightning as L
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_megatron_rl.utilities import console
from lightning_megatron_rl.utilities.console import MessageLog, outlived_output, printable, prints_to_log

OURS = str(console.PACKAGE / "modules" / "grpo.py")
LIBRARY = str(Path(sysconfig.get_paths()["purelib"]) / "megatron" / "core" / "some.py")


@pytest.fixture
def shown() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def taken(shown, monkeypatch) -> Iterator[MessageLog]:
    """All records and warnings, until the test ends."""
    log = MessageLog(shown)
    kept = list(logging.root.handlers)
    monkeypatch.setattr(warnings, "showwarning", log.warn)
    logging.root.handlers[:] = [log]
    yield log
    logging.root.handlers[:] = kept
    if log._file is not None:
        log._file.close()


def say(code: str, file: str, name: str = "somewhere") -> None:
    """Run code as if it stood in a file."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        exec(compile(f"import logging, warnings\n{code}", file, "exec"), {"__name__": name})


WARNING = "warnings.warn('{text}', {category}, stacklevel={level})"


@pytest.mark.parametrize("level", [1, 2, 3])
def test_own_warnings_are_shown_wherever_they_point(taken, shown, tmp_path, level):
    """A warning of ours names its caller's line, which is often a library's; those of libraries are in the file."""
    say(WARNING.format(text="weights were lost", category="RuntimeWarning", level=level), OURS)
    say(WARNING.format(text="hint of a library", category="UserWarning", level=level), LIBRARY)
    say(WARNING.format(text="old name", category="DeprecationWarning", level=level), OURS)
    assert shown.getvalue() == "RuntimeWarning: weights were lost\n"
    taken.write_to(tmp_path / "run.log")
    say(WARNING.format(text="later", category="UserWarning", level=level), LIBRARY)
    text = (tmp_path / "run.log").read_text()
    for part in ("weights were lost", "hint of a library", "old name", "later"):
        assert part in text


def test_a_users_own_warnings_are_shown(taken, shown, tmp_path):
    reward = tmp_path / "my_rewards.py"
    reward.write_text("")
    say(WARNING.format(text="no answer", category="UserWarning", level=1), str(reward))
    assert "no answer" in shown.getvalue()


def test_a_console_that_is_gone_ends_no_run(taken, shown, tmp_path):
    taken.write_to(tmp_path / "run.log")
    shown.close()
    say(WARNING.format(text="weights were lost", category="RuntimeWarning", level=1), OURS)
    logging.getLogger("lightning_megatron_rl.somewhere").error("it failed")
    text = (tmp_path / "run.log").read_text()
    assert "weights were lost" in text
    assert "it failed" in text


@pytest.mark.parametrize("place", ["full disk", "pipe"])
def test_an_output_that_takes_no_more_ends_no_run(taken, shown, tmp_path, monkeypatch, place):
    """Whoever prints: a reward, a table of ours. What comes through another way is in the log."""
    if place == "pipe":
        reader, descriptor = os.pipe()
        os.close(reader)
    else:
        descriptor = os.open("/dev/full", os.O_WRONLY)
    taken.write_to(tmp_path / "run.log")
    with os.fdopen(descriptor, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        with outlived_output():
            print("step 1", flush=True)
            print("a reward's own words " * 1000)
        assert sys.stdout is output
    assert shown.getvalue().count("the standard output takes no more") == 1
    assert "takes no more" in (tmp_path / "run.log").read_text()


def test_a_log_file_on_a_full_disk_is_said_once(taken, shown, tmp_path, capsys):
    """And not with a traceback for each record, or in place of what was to be done."""
    taken.write_to(Path("/dev/full"))
    for step in range(3):
        logging.getLogger("lightning_megatron_rl.somewhere").error("step %d", step)
    assert shown.getvalue() == (
        "step 0\n/dev/full takes no more (No space left on device): messages of libraries are lost from here on.\n"
        "step 1\nstep 2\n"
    )
    taken._file = None
    (tmp_path / "run.log").mkdir()  # which cannot be opened
    taken.write_to(tmp_path / "run.log")
    logging.getLogger("lightning_megatron_rl.somewhere").error("step 3")
    assert "run.log takes no more (Is a directory)" in shown.getvalue()
    assert capsys.readouterr().err == ""


def test_an_output_that_takes_all_gets_all(tmp_path, monkeypatch, capsys):
    with (tmp_path / "output").open("w", encoding="utf-8") as output:
        monkeypatch.setattr(sys, "stdout", output)
        print("before")
        with outlived_output():
            print("│ step 1 │")
        print("after")
    assert (tmp_path / "output").read_text(encoding="utf-8") == "before\n│ step 1 │\nafter\n"
    monkeypatch.undo()
    with outlived_output():  # text in memory
        print("ours")
    assert capsys.readouterr().out == "ours\n"


def test_what_a_terminal_cannot_encode_ends_no_run(tmp_path, monkeypatch):
    with (tmp_path / "output").open("w", encoding="latin-1") as output:
        monkeypatch.setattr(sys, "stdout", output)
        with outlived_output():
            print("é ⟶ 中")
    assert (tmp_path / "output").read_text(encoding="latin-1") == "é \\u27f6 \\u4e2d\n"


def test_text_does_nothing_to_a_terminal():
    utf8, latin = (io.TextIOWrapper(io.BytesIO(), encoding=name) for name in ("utf-8", "latin-1"))
    assert printable("a\x1b[2J\x9b1m\r\n\tb\x00\x7f中", utf8) == "a\\x1b[2J\\x9b1m\\r\n\tb\\x00\\x7f中"
    assert printable("é中", latin) == "é\\u4e2d"
    assert printable("half \ud83d", utf8) == "half \\ud83d"


def test_what_is_said_by_way_of_lightnings_messengers(taken, shown, tmp_path):
    """Records of `rank_zero_info` carry Lightning's file and name, whoever has called it."""
    code = "from lightning.pytorch.utilities.rank_zero import rank_zero_info\nrank_zero_info('{}')"
    logger = logging.getLogger("lightning.pytorch")
    kept = list(logger.handlers), logger.propagate
    try:
        taken.take_over()
        say(code.format("exported to runs/hf"), OURS)
        say(code.format("GPU available: False"), LIBRARY)
    finally:
        logger.handlers[:], logger.propagate = kept
    assert shown.getvalue() == "exported to runs/hf\n"
    taken.write_to(tmp_path / "run.log")
    assert "GPU available: False" in (tmp_path / "run.log").read_text()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_messages_take_the_place_of_a_progress_line(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(warnings, "showwarning", MessageLog(terminal).warn)
    terminal.write("step 5/10\r")
    say(WARNING.format(text="slow", category="UserWarning", level=1), OURS)
    assert terminal.getvalue() == "step 5/10\r\r\033[KUserWarning: slow\n"


def test_a_run_that_finds_no_last_checkpoint_says_so(taken, shown, tmp_path):
    """Lightning warns and starts anew; somebody who resumes has to see that."""
    trainer = L.Trainer(
        max_steps=1, accelerator="cpu", logger=False, enable_progress_bar=False, limit_val_batches=0,
        default_root_dir=tmp_path, enable_model_summary=False,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        trainer.fit(BoringModel(), ckpt_path="last")
    assert 'fit(ckpt_path="last") is set, but there is no last checkpoint available' in shown.getvalue()


def test_errors_are_shown_whoever_says_them(taken, shown):
    say("logging.getLogger('torch.x').error('broken')\nlogging.getLogger('torch.x').warning('hint')", LIBRARY)
    assert shown.getvalue() == "broken\n"


def test_prints_of_libraries_are_records(taken, shown, capsys, tmp_path):
    taken.write_to(tmp_path / "run.log")
    console.log.setLevel(logging.INFO)
    try:
        with prints_to_log():
            say("print(' > number of parameters: 5', end='')\nprint()\nprint('next')", LIBRARY)
        print("ours")
    finally:
        console.log.setLevel(logging.NOTSET)
    assert capsys.readouterr().out == "ours\n"
    assert shown.getvalue() == ""
    assert (
        "INFO lightning_megatron_rl.utilities.console:  > number of parameters: 5\n"
        in (tmp_path / "run.log").read_text()
    )
