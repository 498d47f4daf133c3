"""The guessing game: hints, rewards of guesses that may be right, and its rows."""

import pytest

from examples.environments.guessing import GuessingRows, NumberGuessing
from lightning_megatron_rl.environments import (
    Action,
    Ending,
    EnvironmentSetupError,
    Reply,
)
from lightning_megatron_rl.sample import Prompt


def test_game():
    game = NumberGuessing(consistent_reward=0.5).start(Prompt([1], "1-20:", answer="13"), 0)
    replies = [game.step(Action(text, [1])) for text in ("10", "is it 5 or 16?", "10", "hm", "13")]
    assert replies == [
        Reply(">", reward=0.5),
        Reply("<", reward=0.5),
        Reply(">"),  # ruled out already
        Reply("?"),
        Reply(done=True, reward=0.5),
    ]
    assert game.finish("done") == Ending(1.0, True)


def test_not_found():
    game = NumberGuessing().start(Prompt([1], "1-20:", answer="13"), 0)
    game.step(Action("12", [1]))
    assert game.finish("max_turns") == Ending(0.0, False)


def test_secret_that_is_no_number_is_refused():
    with pytest.raises(EnvironmentSetupError, match="prompt 3 is 'x'"):
        NumberGuessing().start(Prompt([1], "", answer="x", index=3), 0)


def test_rows():
    rows = GuessingRows(size=200, low=3, high=5)()
    assert rows == GuessingRows(size=200, low=3, high=5)()
    assert {row["answer"] for row in rows} == {"3", "4", "5"}
    assert {row["prompt"] for row in rows} == {"3-5:"}
    with pytest.raises(ValueError, match="low=6"):
        GuessingRows(size=1, low=6, high=5)
