"""Unit tests in the sandbox: what passes, what only pretends to, and data without tests."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from lightning_megatron_rl.rewards import CodeTests, RewardSetupError, SandboxLimits
from lightning_megatron_rl.rewards.code_tests import extract_code
from lightning_megatron_rl.sample import Sample
from lightning_megatron_rl.utilities.cpus import UsableCPUs
from tests.distributed import CHILD_PATH
from tests.rewards.samples import make_sample

ADD = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add('a', 'b') == 'ab'"]
SUMS = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 5\n", "output": "10"}]
LIMITS = SandboxLimits(wall_seconds=5.0, cpu_seconds=1)


def with_tests(response: str, tests: object = ADD, index: int = 0) -> Sample:
    sample = make_sample(response, index=index)
    sample.prompt.columns["tests"] = tests
    return sample


@pytest.fixture(scope="module")
def reward() -> CodeTests:
    return CodeTests(partial=True, limits=LIMITS, concurrency=2)


RIGHT = "def add(a, b):\n    return a + b\n"
MODULE_OF_CLASS = """
from __future__ import annotations
import pickle
from dataclasses import dataclass
@dataclass
class Pair:
    a: int
    b: int
def add(a, b):
    pair = pickle.loads(pickle.dumps(Pair(a, b)))
    return pair.a + pair.b
"""
FORGED = """
class Equal:
    def __eq__(self, other): raise SystemExit(0)
def add(a, b): return Equal()
"""


@pytest.mark.parametrize(
    ("response", "share"),
    [
        (RIGHT, 1.0),
        (f"First:\n```python\nx\n```\nbetter:\n```python\n{RIGHT}```\nDone.", 1.0),
        (RIGHT + "print('x' * 10)\nimport sys; sys.stderr.write('noise')", 1.0),
        (MODULE_OF_CLASS, 1.0),
        ("1. So:\n\n   ```python\n   def add(a, b):\n       return a + b\n   ```\n", 1.0),
        (f"With ```add``` as\n```python\n{RIGHT}```", 1.0),
        ("def add(a, b):\n    return a - b\n", 0.0),
        ("def add(a, b):\n    return int(a) + int(b)\n", 2 / 3),
        ("no code at all", 0.0),
        ("", 0.0),
        ("import os; os._exit(0)", 0.0),
        ("raise SystemExit(0)", 0.0),
        (RIGHT + "while True: pass", 0.0),
        (FORGED, 0.0),
        ("import os\nfor fd in range(1, 64):\n    try: os.write(fd, b'0\\n1\\n2\\n')\n    except OSError: pass", 0.0),
        ("def add(a, b):\n    if a == -1:\n        while True: pass\n    return a + b", 1 / 3),
        ("print(open('spec.json').read())\n" + RIGHT, 0.0),
    ],
    ids=str,
)
def test_python_tests(reward, response, share):
    assert reward([with_tests(response)]) == [pytest.approx(share)]


def test_all_or_nothing_and_order():
    reward = CodeTests(limits=LIMITS)
    half = "def add(a, b):\n    return int(a) + int(b)\n"
    samples = [with_tests(half), with_tests(RIGHT), with_tests("x"), with_tests(RIGHT, json.dumps(ADD))]
    assert reward(samples) == [0.0, 1.0, 0.0, 1.0]
    whole = "def check(f):\n    assert f(1, 1) == 2\ncheck(add)"
    assert reward([with_tests(RIGHT, whole)]) == [1.0]


def test_programs_with_input_and_output(reward):
    program = "a, b = map(int, input().split())\nprint(a + b, ' ')\n"
    constant = "print(3)"
    crash = program + "1 / 0"
    assert reward([with_tests(text, SUMS) for text in (program, constant, crash)]) == [1.0, 0.5, 0.0]
    assert CodeTests(limits=LIMITS)([with_tests(text, SUMS) for text in (program, constant)]) == [1.0, 0.0]


def test_a_program_is_not_run_on_after_a_test_that_it_has_failed(monkeypatch):
    """A program that waits until its deadline takes that long for each test."""
    reward, inputs = CodeTests(limits=LIMITS), []
    run = reward.sandbox.run

    def noted(code: str, stdin: str):
        inputs.append(stdin)
        return run(code, stdin)

    monkeypatch.setattr(reward.sandbox, "run", noted)
    tests = [{"input": f"{number}", "output": "0"} for number in range(4)]
    assert reward([with_tests("print(int(input()) // 2)", [*tests, tests[0]])]) == [0.0]
    assert inputs == ["0", "1", "2"]


def test_a_long_output_is_compared_to_its_end(reward):
    tests = [{"input": "200000", "output": "".join(f"{number}\n" for number in range(200_000))}]  # 1.3 MB
    assert reward([with_tests("for number in range(int(input())): print(number)", tests)]) == [1.0]
    assert reward([with_tests("for number in range(int(input()) - 1): print(number)", tests)]) == [0.0]


@pytest.mark.parametrize("tests", [None, [], 7, [1], ["assert x", {"input": "1", "output": "2"}], [{"input": "1"}]])
def test_prompt_without_tests_is_refused(reward, tests):
    with pytest.raises(RewardSetupError, match=r"'code_tests' needs tests in the column 'tests'.*prompt 4"):
        reward([with_tests(RIGHT), with_tests(RIGHT, tests, index=4)])


def weak_reward(**options) -> CodeTests:
    """Without namespaces, as in a container that may not make any."""
    python = "/usr/bin/python3" if os.getuid() == 0 and os.path.exists("/usr/bin/python3") else None
    reward = CodeTests(python=python, **options)
    reward.sandbox.levels = ("user", "limits")
    return reward


def test_required_protections():
    with pytest.raises(ValueError, match=r"require=\['internet'\].*the protections are cpu, memory"):
        CodeTests(require=["internet"])
    reward = weak_reward(require=["network"])
    with pytest.raises(RewardSetupError, match="requires network, which this machine does not grant: sandbox level"):
        reward([with_tests(RIGHT)])


def test_nowhere_to_run_is_an_error_of_the_set_up():
    reward = CodeTests()
    reward.sandbox.levels = ("limits",) if os.getuid() == 0 else ("user",)
    with pytest.raises(RewardSetupError, match="has nowhere to run code: no sandbox can be made here"):
        reward([with_tests(RIGHT)])


def test_missing_protections_are_named_once(recwarn):
    reward = weak_reward(limits=LIMITS)
    for _ in range(2):
        assert reward([with_tests(RIGHT)]) == [1.0]
    (message,) = [str(warning.message) for warning in recwarn.list if "untrusted" in str(warning.message)]
    assert "network (no network)" in message


def test_extract_code():
    assert extract_code("```\na\n```") == "a\n"
    assert extract_code("```py\na\n```\n```js\nb\n```") == "a\n"
    assert extract_code("x = 1") == "x = 1"


def test_what_a_program_prints_is_not_taken_for_the_program(reward):
    """A block without a language behind the code was the code: right answers with an example of output had 0."""
    response = f"```python\n{RIGHT}```\nIt prints:\n```\n3\n```"
    assert extract_code(response) == RIGHT
    assert reward([with_tests(response)]) == [1.0]


@pytest.mark.parametrize("language", ["text", "bash", "c++", "json title=in"])
def test_a_block_of_another_language_does_not_move_the_fences(reward, language):
    """Its end was taken for the beginning of a block, and what stands between the two for the code."""
    response = f"Input:\n```{language}\n1 2\n```\nSolution:\n```python\n{RIGHT}```"
    assert extract_code(response) == RIGHT
    assert reward([with_tests(response)]) == [1.0]


@pytest.mark.parametrize(
    "tests",
    [
        '{"inputs": ["1 2\\n"], "outputs": ["3\\n"]}',  # of APPS: as Python it is a dictionary
        ['{"input": "1 2", "output": "3"}'],
        "def check(candidate):\n    assert candidate(1, 1) == 2\n",  # of HumanEval: nobody calls it
        "import unittest\nMETA = {'author': 'x'}\nclass Test(unittest.TestCase): pass",
        [""],
        ["# assert add(1, 2) == 3"],
    ],
)
def test_tests_that_every_response_would_pass_are_refused(reward, tests):
    with pytest.raises(RewardSetupError, match=r"every response would pass.*Call what they define"):
        reward([with_tests("no code at all", tests)])


def test_what_a_test_needs_may_stand_before_it(reward):
    tests = ["import math", "x = 1\ndef check(f):\n    assert f(x, 2) == 3", "check(add)"]
    assert reward([with_tests(RIGHT, tests)]) == [1.0]


def test_programs_of_all_ranks_together_have_a_cpu_each(monkeypatch):
    """On two CPUs, of 16 programs of 2 s at once none ends within 10 s; each was right alone."""
    monkeypatch.delenv("LIGHTNING_MEGATRON_RL_CPUS", raising=False)
    monkeypatch.setattr("lightning_megatron_rl.utilities.cpus.usable_cpus", lambda: UsableCPUs(8, "affinity"))
    reward, lock, running, most = CodeTests(limits=LIMITS), threading.Lock(), set[str](), list[int]()  # before any rank
    reward._checked = True

    def noted(code: str, tests: list) -> float:
        with lock:
            running.add(code)
            most.append(len(running))
        time.sleep(0.05)
        with lock:
            running.remove(code)
        return 1.0

    monkeypatch.setattr(reward, "_share_passed", noted)
    for variable, share in (("LOCAL_WORLD_SIZE", "4"), ("LIGHTNING_MEGATRON_RL_CPUS", "3")):
        monkeypatch.setenv(variable, share)
        most.clear()
        assert reward([with_tests(f"x = {number}") for number in range(12)]) == [1.0] * 12
        assert max(most) == {"4": 2, "3": 3}[share]


SLOW_PROGRAMS = """
import threading, time
from lightning_megatron_rl.rewards import CodeTests
from lightning_megatron_rl.sample import Prompt, Sample
reward = CodeTests(concurrency=2)
reward._checked = True
reward._share_passed = lambda code, tests: [print("ran", flush=True), time.sleep(0.3)]
prompt = Prompt([1], "a", columns={"tests": ["assert x"]})
threading.Thread(target=reward, args=([Sample(prompt, [1], [0.0], "x")] * 100,), daemon=True).start()
time.sleep(0.5)
"""


def test_the_end_of_the_process_waits_for_no_program_that_has_not_begun():
    """After Ctrl-C, or an error of another rank, the programs of a whole rollout were run first."""
    environment = {**os.environ, "PYTHONPATH": CHILD_PATH}
    command = [sys.executable, "-c", SLOW_PROGRAMS]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert 2 <= ended.stdout.count("ran") <= 20, ended.stderr  # two every 0.3 s, within 0.5 s and the end of those
