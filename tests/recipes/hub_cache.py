"""Model directories in the layout of the hub's cache, as `huggingface_hub` leaves what it has downloaded."""

import shutil
from pathlib import Path

REVISION = "0123456789abcdef0123456789abcdef01234567"


def put_in_cache(home: Path, name: str, directory: Path) -> Path:
    """Copy a model directory into the cache below an HF_HOME under a hub name; return the snapshot."""
    model = home / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = model / "snapshots" / REVISION
    shutil.copytree(directory, snapshot)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(REVISION)
    return snapshot
