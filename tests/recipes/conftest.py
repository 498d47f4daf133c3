"""The worker of math-verify, kept for the tests of this folder."""

from collections.abc import Iterator

import pytest

from lightning_megatron_rl.rewards.builtin import _math_verifier


@pytest.fixture(scope="session")
def math_worker() -> Iterator[None]:
    """Starts it outside of any test, which would be held to leaving no process behind."""
    _math_verifier().equal("1", "1")
    yield
    _math_verifier().close()
