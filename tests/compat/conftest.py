"""A process of its own for tests that care in which order things are imported."""

from collections.abc import Iterator

import pytest

from tests.distributed import WorkerPool


@pytest.fixture
def fresh_worker() -> Iterator[WorkerPool]:
    """One process that has imported nothing yet."""
    pool = WorkerPool(1)
    yield pool
    pool.close()
