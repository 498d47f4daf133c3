"""Read by Python at the start of each process of a test run: conftest.py puts this folder on PYTHONPATH.

Transformers asks in every process which package each module comes from. To answer, Python reads the lists of files of
all installed packages, which takes longer than a second; here the answer is kept until a package comes or goes. So
is what packages offer as plugins, within a process: each of Lightning's trainers asks for it, which takes a seventh of
a second, and a process of the tests makes hundreds.
"""

import importlib.metadata
import os
import sys
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent / "__pycache__"
_read = importlib.metadata.packages_distributions
_read_entries = importlib.metadata.entry_points
_entries: dict[tuple[str, ...], importlib.metadata.EntryPoints] = {}


def _places() -> list[str]:
    """Return the folders on the path that have packages, with the times at which packages came or went."""
    found = []
    for place in dict.fromkeys(sys.path):
        try:
            names = os.listdir(place or ".")
            changed = os.stat(place or ".").st_mtime_ns
        except OSError:  # an archive, or nothing
            continue
        if any(name.endswith((".dist-info", ".egg-info")) for name in names):
            found.append(f"{os.path.abspath(place or '.')} {changed}")
    return found


def _kept() -> dict[str, list[str]]:
    import json
    from hashlib import sha256

    path = _FOLDER / f"packages-{sha256(repr(_places()).encode()).hexdigest()[:16]}.json"
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        answer = {module: [*packages] for module, packages in _read().items()}
    try:
        _FOLDER.mkdir(exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(answer))
        partial.replace(path)
    except OSError:  # a checkout that cannot be written to
        pass
    return answer


def _kept_entries(**wanted: Any) -> importlib.metadata.EntryPoints:
    places = tuple(_places())
    if places not in _entries:
        _entries.clear()
        _entries[places] = _read_entries()
    return _entries[places].select(**wanted)


importlib.metadata.packages_distributions = _kept
importlib.metadata.entry_points = _kept_entries
