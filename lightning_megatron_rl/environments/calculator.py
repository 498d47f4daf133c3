"""`Calculator`: a tool that the policy calls, and the rows that teach its syntax."""

import ast
import hashlib
import operator
import random
import re
from collections.abc import Callable
from typing import Any, Literal

from lightning_megatron_rl.environments.base import (
    Action,
    Ending,
    Environment,
    EnvironmentSetupError,
    Episode,
    Reply,
)
from lightning_megatron_rl.sample import Prompt
from lightning_megatron_rl.utilities.ranges import COUNT, FINITE, SEED, check_ranges

_MAX_LENGTH = 200  # characters of an expression; what it makes of them then fits, too
_HELD_OUT = 51  # of 256 values of a hash's first byte: a fifth of all problems
_CHARACTERS = re.compile(r"[0-9.+\-*/%() ]*")
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


class Calculator(Environment):
    r"""Works out the expression that a turn ends with; a turn without one is the policy's answer.

    The reward is 1 if the answer is the prompt's, as text or as a number, else 0. With the default pattern a call is an
    expression in brackets, and ``sampling.stop: ["]"]`` ends a turn there.

    Args:
        call_pattern: Regular expression of a call, with one group for the expression; the last match counts.
        reply: The reply; `{result}` stands for the result, which is "error" if it cannot be evaluated.
        call_reward: Reward of a turn whose call has a result.
        name: What the tool is called in errors.

    Raises:
        ValueError: A pattern without one group, or a reply without `{result}`.

    Example:
        The turn "[57*68]" gets the reply "3876;". A next turn "3876" is right if the prompt's answer is "3876".
    """

    def __init__(
        self,
        call_pattern: str = r"\[([^\[\]]*)\]",
        reply: str = "{result};",
        call_reward: float = 0.0,
        name: str = "calculator",
    ) -> None:
        self.pattern = re.compile(call_pattern)
        if self.pattern.groups != 1:
            raise ValueError(f"call_pattern={call_pattern!r} has {self.pattern.groups} groups: one holds the call.")
        if "{result}" not in reply:
            raise ValueError(f"reply={reply!r} of the {name} does not contain {{result}}.")
        self.reply = reply
        check_ranges({"call_reward": FINITE}, locals())
        self.call_reward = call_reward
        self.name = name

    def start(self, prompt: Prompt, seed: int) -> Episode:
        """Return a conversation about the prompt.

        Raises:
            EnvironmentSetupError: The prompt has no answer.
        """
        if prompt.answer is None:
            raise EnvironmentSetupError(f"the {self.name} needs an answer, prompt {prompt.index} has none")
        return _Calculation(self, prompt.answer)


class _Calculation(Episode):
    def __init__(self, tool: Calculator, answer: str) -> None:
        self.tool = tool
        self.answer = answer
        self.given = ""

    def step(self, action: Action) -> Reply:
        calls = self.tool.pattern.findall(action.text)
        if not calls:
            self.given = action.text
            return Reply(done=True)
        try:
            result = evaluate(calls[-1])
        except ValueError:
            return Reply(self.tool.reply.replace("{result}", "error"))
        return Reply(self.tool.reply.replace("{result}", result), reward=self.tool.call_reward)

    def finish(self, reason: str) -> Ending:
        right = reason == "done" and _same(self.given.strip(), self.answer.strip())
        return Ending(float(right), success=right)


def evaluate(expression: str) -> str:
    """Return the value of an expression of numbers, + - * / // % and parentheses; whole values without a point.

    Nothing else is looked at: no names, calls or powers, so what a policy writes can neither run code nor take long.

    Raises:
        ValueError: It is not such an expression, is too long, or divides by zero.

    Example:
        ``evaluate("(2+3)*4") == "20"`` and ``evaluate("1/8") == "0.125"``.
    """
    if len(expression) > _MAX_LENGTH or not _CHARACTERS.fullmatch(expression):
        raise ValueError(f"{expression[:_MAX_LENGTH]!r} is no expression of numbers, or too long")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ArithmeticError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression!r} is no expression with a value: {error}") from error
    if isinstance(value, float):
        if value != value or value in (float("inf"), -float("inf")):
            raise ValueError(f"{expression!r} has no finite value")
        return str(int(value)) if value.is_integer() else f"{value:.10g}"
    return str(value)


def _value(node: ast.AST) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.operand))
    raise ValueError(f"{type(node).__name__} is not part of an expression")


def _same(given: str, answer: str) -> bool:
    if given == answer:
        return True
    try:
        return float(given) == float(answer)
    except ValueError:
        return False


class CalculatorRows:
    """Rows for `Calculator`: ``{"prompt": "57*68=", "answer": "3876"}``, the same for the same arguments.

    Which split a problem belongs to depends on a hash of the problem alone, so no `train` row is a `val` row.

    Args:
        split: `train`, or `val` for the held-out problems, a fifth of all.
        size: Number of rows.
        num_digits: Most digits of an operand.
        seed: Seed of the draw.
        turns: Instead of problems, the turns of right conversations as prompt and answer, to learn the calls from:
            half of them "57*68=" with "[57*68]", half "57*68=[57*68]3876;" with "3876".

    Raises:
        ValueError: Fewer rows or digits than one, or, when called, fewer problems than rows.
    """

    def __init__(
        self, split: Literal["train", "val"], size: int, num_digits: int = 2, seed: int = 0, turns: bool = False
    ) -> None:
        if split not in ("train", "val"):
            raise ValueError(f"split={split!r} must be train or val.")
        check_ranges({"size": COUNT, "num_digits": COUNT, "seed": SEED}, locals())
        self.split = split
        self.size = size
        self.num_digits = num_digits
        self.seed = seed
        self.turns = turns

    def __call__(self) -> list[dict[str, Any]]:
        """Draw the rows."""
        draw = random.Random(f"{self.split}/{self.num_digits}/{self.seed}")
        problems: dict[str, None] = {}  # a dict keeps the order of the draw
        draws = 50 * self.size + 10_000
        for _ in range(draws):
            operands = [draw.randrange(10**self.num_digits) for _ in range(2)]
            problem = f"{operands[0]}{draw.choice('+-*')}{operands[1]}"
            held_out = hashlib.sha256(problem.encode()).digest()[0] < _HELD_OUT
            if held_out == (self.split == "val"):
                problems.setdefault(problem)
            if len(problems) == self.size:
                break
        else:
            raise ValueError(
                f"only {len(problems)} of size={self.size} {self.split} problems with num_digits={self.num_digits}"
                f" turned up in {draws} draws: lower size or raise num_digits."
            )
        return [self._row(problem, number) for number, problem in enumerate(problems)]

    def _row(self, problem: str, number: int) -> dict[str, Any]:
        result = evaluate(problem)
        if not self.turns:
            return {"prompt": f"{problem}=", "answer": result}
        if number % 2:
            return {"prompt": f"{problem}=[{problem}]{result};", "answer": result}
        return {"prompt": f"{problem}=", "answer": f"[{problem}]"}
