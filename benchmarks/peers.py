"""Where the peers of a comparison are: `make peers` puts them into .peers, apart from this project's environment."""

import argparse
import re
import sys
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".peers"
PEERS = ("trl", "verl")
CHOICES = (*PEERS, "all", "none")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what a benchmark is told of its peers."""
    parser.add_argument("--peer", choices=CHOICES, default="none", help="that runs beside ours; `make peers` first")
    parser.add_argument(
        "--verl-variants", default="plain,awake", help="of verl's settings that are tried; the fastest is its row"
    )


def chosen(peer: str) -> tuple[str, ...]:
    """Return the peers that an option ``--peer`` names.

    Raises:
        ValueError: One is not there, or in another version than that of requirements/peers.in.
    """
    names = PEERS if peer == "all" else () if peer == "none" else (peer,)
    for name in names:
        check(name)
    return names


def check(name: str) -> None:
    """Refuse a peer that is not there, or in another version than rows are for.

    Raises:
        ValueError: With the command that installs it.
    """
    wanted = wanted_version(name)
    found = {found.version for found in distributions(name=name, path=[*sys.path, str(FOLDER)])}
    remedy = f"`make peers` installs {name} {wanted} into .peers; or --peer none"
    if not found:
        raise ValueError(f"--peer {name}: it is not installed. {remedy}")
    if wanted not in found:
        raise ValueError(f"--peer {name}: {name} {', '.join(sorted(found))} is installed. {remedy}")


def wanted_version(name: str) -> str:
    """Return the version that requirements/peers.in pins."""
    lines = (ROOT / "requirements" / "peers.in").read_text()
    (version,) = re.findall(rf"^{name}==(\S+)", lines, re.MULTILINE)
    return version


def search_path() -> list[str]:
    """Return what a peer's process finds packages in, beside the environment."""
    return [str(FOLDER)] if FOLDER.exists() else []
