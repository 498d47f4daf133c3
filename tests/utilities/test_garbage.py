"""What stays for a run is not looked at by Python's garbage collector while it trains."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest

from lightning_megatron_rl.utilities import garbage
from lightning_megatron_rl.utilities.garbage import (
    IMPORT_THRESHOLD,
    LongLived,
    collect_as_usual,
    collect_rarely,
    importing,
    set_aside,
)
from tests.training import fit_sft


class Objects(pl.Callback):
    """Counts what the collector looks at when a batch ends."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.counts.append(len(gc.get_objects()))


def fit_and_count(model: Path) -> tuple[list[int], int, int]:
    """Objects at the ends of batches and after the run, and what is set aside then."""
    gc.unfreeze()  # what these processes set aside themselves between two jobs
    counts = Objects()
    before = gc.get_freeze_count()
    try:
        with patch.object(garbage, "_set_aside", False):
            fit_sft(model, {}, 1, steps=4, callbacks=[counts])
        return counts.counts, len(gc.get_objects()), gc.get_freeze_count() - before
    finally:
        gc.collect()
        gc.freeze()  # or every later job of this process would look at all modules again


def test_collector_looks_at_little_from_the_second_batch_on(worker_pool, qwen3_dir):
    during, after, set_aside = worker_pool.run(fit_and_count, qwen3_dir, world_size=1, init_process_group=False)[0]
    assert during[0] > 100_000  # modules alone
    assert max(during[1:]) < during[0] / 10
    assert after > during[0] / 2  # it looks at everything again
    assert set_aside == 0


def test_who_has_set_objects_aside_keeps_them_so():
    """To hundreds: other threads of the process may drop some of what is set aside, at any time."""
    gc.collect()
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        assert count > 100_000
        kept = [[] for _ in range(10_000)]  # would be set aside as well, if anything were
        long_lived = LongLived()
        for _ in range(3):
            long_lived.batch_starts()
        assert count - 1000 < gc.get_freeze_count() <= count
        long_lived.release()
        assert count - 1000 < gc.get_freeze_count() <= count
        assert len(kept) == 10_000
    finally:
        gc.unfreeze()


def test_a_process_that_set_its_objects_aside_is_left_alone(monkeypatch):
    monkeypatch.setattr(garbage, "_set_aside", False)
    set_aside()
    gc.unfreeze()  # so that a second time would show
    long_lived = LongLived()
    for _ in range(3):
        long_lived.batch_starts()
    assert gc.get_freeze_count() == 0
    long_lived.release()
    assert gc.get_freeze_count() == 0


def test_objects_are_set_aside_once_and_again_in_the_next_run():
    gc.unfreeze()
    before = gc.get_freeze_count()
    long_lived = LongLived()
    for _ in range(2):
        long_lived.batch_starts()
        assert gc.get_freeze_count() == before
        long_lived.batch_starts()
        held = gc.get_freeze_count()
        assert held > before + 10_000
        kept = [[] for _ in range(1000)]
        long_lived.batch_starts()
        assert gc.get_freeze_count() <= held  # a list is looked at as long as nobody calls it long-lived
        assert len(kept) == 1000
        long_lived.release()
        assert gc.get_freeze_count() == before


@pytest.fixture
def thresholds() -> Iterator[None]:
    """Python's own are back after the test."""
    before = gc.get_threshold()
    yield
    collect_as_usual()
    gc.set_threshold(*before)


def test_collections_are_rare_until_the_first_batch(thresholds):
    gc.set_threshold(700, 11, 12)
    collect_rarely()
    collect_rarely()  # as a rank does whose launcher has
    assert gc.get_threshold() == (IMPORT_THRESHOLD, 11, 12)
    LongLived().batch_starts()
    assert gc.get_threshold() == (700, 11, 12)
    collect_as_usual()
    assert gc.get_threshold() == (700, 11, 12)


@pytest.mark.parametrize("usual", [700, IMPORT_THRESHOLD + 1, 0])  # 0: nothing is collected
def test_collections_are_rare_while_the_package_is_imported(thresholds, usual):
    gc.set_threshold(usual, 11, 12)
    with importing():
        assert gc.get_threshold() == (usual and max(usual, IMPORT_THRESHOLD), 11, 12)
    assert gc.get_threshold() == (usual, 11, 12)
