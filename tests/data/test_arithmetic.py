import itertools

import pytest

from lightning_megatron_rl.data import ArithmeticPairs, ArithmeticRows, arithmetic_rows
from lightning_megatron_rl.data.arithmetic import HELD_OUT_SHARE, has_carry, split_of


def parse(prompt: str) -> tuple[int, str, int]:
    operator = "+" if "+" in prompt else "-"
    left, right = prompt.removesuffix("=").split(operator)
    return int(left), operator, int(right)


def problem(prompt: str) -> tuple[str, frozenset[int]]:
    """What the splits must not share: for these operations the operands in any order."""
    left, operator, right = parse(prompt)
    return operator, frozenset((left, right))


def all_rows(split: str) -> list[str]:
    """Every two-digit problem of a split that can be drawn."""
    sums = [f"{a}+{b}=" for a, b in itertools.product(range(100), repeat=2) if split_of(a, "+", b) == split]
    differences = [f"{a}-{b}=" for a in range(100) for b in range(a + 1) if split_of(a, "-", b) == split]
    return sums + differences


def test_splits_share_no_problem_over_the_whole_set():
    train, val = all_rows("train"), all_rows("val")
    assert len(train) + len(val) == 100 * 100 + 5050
    assert not {problem(prompt) for prompt in train} & {problem(prompt) for prompt in val}
    assert abs(len(val) / (len(train) + len(val)) - HELD_OUT_SHARE) < 0.02  # five standard deviations of a fair hash
    # and the rows that are drawn belong to their split, whatever the other options are
    for split, prompts in {"train": set(train), "val": set(val)}.items():
        for seed, subtraction, share in itertools.product((0, 1), (False, True), (0.0, 1.0)):
            drawn = arithmetic_rows(split, 400, 2, seed, subtraction, share)
            assert {row["prompt"] for row in drawn} <= prompts


def test_the_whole_set_can_be_drawn():
    rows = arithmetic_rows("val", sum("+" in prompt for prompt in all_rows("val")))
    assert {row["prompt"] for row in rows} == {prompt for prompt in all_rows("val") if "+" in prompt}
    with pytest.raises(ValueError, match=r"only \d+ of size=200 distinct 'val' problems with num_digits=1"):
        arithmetic_rows("val", 200, num_digits=1)


@pytest.mark.parametrize("num_digits", [1, 2, 5])
def test_rows_are_right_distinct_and_repeatable(num_digits: int):
    rows = arithmetic_rows("train", 40, num_digits, seed=3, subtraction=True)
    assert rows == arithmetic_rows("train", 40, num_digits, seed=3, subtraction=True)
    assert rows != arithmetic_rows("train", 40, num_digits, seed=4, subtraction=True)
    assert rows == ArithmeticRows("train", 40, num_digits, seed=3, subtraction=True)()
    assert len({row["prompt"] for row in rows}) == 40
    for row in rows:
        left, operator, right = parse(row["prompt"])
        assert row["answer"] == str(left + right if operator == "+" else left - right)
        assert max(left, right) < 10**num_digits
        assert int(row["answer"]) >= 0
    assert {parse(row["prompt"])[1] for row in rows} == {"+", "-"}


def test_seeds_do_not_change_with_the_interpreter():
    """A held-out set must be the same in every process, or results cannot be compared."""
    assert [row["prompt"] for row in arithmetic_rows("val", 3)] == ["92+53=", "42+89=", "13+9="]
    assert split_of(57, "+", 68) == split_of(68, "+", 57)


def test_has_carry_against_digit_by_digit_sums():
    for a, b in itertools.product(range(100), repeat=2):
        assert has_carry(a, "+", b) == (a % 10 + b % 10 > 9 or a + b > 99)
        if a >= b:
            assert has_carry(a, "-", b) == (a % 10 < b % 10)
    assert has_carry(950, "+", 60)
    assert has_carry(105, "-", 10)


@pytest.mark.parametrize("share", [0.5, 0.9, 1.0])
@pytest.mark.parametrize("subtraction", [False, True])
def test_share_of_carries(share: float, subtraction: bool):
    rows = arithmetic_rows("train", 301, subtraction=subtraction, min_carry_share=share)
    carries = [has_carry(*parse(row["prompt"])) for row in rows]
    assert sum(carries) >= share * 301
    if share < 1:
        assert not all(carries)
        assert not all(carries[-30:])  # mixed, not plain ones first


def test_bad_arguments():
    for kwargs in ({"size": 0}, {"size": 1, "num_digits": 0}, {"size": 1, "min_carry_share": 1.1}):
        with pytest.raises(ValueError, match=r"must be (at least 1|in \[0, 1\])"):
            ArithmeticRows("train", **kwargs)


def test_answers_from_the_lowest_digit_up():
    plain, reversed_rows = (
        ArithmeticRows("val", size=50, lowest_digit_first=lowest_digit_first)() for lowest_digit_first in (False, True)
    )
    assert [row["prompt"] for row in reversed_rows] == [row["prompt"] for row in plain]
    assert [row["answer"][::-1] for row in reversed_rows] == [row["answer"] for row in plain]


def test_pairs_differ_in_one_digit():
    rows, pairs = ArithmeticRows("train", 200)(), ArithmeticPairs("train", 200)()
    assert pairs == ArithmeticPairs("train", 200)()
    for row, pair in zip(rows, pairs, strict=True):
        assert (pair["prompt"], pair["chosen"]) == (row["prompt"], row["answer"])
        assert len(pair["rejected"]) == len(pair["chosen"])
        assert sum(a != b for a, b in zip(pair["chosen"], pair["rejected"], strict=True)) == 1
    assert {len(pair["chosen"]) for pair in ArithmeticPairs("val", 50, lowest_digit_first=True)()} <= {1, 2, 3}
