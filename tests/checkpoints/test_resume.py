"""A run that was told to stop and goes on is bitwise the run that was not: N steps are k and N - k."""

import csv
from pathlib import Path
from typing import Any

import pytest

from tests.drills.job import STEPS, VALIDATED_EVERY, IsTold, Job, differences, history, train
from tests.selection import by_default
from tests.strategy.test_megatron import LAYOUTS, RELATIVE

KINDS = ("sft", "grpo", "ppo")
SAME = {"single": (1, {}), "dp2": LAYOUTS["dp2"], "tp2_sp": LAYOUTS["tp2_sp"]}


def run(pool: Any, directory: Path, model: Path, kind: str, layout: str, **kwargs: Any) -> list[dict[str, Any]]:
    directory.mkdir(exist_ok=True)
    world_size, strategy = {**LAYOUTS, **SAME}[layout]
    job = Job(model, directory, kind, strategy, saves_every=100, **kwargs)  # type: ignore[arg-type]
    return pool.run(train, job, world_size, world_size=world_size, init_process_group=False)


def rows(directory: Path) -> list[dict[str, str]]:
    """What the CSV logger has written, a file per start, without times."""
    found = []
    for path in sorted(directory.glob("logs/version_*/metrics.csv")):
        with path.open() as file:
            found += [
                {name: value for name, value in row.items() if value and not name.startswith(("time/", "perf/"))}
                for row in csv.DictReader(file)
            ]
    return found


@pytest.fixture(scope="module")
def whole(worker_pool, qwen3_dir, tmp_path_factory):
    """Uninterrupted runs by kind and layout, each made once."""
    made: dict[tuple[str, str], tuple[Path, list[dict[str, Any]]]] = {}

    def make(kind: str, layout: str) -> tuple[Path, list[dict[str, Any]]]:
        if (kind, layout) not in made:
            directory = tmp_path_factory.mktemp(f"{kind}-{layout}")
            made[kind, layout] = directory, run(worker_pool, directory, qwen3_dir, kind, layout)
        return made[kind, layout]

    return make


CASES = [(kind, layout, stop) for kind in KINDS for layout in SAME for stop in range(1, STEPS)]
DEFAULT = [("grpo", "dp2", 2 * VALIDATED_EVERY)]  # behind an epoch's end, with a validation due


@pytest.mark.parametrize("case", by_default(DEFAULT, CASES), ids=str)
def test_resume_is_bitwise(worker_pool, qwen3_dir, tmp_path, whole, case):
    """Weights, moments, schedule, generators, data, samples, validations, callbacks, counters and the log go on.

    Fails without `note_due_validation` where a validation is due, without the reference or the critic in checkpoints,
    and with a checkpoint that is written before the next batch, not after the last one.
    """
    kind, layout, stop = case
    undisturbed, expected = whole(kind, layout)
    world_size = len(expected)
    told = run(worker_pool, tmp_path, qwen3_dir, kind, layout, callbacks=[IsTold(stop - 1, rank=world_size - 1)])
    assert [end["code"] for end in told] == [143, *[0] * (world_size - 1)]
    assert {end["global_step"] for end in told} == {stop}
    assert stop not in history(tmp_path, world_size)[0]["validation"], "a run that was told to stop validates"
    resumed = run(worker_pool, tmp_path, qwen3_dir, kind, layout, resumes=True)
    assert differences(resumed, expected) == []
    assert differences(history(tmp_path, world_size), history(undisturbed, world_size)) == []
    assert [len(line["rows"]) for line in history(undisturbed, world_size)] == [STEPS] * world_size
    assert rows(tmp_path) == rows(undisturbed)


@pytest.mark.slow
def test_resume_in_another_layout_agrees(worker_pool, qwen3_dir, tmp_path, whole):
    """Two replicas go on as two pipeline stages: the same rows, and likelihoods within the layouts' tolerance."""
    undisturbed, _ = whole("sft", "dp2")
    run(worker_pool, tmp_path, qwen3_dir, "sft", "dp2", callbacks=[IsTold(2)])
    assert [end["code"] for end in run(worker_pool, tmp_path, qwen3_dir, "sft", "pp2", resumes=True)] == [0, 0]
    mine, theirs = history(tmp_path, 2)[0]["validation"], history(undisturbed, 2)[0]["validation"]
    assert mine.keys() == theirs.keys() == set(range(VALIDATED_EVERY, STEPS, VALIDATED_EVERY))
    for step, values in theirs.items():
        assert mine[step] == pytest.approx(values, rel=RELATIVE)
