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
read = {name: list(found) for name, found in sys.modules["sitecustomize"]._read().items()}
print(json.dumps([kept == read, sorted(kept)]))
"""


def packages(*more: Path) -> tuple[bool, list[str]]:
    path = os.pathsep.join([CHILD_PATH, *map(str, more)])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    same, names = json.loads(done.stdout)
    return same, names


def test_packages_that_are_kept_are_those_that_are_installed(tmp_path: Path):
    """Also when one has come since; fails without the times in the key."""
    assert STARTUP in os.environ["PYTHONPATH"]
    for name in ("first", "second"):
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "top_level.txt").write_text(f"{name}_module\n")
        for _ in range(2):  # read, and kept
            same, names = packages(tmp_path)
            assert same
            assert f"{name}_module" in names
    assert packages()[0]
