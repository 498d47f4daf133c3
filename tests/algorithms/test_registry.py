import functools

import pytest

from lightning_megatron_rl.algorithms.registry import choose, lookup


def test_known_name_is_returned():
    assert lookup({"a": 1, "b": 2}, "b", "thing") == 2


def test_unknown_name_lists_what_exists():
    with pytest.raises(ValueError, match="unknown thing 'c': choose one of a, b"):
        lookup({"b": 2, "a": 1}, "c", "thing")


def double(x: int) -> int:
    return 2 * x


class Doubling:
    def __call__(self, x: int) -> int:
        return 2 * x


class Times:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, x: int) -> int:
        return self.factor * x


@pytest.mark.parametrize(
    "choice",
    ["double", f"{__name__}.double", f"{__name__}.Doubling", Times(2), functools.partial(double)],
    ids=["name", "path", "path of a class", "object", "partial"],
)
def test_name_path_class_and_callable(choice: object):
    assert choose({"double": double}, choice, "thing", ["x"])(4) == 8


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("duoble", "unknown thing 'duoble': choose one of double"),
        (f"{__name__}.nothing", "cannot be imported .*has no attribute 'nothing'.*choose one of double"),
        ("no.such.module", "cannot be imported .*No module named 'no'"),
        (f"{__name__}.Times", "cannot be built without arguments .*write it as class_path with init_args"),
        ("math.pi", "'math.pi' is a float, which cannot be called"),
        (lambda x, y: x, r"is called with \(x\), but it does not take them: missing a required argument: 'y'"),
    ],
)
def test_what_cannot_be_used_is_refused(choice: object, message: str):
    with pytest.raises(ValueError, match=message):
        choose({"double": double}, choice, "thing", ["x"])
