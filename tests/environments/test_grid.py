"""The grid game: walls, ways, rewards of progress, and maps on which every goal can be reached."""

import pytest

from examples.environments.grid import GridGame, GridRows, distances, parse_grid
from lightning_megatron_rl.environments import Action, Ending, EnvironmentSetupError, Reply
from lightning_megatron_rl.sample import Prompt

GRID = "S#G\n...\n"


def start(grid: object = GRID, **rules: float):
    return GridGame(**rules).start(Prompt([1], str(grid), columns={"grid": grid}, index=2), 0)


def test_walk_around_the_wall():
    walk = start(step_reward=-0.01, progress_reward=0.1)
    reply = walk.step(Action("RLU", [1]))  # wall, edge, edge
    assert (reply.text, reply.done) == (GRID, False)
    assert reply.reward == pytest.approx(-0.03)
    reply = walk.step(Action("Down, then RR", [1]))  # the letters D, R and R
    assert reply.text == ".#G\n..S\n"
    assert reply.reward == pytest.approx(3 * -0.01 + 3 * 0.1)
    reply = walk.step(Action("ULLL", [1]))  # the goal ends the turn: what follows is not walked
    assert reply == Reply(done=True, reward=pytest.approx(-0.01 + 0.1))
    assert walk.finish("done") == Ending(1.0, True)


def test_not_arrived():
    walk = start()
    walk.step(Action("D", [1]))
    assert walk.finish("max_turns") == Ending(0.0, False)


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (None, "holds None"),
        ("SG\n.", "no rectangle"),
        ("SxG", "no rectangle"),
        ("SS\n.G", "not one S"),
        ("S#G", "no way leads"),
        ("", "no rectangle"),
    ],
)
def test_maps_that_cannot_be_played_are_refused(grid: object, message: str):
    with pytest.raises(EnvironmentSetupError, match=f"prompt 2: .*{message}"):
        start(grid)


def test_rows_can_be_played():
    rows = GridRows(size=50, height=3, width=4, num_walls=4)()
    assert rows == GridRows(size=50, height=3, width=4, num_walls=4)()
    assert len({row["prompt"] for row in rows}) > 10
    for row in rows:
        assert row["prompt"] == row["grid"]
        grid = parse_grid(row["grid"])
        assert "".join(grid).count("#") == 4
        assert max(distances(grid).values()) >= 1
    with pytest.raises(ValueError, match=r"height\(1\) x width\(2\) = 2 places"):
        GridRows(size=1, height=1, width=2, num_walls=1)
