"""The child process that `math_equal` keeps for all comparisons is there before the tests and gone after them."""

from collections.abc import Iterator

import pytest

from lightning_megatron_rl.rewards.builtin import _math_verifier


@pytest.fixture(scope="session", autouse=True)
def math_child() -> Iterator[None]:
    """Start the child once for all tests of this room."""
    verifier = _math_verifier()
    verifier.equal("1", "1")
    yield
    verifier.close()
