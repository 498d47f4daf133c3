import pytest

from lightning_megatron_rl.algorithms.registry import lookup


def test_known_name_is_returned():
    assert lookup({"a": 1, "b": 2}, "b", "thing") == 2


def test_unknown_name_lists_what_exists():
    with pytest.raises(ValueError, match="unknown thing 'c': choose one of a, b"):
        lookup({"b": 2, "a": 1}, "c", "thing")
