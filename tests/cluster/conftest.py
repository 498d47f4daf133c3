"""Fixtures of tests that need several hosts."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.cluster.hosts import Cluster, cluster, why_no_hosts


@pytest.fixture
def make_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Cluster]]:
    """Make a cluster: `make_hosts(2)`; skips where the right to is missing."""
    reason = why_no_hosts()
    if reason is not None:
        pytest.skip(reason)
    with ExitStack() as stack:

        def make(count: int = 2, **options: Any) -> Cluster:
            return stack.enter_context(cluster(tmp_path_factory.getbasetemp(), count, **options))

        yield make
