"""A room imports only from rooms below it, and no room imports what it must not know."""

import ast
from pathlib import Path

import pytest

import lightning_megatron_rl

PACKAGE = "lightning_megatron_rl"
ROOT = Path(lightning_megatron_rl.__file__).parent
FLOORS = {
    "sample": -1,  # the records that everybody shares
    "files": -4,
    "notices": -1,
    "text_files": -2,
    "config_files": -1,
    "ranges": -1,
    "arguments": -1,
    "cpus": -1,
    "leader": -1,
    "versions": -1,
    "buffers": -1,
    "run_settings": -1,
    "finite": -1,
    "rendezvous": -1,
    "console": -1,
    "masking": -2,  # under `run_settings`
    "remote_code": -1,
    "copies": -1,
    "cuda_memory": -3,
    "lent_weights": -2,  # under `weight_views`
    "copy_kernels": -2,  # under `copies`
    "weight_views": -1,
    "algorithms": 0,
    "rewards": 0,
    "compat": 0,
    "devices": 0,
    "strategy": 1,
    "models": 1,
    "environments": 1,  # bounded by the same deadlines as rewards
    "data": 2,
    "rollout": 2,
    "callbacks": 3,
    "modules": 4,
    "cli": 5,
    "convert": 6,  # knows what modules write into checkpoints
    "doctor": 6,
    "schema": 6,
    "verify": 6,  # reads the configs that the command line reads
    "__init__": 7,
    "__main__": 8,  # tells the version
}
FORBIDDEN = {  # rooms and third-party packages that a room knows nothing of
    "sample": {"megatron", "lightning", "vllm", "transformers"},
    "config_files": {"torch", "megatron", "lightning", "vllm", "transformers"},
    "text_files": {"torch", "megatron", "lightning", "vllm", "transformers"},
    "ranges": {"torch", "megatron", "lightning", "vllm", "transformers"},
    "files": {"torch", "megatron", "lightning", "vllm", "transformers"},
    "arguments": {"torch", "megatron", "lightning", "vllm", "transformers"},
    "cpus": {"torch", "megatron", "lightning", "vllm", "transformers"},
    "leader": {"torch", "megatron", "lightning", "vllm", "transformers"},
    "versions": {"torch", "megatron", "lightning", "vllm", "transformers"},
    "buffers": {"torch", "megatron", "lightning", "vllm", "transformers"},
    "run_settings": {"torch", "megatron", "lightning", "vllm", "transformers"},
    "finite": {"megatron", "lightning", "vllm", "transformers"},
    "masking": {"torch", "megatron", "lightning", "vllm", "transformers"},
    "console": {"torch", "megatron", "lightning", "vllm", "transformers"},
    "remote_code": {"torch", "megatron", "lightning", "vllm", "transformers"},
    "rendezvous": {"megatron", "lightning", "vllm", "transformers"},
    "copies": {"megatron", "lightning", "vllm", "transformers"},
    "cuda_memory": {"megatron", "lightning", "vllm", "transformers"},
    "lent_weights": {"megatron", "lightning", "vllm", "transformers"},
    "copy_kernels": {"megatron", "lightning", "vllm", "transformers"},
    "weight_views": {"megatron", "lightning", "vllm", "transformers"},
    "algorithms": {"megatron", "lightning", "vllm", "transformers"},
    "rewards": {"megatron", "lightning", "vllm", "transformers"},
    "devices": {"megatron", "lightning", "vllm", "transformers"},
    "strategy": {"algorithms", "rewards", "transformers", "vllm"},
    "models": {"algorithms", "rewards", "vllm"},
    "environments": {"algorithms", "megatron", "lightning", "vllm", "transformers"},
    "data": {"algorithms", "vllm"},
    "rollout": {"algorithms"},
}


def room_of(parts: list[str]) -> str:
    """Room of a module, given its dotted path below the package; the package itself is `__init__`."""
    return parts[0] if parts else "__init__"


def imports(path: Path, root: Path) -> list[tuple[int, list[str]]]:
    """Line and dotted path of everything that a file imports, at its top or inside functions."""
    found: list[tuple[int, list[str]]] = []
    package = [PACKAGE, *path.relative_to(root).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            found += [(node.lineno, [*base, alias.name]) for alias in node.names]
    return found


def violations(root: Path) -> list[str]:
    """Every import that goes up, sideways or to something that its room must not know."""
    problems = []
    for path in sorted(root.rglob("*.py")):
        room = room_of(list(path.relative_to(root).with_suffix("").parts))
        if room not in FLOORS:
            problems.append(f"{path.relative_to(root)}: the room {room!r} has no floor, give it one in FLOORS")
            continue
        for line, target in imports(path, root):
            other = target[0]
            if other == PACKAGE:
                other = target[1] if len(target) > 1 and target[1] in FLOORS else "__init__"
                if other != room and FLOORS[other] >= FLOORS[room]:
                    problems.append(
                        f"{path.relative_to(root)}:{line}: {room} (floor {FLOORS[room]}) imports {other} "
                        f"(floor {FLOORS[other]})"
                    )
            if other in FORBIDDEN.get(room, ()):
                problems.append(f"{path.relative_to(root)}:{line}: {room} must not know {other}")
    return problems


def test_imports_go_only_downwards():
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("room", "line", "problem"),
    [
        ("algorithms", "from lightning_megatron_rl.rewards.base import Reward", "floor 0"),
        ("algorithms", "import torch, megatron.core", "must not know megatron"),
        ("strategy", "import lightning_megatron_rl.modules.grpo", r"imports modules"),
        ("strategy", "def f():\n    from lightning_megatron_rl import modules", "imports modules"),
        ("strategy", "def f():\n    from ..modules import grpo", "imports modules"),
        ("strategy", "def f():\n    from ..algorithms.tally import Tally", "must not know algorithms"),
        ("rollout", "from lightning_megatron_rl.data import prompts", "imports data"),
        ("callbacks", "import lightning_megatron_rl", "imports __init__"),
        ("kitchen", "", "has no floor"),
    ],
)
def test_wrong_import_is_found(tmp_path: Path, room: str, line: str, problem: str):
    (tmp_path / room).mkdir()
    (tmp_path / room / "thing.py").write_text(line)
    (found,) = violations(tmp_path)
    assert problem in found


@pytest.mark.parametrize(
    "line",
    [
        "from lightning_megatron_rl.sample import Sample",
        "from .other import thing",
        "from ..models import logprobs",
        "import torch, vllm",
    ],
)
def test_right_import_passes(tmp_path: Path, line: str):
    (tmp_path / "rollout").mkdir()
    (tmp_path / "rollout" / "thing.py").write_text(line)
    assert violations(tmp_path) == []
