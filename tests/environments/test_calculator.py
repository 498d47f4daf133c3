"""The calculator: what it works out, what it refuses to look at, and a whole conversation."""

import time

import pytest

from lightning_megatron_rl.environments import (
    Action,
    Calculator,
    CalculatorRows,
    Ending,
    EnvironmentSetupError,
    Reply,
)
from lightning_megatron_rl.environments.calculator import evaluate
from lightning_megatron_rl.sample import Prompt


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("57+68", "125"),
        (" (2+3)*-4 ", "-20"),
        ("7//2", "3"),
        ("7%4", "3"),
        ("1/8", "0.125"),
        ("6/3", "2"),
        ("1.5*2", "3"),
        ("99999999999*99999999999", "9999999999800000000001"),
    ],
)
def test_values(expression: str, value: str):
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["", "1+", "1/0", "9**9**9**9", "__import__('os')", "a", "1,2", "[1]", "(1", "1e5", "1or 2", "9" * 201, "(" * 150],
)
def test_everything_else_is_refused_at_once(expression: str):
    started = time.monotonic()
    with pytest.raises(ValueError):
        evaluate(expression)
    assert time.monotonic() - started < 1  # 9**9**9**9 would take for ever


def test_conversation():
    prompt = Prompt([1], "57*68-1=", answer="3875")
    episode = Calculator(call_reward=0.1).start(prompt, 0)
    assert episode.step(Action("[57*68]", [1])) == Reply("3876;", reward=0.1)
    assert episode.step(Action("[57*]", [1])) == Reply("error;")
    assert episode.step(Action("no [1+1] but [3876-1]", [1])) == Reply("3875;", reward=0.1)
    assert episode.step(Action(" 3875.0 ", [1])) == Reply(done=True)
    assert episode.finish("done") == Ending(1.0, True)


@pytest.mark.parametrize(("given", "reason"), [("3876", "done"), ("", "done"), ("many", "done")])
def test_wrong_answers(given: str, reason: str):
    episode = Calculator().start(Prompt([1], "57*68-1=", answer="3875"), 0)
    assert episode.step(Action(given, [1])).done
    assert episode.finish(reason) == Ending(0.0, False)


def test_no_answer_within_the_limits_is_wrong():
    episode = Calculator().start(Prompt([1], "1+1=", answer=""), 0)
    assert not episode.step(Action("[1+1]", [1])).done
    assert episode.finish("max_turns") == Ending(0.0, False)


def test_settings_and_prompts_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="has 0 groups"):
        Calculator(call_pattern="x")
    with pytest.raises(ValueError, match="does not contain"):
        Calculator(reply="so")
    with pytest.raises(EnvironmentSetupError, match="prompt 4 has none"):
        Calculator().start(Prompt([1], "1+1=", index=4), 0)


def test_rows_are_solved_by_their_own_turns():
    train, val = CalculatorRows("train", 300)(), CalculatorRows("val", 100)()
    assert train == CalculatorRows("train", 300)()
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in val}
    assert len({row["prompt"] for row in train}) == 300
    for row, other in zip(train, CalculatorRows("train", 300, turns=True)(), strict=True):
        episode = Calculator().start(Prompt([1], row["prompt"], answer=row["answer"]), 0)
        call = f"[{row['prompt'][:-1]}]"
        reply = episode.step(Action(call, [1]))
        assert reply.text == f"{row['answer']};"
        asked = (row["prompt"], call), (f"{row['prompt']}{call}{reply.text}", row["answer"])
        assert (other["prompt"], other["answer"]) in asked
        assert episode.step(Action(row["answer"], [1])).done
        assert episode.finish("done") == Ending(1.0, True)
    with pytest.raises(ValueError, match="turned up"):
        CalculatorRows("val", 200, num_digits=1)()
    with pytest.raises(ValueError, match="size=0"):
        CalculatorRows("val", 0)
