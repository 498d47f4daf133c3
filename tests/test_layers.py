"""A folder imports only from lower layers, and nothing that it must not know."""

import ast
from pathlib import Path

import pytest

import lightning_megatron_rl

PACKAGE = "lightning_megatron_rl"
ROOT = Path(lightning_megatron_rl.__file__).parent
LAYERS = (  # from the lowest; a folder imports from lower layers only, and none of its own layer
    ("sample", "utilities", "compat"),
    ("algorithms", "rewards", "parallel"),
    ("environments", "planner", "weights", "report"),
    ("devices", "checkpoints"),
    ("strategy", "models"),
    ("data", "rollout"),
    ("callbacks",),
    ("modules",),
    ("cli",),
    ("convert", "doctor", "plan", "schema", "serve", "verify"),
    ("recipes",),
    ("__init__",),
    ("__main__",),
)
LAYER = {folder: number for number, folders in enumerate(LAYERS) for folder in folders}
HEAVY = {"megatron", "lightning", "vllm", "transformers"}
FORBIDDEN = {  # folders and third-party packages that a folder knows nothing of
    "sample": HEAVY | {"torch"},
    "utilities": {"megatron", "vllm", "transformers"},
    "algorithms": HEAVY,
    "rewards": HEAVY,
    "environments": {"algorithms"} | HEAVY,
    "planner": HEAVY | {"torch"},
    "devices": HEAVY,
    "report": HEAVY | {"torch"},
    "weights": {"transformers"},
    "parallel": {"transformers", "vllm"},
    "checkpoints": {"algorithms", "rewards", "transformers", "vllm"},
    "strategy": {"algorithms", "rewards", "transformers", "vllm"},
    "models": {"algorithms", "rewards", "vllm"},
    "data": {"algorithms", "vllm"},
    "rollout": {"algorithms"},
}


def folder_of(parts: list[str]) -> str:
    """Folder of a module, given its dotted path below the package; the package itself is `__init__`."""
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
    """Every import that goes up, sideways or to something that its folder must not know."""
    problems = []
    for path in sorted(root.rglob("*.py")):
        folder = folder_of(list(path.relative_to(root).with_suffix("").parts))
        if folder not in LAYER:
            problems.append(f"{path.relative_to(root)}: the folder {folder!r} has no layer, give it one in LAYERS")
            continue
        for line, target in imports(path, root):
            other = target[0]
            if other == PACKAGE:
                other = target[1] if len(target) > 1 and target[1] in LAYER else "__init__"
                if other != folder and LAYER[other] >= LAYER[folder]:
                    problems.append(
                        f"{path.relative_to(root)}:{line}: {folder} (layer {LAYER[folder]}) imports {other} "
                        f"(layer {LAYER[other]})"
                    )
            if other in FORBIDDEN.get(folder, ()):
                problems.append(f"{path.relative_to(root)}:{line}: {folder} must not know {other}")
    return problems


def test_imports_go_only_downwards():
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("folder", "line", "problem"),
    [
        ("algorithms", "from lightning_megatron_rl.rewards.base import Reward", "layer 1"),
        ("algorithms", "import torch, megatron.core", "must not know megatron"),
        ("strategy", "import lightning_megatron_rl.modules.grpo", r"imports modules"),
        ("strategy", "def f():\n    from lightning_megatron_rl import modules", "imports modules"),
        ("strategy", "def f():\n    from ..modules import grpo", "imports modules"),
        ("strategy", "def f():\n    from ..algorithms.tally import Tally", "must not know algorithms"),
        ("rollout", "from lightning_megatron_rl.data import prompts", "imports data"),
        ("callbacks", "import lightning_megatron_rl", "imports __init__"),
        ("kitchen", "", "has no layer"),
    ],
)
def test_wrong_import_is_found(tmp_path: Path, folder: str, line: str, problem: str):
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "thing.py").write_text(line)
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
