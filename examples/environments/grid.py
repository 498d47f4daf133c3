"""`GridGame`: the policy walks over a small map from S to G, around walls."""

import random
from collections import deque
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
from lightning_megatron_rl.utilities.ranges import COUNT, COUNT_OR_NONE, FINITE, SEED, check_ranges

_MOVES = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}
_START, _GOAL, _WALL, _FREE = "SG#."


class GridGame(Environment):
    """The letters U, D, L and R of a turn are steps; the reply is the map with S where the policy now stands.

    The map is the column `grid` of the prompt's row: lines of S, G, # (wall) and . (free). A step into a wall or off
    the map is not taken. The reward is 1 at the goal.

    Args:
        step_reward: Reward of each step, taken or not; a small negative number asks for short ways.
        progress_reward: Reward of a turn for each step that it came nearer to the goal, by the shortest way.

    Example:
        On "S.G" the turn "R" gets the reply ".SG", a second one reaches the goal.
    """

    def __init__(self, step_reward: float = 0.0, progress_reward: float = 0.0) -> None:
        check_ranges({"step_reward": FINITE, "progress_reward": FINITE}, locals())
        self.step_reward = step_reward
        self.progress_reward = progress_reward

    def start(self, prompt: Prompt, seed: int) -> Episode:
        """Return a walk.

        Raises:
            EnvironmentSetupError: The row has no map with one S, and one G that can be reached.
        """
        grid = prompt.columns.get("grid")
        try:
            return _Walk(self, parse_grid(grid))
        except ValueError as error:
            raise EnvironmentSetupError(f"prompt {prompt.index}: {error}") from error


class _Walk(Episode):
    def __init__(self, rules: GridGame, grid: list[str]) -> None:
        self.rules = rules
        self.grid = grid
        self.place = _find(grid, _START)
        self.distances = distances(grid)

    def step(self, action: Action) -> Reply:
        reward, before = 0.0, self.distances[self.place]
        for letter in action.text:
            if letter not in _MOVES:
                continue
            reward += self.rules.step_reward
            down, right = _MOVES[letter]
            target = self.place[0] + down, self.place[1] + right
            self.place = target if target in self.distances else self.place
            if self.distances[self.place] == 0:
                break
        reward += self.rules.progress_reward * (before - self.distances[self.place])
        if self.distances[self.place] == 0:
            return Reply(done=True, reward=reward)
        return Reply(self.picture(), reward=reward)

    def picture(self) -> str:
        """The map as it is now, each line with its break."""
        rows = [row.replace(_START, _FREE) for row in self.grid]
        row, column = self.place
        rows[row] = rows[row][:column] + _START + rows[row][column + 1 :]
        return "".join(f"{line}\n" for line in rows)

    def finish(self, reason: str) -> Ending:
        arrived = self.distances[self.place] == 0
        return Ending(float(arrived), success=arrived)


def parse_grid(text: Any) -> list[str]:
    """Return the lines of a map.

    Raises:
        ValueError: It is no rectangle of S, G, # and . with one S and one G, or G cannot be reached.

    Example:
        ``parse_grid("S.\\n#G\\n") == ["S.", "#G"]``
    """
    if not isinstance(text, str):
        raise ValueError(f"the column grid holds {text!r}, not a map as text")
    lines = text.split()
    letters = "".join(lines)
    if not lines or len({len(line) for line in lines}) != 1 or set(letters) - {_START, _GOAL, _WALL, _FREE}:
        raise ValueError(f"the map {text!r} is no rectangle of {_START}, {_GOAL}, {_WALL} and {_FREE}")
    if letters.count(_START) != 1 or letters.count(_GOAL) != 1:
        raise ValueError(f"the map {text!r} has not one {_START} and one {_GOAL}")
    if _find(lines, _START) not in distances(lines):
        raise ValueError(f"on the map {text!r} no way leads from {_START} to {_GOAL}")
    return lines


def distances(grid: list[str]) -> dict[tuple[int, int], int]:
    """Return the steps from each place to the goal, for those from which it can be reached.

    Example:
        ``distances(["S.G"]) == {(0, 2): 0, (0, 1): 1, (0, 0): 2}``
    """
    goal = _find(grid, _GOAL)
    found = {goal: 0}
    queue = deque([goal])
    while queue:
        row, column = queue.popleft()
        for down, right in _MOVES.values():
            place = row + down, column + right
            inside = 0 <= place[0] < len(grid) and 0 <= place[1] < len(grid[0])
            if inside and place not in found and grid[place[0]][place[1]] != _WALL:
                found[place] = found[row, column] + 1
                queue.append(place)
    return found


def _find(grid: list[str], letter: str) -> tuple[int, int]:
    return next((row, line.index(letter)) for row, line in enumerate(grid) if letter in line)


class GridRows:
    """Rows for `GridGame`, whose prompt is the map itself, the same for the same arguments; every goal can be reached.

    Args:
        size: Number of rows.
        height: Lines of a map.
        width: Places of a line.
        num_walls: Walls on a map.
        seed: Seed of the draw.

    Raises:
        ValueError: No rows, or maps without room for S, G and the walls.

    Example:
        ``GridRows(size=100, height=3, width=3, num_walls=2)()``
    """

    def __init__(self, size: int, height: int = 3, width: int = 3, num_walls: int = 1, seed: int = 0) -> None:
        sizes = dict.fromkeys(("size", "height", "width"), COUNT)
        check_ranges({**sizes, "num_walls": COUNT_OR_NONE, "seed": SEED}, locals())
        if height * width < num_walls + 2:
            raise ValueError(
                f"height({height}) x width({width}) = {height * width} places have no room for S, G and"
                f" num_walls={num_walls}."
            )
        self.size = size
        self.height = height
        self.width = width
        self.num_walls = num_walls
        self.seed = seed

    def __call__(self) -> list[dict[str, Any]]:
        """Draw the rows.

        Raises:
            ValueError: With so many walls hardly any goal can be reached.
        """
        draw = random.Random(f"{self.height}/{self.width}/{self.num_walls}/{self.seed}")
        free = self.height * self.width - self.num_walls - 2
        letters = list(_START + _GOAL + _WALL * self.num_walls + _FREE * free)
        rows: list[dict[str, Any]] = []
        for _ in range(100 * self.size):
            draw.shuffle(letters)
            text = "".join(letters)
            grid = "".join(f"{text[at : at + self.width]}\n" for at in range(0, len(text), self.width))
            try:
                parse_grid(grid)
            except ValueError:
                continue
            rows.append({"prompt": grid, "grid": grid, "answer": None})
            if len(rows) == self.size:
                return rows
        raise ValueError(
            f"only {len(rows)} of size={self.size} maps with num_walls={self.num_walls} have a way: lower it"
        )
