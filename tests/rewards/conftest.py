"""The child processes that rewards keep are there before the tests and gone after them."""

from collections.abc import Iterator

import pytest

from lightning_megatron_rl.rewards.builtin import _math_verifier
from lightning_megatron_rl.rewards.text_rewards import text_child


@pytest.fixture(scope="session", autouse=True)
def children() -> Iterator[None]:
    """Start each child once for all tests of this folder."""
    _math_verifier().equal("1", "1")
    text_child().ask(["fullmatch", "a", "a"])
    yield
    _math_verifier().close()
    text_child().close()
