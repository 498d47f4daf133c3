"""What child processes of tests keep of the installed packages is what Python reads."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.distributed import CHILD_PATH, STARTUP

SCRIPT = """
import importlib.metadata, json, sys
kept = importlib.metadata.packages_distributions()
startup = sys.modules["sitecustomize"]
read = {name: list(found) for name, found in startup._read().items()}
points = [importlib.metadata.entry_points(), importlib.metadata.entry_points()]
same = kept == read and all(found == startup._read_entries() for found in points)
same = same and importlib.metadata.entry_points(group="g") == startup._read_entries(group="g")
print(json.dumps([same, sorted(kept), sorted(importlib.metadata.entry_points(group="g").names)]))
"""


def packages(*more: Path) -> tuple[bool, list[str], list[str]]:
    path = os.pathsep.join([CHILD_PATH, *map(str, more)])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    same, names, plugins = json.loads(done.stdout)
    return same, names, plugins


def test_packages_that_are_kept_are_those_that_are_installed(tmp_path: Path):
    """Also when one has come since; fails without the times in the key."""
    assert STARTUP in os.environ["PYTHONPATH"]
    for name in ("first", "second"):
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "top_level.txt").write_text(f"{name}_module\n")
        (info / "entry_points.txt").write_text(f"[g]\n{name} = {name}_module:it\n")
        for _ in range(2):  # read, and kept
            same, names, plugins = packages(tmp_path)
            assert same
            assert f"{name}_module" in names
            assert name in plugins
    assert packages()[0]


def test_plugins_that_come_later_are_seen(tmp_path: Path):
    """Within one process; fails if what was read once were kept for good."""
    script = """
import importlib.metadata, pathlib, sys
assert "late" not in importlib.metadata.entry_points(group="g").names
info = pathlib.Path(sys.path[0]) / "late-1.0.dist-info"
info.mkdir()
(info / "METADATA").write_text("Metadata-Version: 2.1\\nName: late\\nVersion: 1.0\\n")
(info / "entry_points.txt").write_text("[g]\\nlate = late_module:it\\n")
importlib.invalidate_caches()
assert "late" in importlib.metadata.entry_points(group="g").names
"""
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}){script}"]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": CHILD_PATH}, check=True)
