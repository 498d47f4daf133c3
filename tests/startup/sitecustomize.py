"""Read by Python at the start of each process of a test run: conftest.py puts this folder on PYTHONPATH.

Transformers asks in every process which package each module comes from. To answer, Python reads the lists of files of
all installed packages, which takes longer than a second; here the answer is kept until a package comes or goes.
"""

import importlib.metadata
import os
import sys
from pathlib import Path

_FOLDER = Path(__file__).parent / "__pycache__"
_read = importlib.metadata.packages_distributions


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


importlib.metadata.packages_distributions = _kept
