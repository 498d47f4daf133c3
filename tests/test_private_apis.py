"""Private names of other libraries are used in `compat/` and one file of `checkpoints/`, each with a row in a table."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_megatron_rl

ROOT = Path(lightning_megatron_rl.__file__).parent
TABLE = ROOT.parent / "docs" / "private_apis.md"
ALLOWED = ("compat/", "checkpoints/shards.py")
FRAMES = {"f_locals", "_getframe"}  # what another function holds
OWN = {"self", "cls", "super()"}  # what a class inherits is a matter of its base class
PUBLIC = {"os._exit"}  # Python documents it

Use = tuple[str, str]  # file, name


def is_private(name: str) -> bool:
    """Whether it begins with one underscore."""
    return name.startswith("_") and not name.startswith("__")


def names_of(tree: ast.AST) -> Iterator[str]:
    """Everything that a file defines: functions, classes, variables, attributes of its own objects, arguments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if ast.unparse(node.value) in OWN:
                yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg


def uses(tree: ast.AST, own: set[str]) -> Iterator[str]:
    """Private names that are not this package's, and looks into other functions' frames."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            parts = (node.module or "").split(".")
            if parts[0] not in sys.stdlib_module_names | {"__future__", ROOT.name}:
                yield from (part for part in parts if is_private(part))
                yield from (alias.name for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield from (part for part in alias.name.split(".") if is_private(part))
        elif isinstance(node, ast.Attribute):
            theirs = is_private(node.attr) and node.attr not in own and ast.unparse(node.value) not in OWN
            if node.attr in FRAMES or (theirs and ast.unparse(node) not in PUBLIC):
                yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr"):
            name = node.args[1] if len(node.args) > 1 else None
            if isinstance(name, ast.Constant) and is_private(str(name.value)) and name.value not in own:
                yield str(name.value)


def found(root: Path) -> set[Use]:
    """The uses of all files below `root`."""
    trees = {path.relative_to(root).as_posix(): ast.parse(path.read_text()) for path in sorted(root.rglob("*.py"))}
    own = {name for tree in trees.values() for name in names_of(tree)}
    return {(file, name) for file, tree in trees.items() for name in uses(tree, own)}


def rows() -> set[Use]:
    """File and name of each row of the table."""
    cells = [line.strip().strip("|").split("|") for line in TABLE.read_text().splitlines() if line.startswith("| `")]
    assert all(len(row) == 4 and all(cell.strip() for cell in row) for row in cells), "name, where, why, replacement"
    return {
        (file, name)
        for names, files, *_ in cells
        for name in re.findall(r"`([^`]+)`", names)
        for file in re.findall(r"`([^`]+)`", files)
    }


def test_private_names_are_used_in_one_place():
    elsewhere = {use for use in found(ROOT) if not use[0].startswith(ALLOWED)}
    assert elsewhere == set(), "use a public name, or write a function in compat/ and a row in docs/private_apis.md"


def test_every_use_has_its_row():
    used, told = found(ROOT), rows()
    assert used - told == set(), "add a row to docs/private_apis.md"
    assert told - used == set(), "these rows are of uses that are gone"


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("from torch.utils._pytree import tree_leaves", {"_pytree"}),
        ("from lightning.fabric.utilities.types import _PATH", {"_PATH"}),
        ("import torch._dynamo", {"_dynamo"}),
        ("def f(trainer):\n    return trainer.fit_loop._data_fetcher", {"_data_fetcher"}),
        ("def f(storage):\n    return getattr(storage, '_cdata')", {"_cdata"}),
        ("import sys\nframe = sys._getframe(1)\nknown = frame.f_locals", {"_getframe", "f_locals"}),
        ("import os\nos._exit(1)", set()),
        ("class A:\n    def __init__(self):\n        self._x = 1\ndef f(a):\n    return a._x", set()),
        ("from lightning_megatron_rl.cli import _MODELS", set()),
    ],
)
def test_uses_are_found(tmp_path: Path, code: str, names: set[str]):
    (tmp_path / "thing.py").write_text(code)
    assert found(tmp_path) == {("thing.py", name) for name in names}
