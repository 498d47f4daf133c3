"""Lines by step: a resumed run continues its file, another run gets its own, a limit is kept."""

import json
from pathlib import Path

import pytest

from lightning_megatron_rl.rollout.record import record_line
from lightning_megatron_rl.rollout.record_file import RecordFile
from lightning_megatron_rl.sample import Prompt, Sample
from tests.full_disk import files_of_at_most


def line(step: int, run: str) -> str:
    """A sample's line of some length."""
    return record_line(Sample(Prompt([5, 6], "1+1="), [7], [-0.5], response="2" * step), step, run)


def write(path: Path, run: str, steps: range, *, resumes: bool = False, max_bytes: float = 1e9) -> RecordFile:
    """Two lines for each step."""
    file = RecordFile(path, run, max_bytes=max_bytes, resumes=resumes)
    for step in steps:
        file.append([line(step, run)] * 2, step)
    return file


def steps(path: Path) -> list[int]:
    return [json.loads(text)["step"] for text in path.read_text().splitlines()]


def test_a_resumed_run_has_each_step_once(tmp_path):
    """Of a run that was killed in step 4 and goes on behind step 2; what it has written is kept aside."""
    path = tmp_path / "deep" / "rollouts.jsonl"
    write(path, "a", range(1, 4))
    with path.open("a") as file:
        file.write(line(4, "a")[:20])
    write(path, "a", range(3, 6), resumes=True)
    assert steps(path) == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    aside = (path.parent / "rollouts-superseded.jsonl").read_text()
    assert aside == line(3, "a") * 2 + line(4, "a")[:20]
    write(path, "a", range(6, 7), resumes=True)  # nothing to move
    assert (path.parent / "rollouts-superseded.jsonl").read_text() == aside
    write(path, "a", range(6, 7))  # a second validation of the same step, say
    assert steps(path)[-4:] == [6, 6, 6, 6]
    assert len(list(path.parent.iterdir())) == 2


def test_another_run_has_a_file_of_its_own(tmp_path):
    """Whatever made the first; a run finds its own again."""
    path = tmp_path / "rollouts.jsonl"
    path.write_text("from an older version\n")
    for run in ("b", "c", "b"):
        write(path, run, range(1, 2))
    assert path.read_text() == "from an older version\n"
    assert steps(tmp_path / "rollouts-2.jsonl") == [1, 1, 1, 1]
    assert steps(tmp_path / "rollouts-3.jsonl") == [1, 1]


@pytest.mark.parametrize("resumes", [False, True])
def test_the_size_is_kept_and_what_is_left_out_is_known(tmp_path, resumes):
    """Over a resume, too."""
    size = len(line(1, "a"))
    file = write(tmp_path / "a.jsonl", "a", range(1, 2), max_bytes=3.5 * size)
    assert file.path == tmp_path / "a.jsonl"
    again = RecordFile(file.path, "a", max_bytes=3.5 * size, resumes=resumes)
    assert again.append([line(1, "a")] * 3, 2) == 1
    assert again.append([line(1, "a")], 3) == 0
    assert file.path.stat().st_size == 3 * size


def test_a_full_disk_names_the_file_and_leaves_no_half_line(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    file = write(path, "a", range(1, 3))
    refused = pytest.raises(OSError, match=r"File too large: '.*rollouts\.jsonl'")
    with files_of_at_most(path.stat().st_size + 100), refused:
        file.append([line(3, "a")] * 2, 3)
    assert steps(path) == [1, 1, 2, 2]
    file.append([line(3, "a")], 3)  # there is room again
    assert steps(path) == [1, 1, 2, 2, 3]
