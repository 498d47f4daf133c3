"""Unit tests as a reward: code from the response runs in the sandbox against the tests that came with the prompt."""

import ast
import json
import re
import secrets
import textwrap
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from lightning_megatron_rl.rewards.base import RewardSetupError, describe_sample
from lightning_megatron_rl.rewards.deadline import call_in_threads
from lightning_megatron_rl.rewards.sandbox import MEANING, Sandbox, SandboxError, SandboxLimits
from lightning_megatron_rl.sample import Sample
from lightning_megatron_rl.utilities.cpus import cpu_share
from lightning_megatron_rl.utilities.ranges import COUNT, check_ranges

# Runs as the sandbox's program. What the code prints goes nowhere; a test has passed when its line, which begins with
# a number that the code is not told, arrives on the true standard output. Ending the process early passes nothing.
_RUNNER = """
import json, os, sys, types
report, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
os.dup2(nowhere, 1)
with open("spec.json") as file:
    spec = json.load(file)
os.remove("spec.json")
def run(spec, report):
    token, tests, solution = spec["token"], spec["tests"], types.ModuleType("solution")
    sys.modules["solution"] = solution  # dataclasses and pickle look for the module of a class
    scope = solution.__dict__
    try:
        exec(compile(spec["code"], "solution.py", "exec"), scope)
    except BaseException:
        return
    for number, test in enumerate(tests):
        try:
            exec(compile(test, f"test {number}", "exec"), scope)
        except BaseException:
            continue
        os.write(report, f"{token} {number}\\n".encode())
run(spec, report)
os._exit(0)
"""
# of any language: each closes with its own; one within a line is no block
_FENCE = re.compile(r"```[^`\n]+```|```[ \t]*([^\s`]*)[^\n`]*\n(.*?)```", re.DOTALL)
_PYTHON = ("python", "py", "python3")
# of a Python test whose every statement is one of these, nothing can fail
_IDLE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Pass)


class CodeTests:
    """1.0 where the code in the response passes all tests of its prompt, in the sandbox.

    The code is the last block between ``` fences that is Python, else the last that names no language, else the whole
    response. The tests are a column of the data set, a list (or JSON of one): either Python, each item run after the
    code (``assert add(1, 2) == 3``), or objects with "input" and "output": the code is then a program whose standard
    output must be that, up to spaces at line ends. Python tests run in the code's own process, and code that searches
    its memory for the tests' outcome could forge it; programs with input and output are judged from outside.

    Args:
        tests_column: Column with the tests.
        partial: Give the fraction of passed tests instead of 1.0 for all.
        limits: What each run may use.
        concurrency: Runs at one time; this rank's share of the CPUs if not given. With more, programs wait for each
            other, and right ones may run into the limit of wall time.
        require: Protections without which the run ends instead of going on with those that the kernel grants.
        python: Interpreter of the programs, below /usr; this process's if not given.
        name: What it is called in the logs.

    Raises:
        ValueError: A protection of an unknown name, an interpreter that is not there.

    Example:
        ``CodeTests(require=["network"])`` on the response "def add(a, b): return a + b".
    """

    def __init__(
        self,
        tests_column: str = "tests",
        partial: bool = False,
        limits: SandboxLimits = SandboxLimits(),  # noqa: B008  (frozen)
        concurrency: int | None = None,
        require: Sequence[str] = (),
        python: str | None = None,
        name: str = "code_tests",
    ) -> None:
        unknown = sorted(set(require) - MEANING.keys())
        if unknown:
            raise ValueError(f"require={unknown} of the reward {name!r}: the protections are {', '.join(MEANING)}")
        self.tests_column = tests_column
        self.partial = partial
        check_ranges({"concurrency": COUNT}, locals(), f"reward {name!r}: ")
        self.concurrency = concurrency
        self.require = tuple(require)
        self.name = name
        self.sandbox = Sandbox(limits, python=python)
        self._checked = False

    def __call__(self, samples: list[Sample]) -> list[float]:
        """Return a number in [0, 1] per sample; without tests or required protections a RewardSetupError."""
        tests = [self._tests(sample) for sample in samples]
        if not self._checked:
            self._check_protections()
        codes = [extract_code(sample.final_text) for sample in samples]
        calls = [partial(self._share_passed, code, of_it) for code, of_it in zip(codes, tests, strict=True)]
        shares = call_in_threads(calls, self.concurrency or cpu_share())
        return shares if self.partial else [float(share == 1.0) for share in shares]

    def _check_protections(self) -> None:
        try:
            missing = [name for name in self.require if name not in self.sandbox.active]
            inactive = self.sandbox.inactive
        except SandboxError as error:
            raise RewardSetupError(f"the reward {self.name!r} has nowhere to run code: {error}") from error
        if missing:
            raise RewardSetupError(
                f"the reward {self.name!r} requires {', '.join(missing)}, which this machine does not grant: "
                f"{self.sandbox.describe()}. Allow unprivileged user namespaces, or shorten `require`."
            )
        if inactive:
            lacking = "; ".join(f"{name} ({MEANING[name]})" for name in inactive)
            warnings.warn(
                f"the reward {self.name!r} runs untrusted code without: {lacking}. {self.sandbox.describe()}",
                RuntimeWarning,
                stacklevel=3,
            )
        self._checked = True

    def _tests(self, sample: Sample) -> list[Any]:
        tests = sample.prompt.columns.get(self.tests_column)
        if isinstance(tests, str) and tests.lstrip().startswith("["):
            with suppress(ValueError):  # Python may begin with a bracket, too
                tests = json.loads(tests)
        if isinstance(tests, str):
            tests = [tests]
        if not isinstance(tests, list | tuple) or not tests or not (_are_python(tests) or _are_pairs(tests)):
            raise RewardSetupError(
                f"the reward {self.name!r} needs tests in the column {self.tests_column!r}, but it holds "
                f"{str(tests)[:100]} for {describe_sample(sample)}: give a list of Python statements, or of objects "
                'with the texts "input" and "output"'
            )
        if _are_python(tests) and not any(_can_fail(test) for test in tests):
            raise RewardSetupError(
                f"the tests of the reward {self.name!r} in the column {self.tests_column!r} are {str(tests)[:100]} for "
                f"{describe_sample(sample)}: as Python they only define things or are data, so every response would "
                "pass them. Call what they define (check(add)), or give inputs and outputs as a list of objects "
                '{"input": "1 2", "output": "3"}'
            )
        return list(tests)

    def _share_passed(self, code: str, tests: list[Any]) -> float:
        passed = self._run_pairs(code, tests) if _are_pairs(tests) else self._run_python(code, tests)
        return passed / len(tests)

    def _run_python(self, code: str, tests: list[str]) -> int:
        token = secrets.token_hex(16)
        spec = json.dumps({"code": code, "tests": tests, "token": token})
        lines = set(self.sandbox.run(_RUNNER, files={"spec.json": spec}).stdout.splitlines())
        return sum(f"{token} {number}" in lines for number in range(len(tests)))

    def _run_pairs(self, code: str, tests: list[dict[str, str]]) -> int:
        passed = 0
        for number, test in enumerate(tests, start=1):
            result = self.sandbox.run(code, stdin=test["input"])
            passed += result.code == 0 and _lines(result.stdout) == _lines(test["output"])
            if passed < number and not self.partial:
                break  # it cannot pass all of them any more
        return passed


def extract_code(response: str) -> str:
    """Return the last fenced block of a response that is Python, else the last of no language, else all of it.

    A block of no language behind the code is what it prints. The code of a block that is indented as a whole, in a list
    say, is not.

    Example:
        ``extract_code("So:\\n```python\\nx = 1\\n```") == "x = 1\\n"``
    """
    found = [(language.lower(), code) for language, code in _FENCE.findall(response) if code]
    blocks = [code for language, code in found if language in _PYTHON] or [code for name, code in found if not name]
    return textwrap.dedent(blocks[-1]) if blocks else response


def _can_fail(test: str) -> bool:
    """Whether a Python test does more than define, import or hold data: otherwise every response passes it."""
    try:
        statements = ast.parse(test).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True
    return any(not isinstance(statement, _IDLE) and not _is_literal(statement) for statement in statements)


def _is_literal(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.Expr | ast.Assign | ast.AnnAssign) or statement.value is None:
        return False
    try:
        ast.literal_eval(statement.value)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return False
    return True


def _are_python(tests: Sequence[Any]) -> bool:
    return all(isinstance(test, str) for test in tests)


def _are_pairs(tests: Sequence[Any]) -> bool:
    return all(
        isinstance(test, dict) and isinstance(test.get("input"), str) and isinstance(test.get("output"), str)
        for test in tests
    )


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
