"""`Calculator`: a tool that the policy calls, and the rows that teach its syntax."""

import ast
import operator
import re
from collections.abc import Callable
from typing import Any

from lightning_megatron_rl.environments.base import (
    Action,
    Ending,
    Environment,
    EnvironmentSetupError,
    Episode,
    Reply,
)
from lightning_megatron_rl.sample import Prompt

_MAX_LENGTH = 200  # characters of an expression; what it makes of them then fits, too
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
        reply: The reply; `{result}` stands for the result, which is "error" for what is no expression.
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
        ValueError: It is no such expression, too long, or divides by zero.

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
