"""A process of its own for tests that care in which order things are imported."""

from collections.abc import Iterator

import pytest

from tests.distributed import WorkerPool


def import_nothing() -> None:
    """Megatron is imported by the test."""


@pytest.fixture
def fresh_worker() -> Iterator[WorkerPool]:
    """One process that has imported nothing yet."""
    pool = WorkerPool(1, prepare=import_nothing)
    yield pool
    pool.close()
