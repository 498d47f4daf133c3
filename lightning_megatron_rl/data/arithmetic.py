"""Arithmetic: a generated set of sums and differences, with a held-out split that shares no problem with training."""

import hashlib
import math
import random
from typing import Any, Literal

from lightning_megatron_rl.utilities.ranges import COUNT, SEED, SHARE, check_ranges, check_words

Split = Literal["train", "val"]

HELD_OUT_SHARE = 0.2  # of all problems; fixed, because two sets are disjoint only if both use the same share


class ArithmeticRows:
    """Distinct problems like ``{"prompt": "57+68=", "answer": "125"}``, the same for the same arguments.

    Which split a problem belongs to depends on a hash of the problem alone, so no `train` set shares a problem with any
    `val` set, whatever the other arguments. "12+34" and "34+12" are one problem.

    Args:
        split: `train`, or `val` for the held-out problems, a fifth of all.
        size: Number of rows.
        num_digits: Most digits of an operand; operands are drawn evenly from 0 to 10^num_digits - 1.
        seed: Seed of the draw.
        subtraction: Whether half of the draws are differences, without negative results.
        min_carry_share: At least this share of the rows has a carry or borrow between digits; 1.0 means all.
        lowest_digit_first: Whether answers are written from the lowest digit up ("57+68=521"), the order in which sums
            are worked out: small models learn it faster (arXiv:2307.03381).

    Raises:
        ValueError: for a share outside 0 to 1, or when called, if there are too few such problems.
    """

    def __init__(
        self,
        split: Split,
        size: int,
        num_digits: int = 2,
        seed: int = 0,
        subtraction: bool = False,
        min_carry_share: float = 0.0,
        lowest_digit_first: bool = False,
    ) -> None:
        ranges = {"size": COUNT, "num_digits": COUNT, "seed": SEED, "min_carry_share": SHARE}
        check_ranges(ranges, locals())
        check_words({"split": Split}, locals())
        self.split = split
        self.size = size
        self.num_digits = num_digits
        self.seed = seed
        self.subtraction = subtraction
        self.min_carry_share = min_carry_share
        self.lowest_digit_first = lowest_digit_first

    def __call__(self) -> list[dict[str, Any]]:
        """Draw the rows."""
        rows = arithmetic_rows(
            self.split, self.size, self.num_digits, self.seed, self.subtraction, self.min_carry_share
        )
        if self.lowest_digit_first:
            rows = [{**row, "answer": row["answer"][::-1]} for row in rows]
        return rows


class ArithmeticPairs:
    """Preference pairs like ``{"prompt": "57+68=", "chosen": "125", "rejected": "135"}``: one digit is wrong.

    The problems are those of `ArithmeticRows` with the same arguments. Which digit is wrong, and by how much, depends
    on the problem alone.

    Args:
        split: `train`, or `val` for the held-out problems.
        size: Number of rows.
        num_digits: Most digits of an operand.
        seed: Seed of the draw.
        lowest_digit_first: Whether answers are written from the lowest digit up.

    Raises:
        ValueError: when called, if there are too few such problems.
    """

    def __init__(
        self, split: Split, size: int, num_digits: int = 2, seed: int = 0, lowest_digit_first: bool = False
    ) -> None:
        self.rows = ArithmeticRows(split, size, num_digits, seed, lowest_digit_first=lowest_digit_first)

    def __call__(self) -> list[dict[str, Any]]:
        """Draw the rows."""
        return [
            {
                "prompt": row["prompt"],
                "chosen": row["answer"],
                "rejected": _with_wrong_digit(row["prompt"], row["answer"]),
            }
            for row in self.rows()
        ]


def _with_wrong_digit(prompt: str, answer: str) -> str:
    generator = random.Random(prompt)
    place = generator.randrange(len(answer))
    digit = (int(answer[place]) + generator.randrange(1, 10)) % 10
    return answer[:place] + str(digit) + answer[place + 1 :]


def arithmetic_rows(
    split: Split,
    size: int,
    num_digits: int = 2,
    seed: int = 0,
    subtraction: bool = False,
    min_carry_share: float = 0.0,
) -> list[dict[str, Any]]:
    """The rows of `ArithmeticRows`, as a function.

    Raises:
        ValueError: if there are too few such problems.
    """
    generator = random.Random(f"{split}/{num_digits}/{seed}")
    plain_left = size - math.ceil(size * min_carry_share)
    problems: dict[tuple[int, str, int], None] = {}  # a dict keeps the order of the draw
    # A set that exists is found long before this many draws: the rarest of n problems takes about n·ln(n) draws.
    draws = 200 * size + 20_000
    for _ in range(draws):
        if len(problems) == size:
            break
        left, right = generator.randrange(10**num_digits), generator.randrange(10**num_digits)
        operator = generator.choice("+-") if subtraction else "+"
        if operator == "-":
            left, right = max(left, right), min(left, right)
        problem = (left, operator, right)
        if problem in problems or split_of(*problem) != split:
            continue
        if not has_carry(*problem):
            if plain_left == 0:
                continue
            plain_left -= 1
        problems[problem] = None
    if len(problems) < size:
        raise ValueError(
            f"only {len(problems)} of size={size} distinct {split!r} problems with num_digits={num_digits} and "
            f"min_carry_share={min_carry_share} turned up in {draws} draws: lower size or raise num_digits"
        )
    rows = [
        {"prompt": f"{left}{operator}{right}=", "answer": str(left + right if operator == "+" else left - right)}
        for left, operator, right in problems
    ]
    generator.shuffle(rows)  # plain problems would all stand at the front
    return rows


def split_of(left: int, operator: str, right: int) -> Split:
    """The split of a problem, by its hash; a sum and its mirror image are the same problem."""
    if operator == "+":
        left, right = min(left, right), max(left, right)
    digest = hashlib.sha256(f"{left}{operator}{right}".encode()).digest()
    return "val" if int.from_bytes(digest[:8], "big") < HELD_OUT_SHARE * 2**64 else "train"


def has_carry(left: int, operator: str, right: int) -> bool:
    """Whether written addition carries, or written subtraction borrows, at some digit.

    Example:
        ``has_carry(57, "+", 68)`` and ``has_carry(52, "-", 8)`` are True, ``has_carry(21, "+", 34)`` is False.
    """
    while left or right:
        a, b = left % 10, right % 10
        if (a + b > 9) if operator == "+" else (a < b):
            return True
        left, right = left // 10, right // 10
    return False
