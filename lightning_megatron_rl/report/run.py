"""Reads the directory of a run: metrics, settings, config, log, and what is missing of them."""

import csv
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from lightning_megatron_rl.report.series import Series
from lightning_megatron_rl.utilities.masking import mask_text
from lightning_megatron_rl.utilities.text_files import user_path

METRICS, SETTINGS, CONFIG, FACTS, LOG = "metrics.csv", "hparams.yaml", "config.yaml", "run.json", "run.log"
_NO_METRICS = ("step", "epoch")
_SHOWN_LOG = 200  # lines, the last
_LONGEST_LINE = 2_000  # characters
_LONGEST_CONFIG = 200_000  # characters
_LOGGED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ (WARNING|ERROR|CRITICAL) ")  # how a record of run.log begins
_NEAR = ("*", "*/*", "*/*/*")  # where a directory that is no run itself may have runs


@dataclass
class Run:
    """What is known of a run.

    Attributes:
        path: Its directory, that of its `CSVLogger`.
        name: How the report calls it.
        metrics: By name.
        settings: Of ``hparams.yaml``.
        config: The text of ``config.yaml``.
        facts: Of ``run.json``, which `RunReport` writes.
        warnings: Of ``run.log``, the last ones.
        notes: What is missing or could not be read.
    """

    path: Path
    name: str
    metrics: dict[str, Series] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    config: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        """The last step that was logged; 0 if none was."""
        return max((int(series.steps[-1]) for series in self.metrics.values() if len(series.steps)), default=0)

    @property
    def run_id(self) -> str:
        """Its number, which samples have, too; "" if unknown."""
        return str(self.settings.get("run_id") or self.facts.get("run") or "")


def read_run(path: str | Path, name: str = "") -> Run:
    """Read a run; parts that are missing or half-written become notes.

    Args:
        path: The directory with its ``metrics.csv``.
        name: How to call it; the directory's name if not given.

    Raises:
        ValueError: It is no directory of a run: what is missing, and which runs are below it.
    """
    directory = user_path(path)
    if not directory.exists():
        raise ValueError(f"{path}: no such directory (working directory: {Path.cwd()})")
    if not directory.is_dir():
        raise ValueError(f"{path} is a file: name the directory of the run, the one with {METRICS}")
    if not any((directory / file).is_file() for file in (METRICS, SETTINGS, FACTS)):
        raise ValueError(f"{path} is no run: {_missing(directory)}")
    run = Run(directory, name or directory.absolute().name)
    try:
        run.metrics = _read_metrics(directory / METRICS, run.notes)
    except FileNotFoundError:
        run.notes.append(f"There is no {METRICS}: the run ended before a step was logged, or has no CSVLogger.")
    run.settings = _read(directory / SETTINGS, yaml.safe_load, run.notes, "settings and versions are not known")
    run.facts = _read(directory / FACTS, json.loads, run.notes, "how it ended and its memory plan are not known")
    newest = max(directory.glob("config*.yaml"), key=lambda file: file.stat().st_mtime, default=directory / CONFIG)
    run.config = _read_text(newest, run.notes)  # of a resumed run config-2.yaml, ... where it differs
    run.warnings = _read_warnings(directory / LOG)
    return run


def name_runs(paths: list[Path]) -> list[str]:
    """Return short names that tell runs apart: the last parts of their paths, as many as it takes."""
    parts = [path.absolute().parts for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-count:]).replace("//", "/") for part in parts]
        if len(set(names)) == len(names):
            return names
    raise ValueError(f"the same run is named twice: {', '.join(map(str, paths))}")


def _missing(directory: Path) -> str:
    found = sorted(file.parent for pattern in _NEAR for file in directory.glob(f"{pattern}/{METRICS}"))
    wanted = f"it has no {METRICS}, no {SETTINGS} and no {FACTS}, which CSVLogger and RunReport write"
    if found:
        return f"{wanted}. Runs below it: {', '.join(map(str, found[:10]))}"
    return f"{wanted} (trainer.logger: {{class_path: lightning.pytorch.loggers.CSVLogger, ...}}), and none is below it"


def _read_metrics(path: Path, notes: list[str]) -> dict[str, Series]:
    """Return every column by step; of a step that is there twice, as after a resume, the later row counts."""
    found: dict[str, dict[int, float]] = {}
    broken = 0
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        rows = csv.reader(line.replace("\0", "") for line in file)
        header = next(rows, [])
        if header and "step" not in header:
            raise ValueError(f"{path} is not what CSVLogger writes: it has no column 'step', it has {header[:5]}")
        for row in _readable(rows):
            try:
                step = int(float(row[header.index("step")]))
                values = {name: float(text) for name, text in zip(header, row, strict=True) if text}
            except (ValueError, IndexError, OverflowError):
                broken += 1
                continue
            for name, value in values.items():
                if name not in _NO_METRICS:
                    found.setdefault(name, {})[step] = value
    if not found:
        notes.append(f"{METRICS} has no values yet.")
    if broken:
        notes.append(f"{broken} row(s) of {METRICS} cannot be read, as after a write that was cut short: left out.")
    return {name: _series(values) for name, values in sorted(found.items())}


def _readable(rows: Iterator[list[str]]) -> Iterator[list[str]]:
    """Yield rows; one that cannot be read, such as a line without end after a crash of the machine, is empty."""
    while True:
        try:
            yield next(rows)
        except StopIteration:
            return
        except csv.Error:
            yield []


def _series(values: dict[int, float]) -> Series:
    steps = sorted(values)
    return Series(np.array(steps, dtype=np.float64), np.array([values[step] for step in steps], dtype=np.float64))


def _read(path: Path, parse: Callable[[str], Any], notes: list[str], loss: str) -> dict[str, Any]:
    """Return what a file holds; {} with a note if it is missing or cannot be read."""
    try:
        found = parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        notes.append(f"There is no {path.name}: {loss}.")
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        notes.append(f"{path.name} cannot be read ({str(error).splitlines()[0]}): {loss}.")
    else:
        if isinstance(found, dict):
            return found
        notes.append(f"{path.name} holds no settings: {loss}.")
    return {}


def _read_text(path: Path, notes: list[str]) -> str:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        notes.append(f"There is no {path.name}: the run was not started by the command line, or not yet.")
        return ""
    if len(text) > _LONGEST_CONFIG:
        notes.append(f"{path.name} is cut to its first {_LONGEST_CONFIG:,} of {len(text):,} characters.")
    return text[:_LONGEST_CONFIG]


def _read_warnings(path: Path) -> list[str]:
    """Return the last warnings and errors of a log, secrets masked."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4_000_000))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [mask_text(line[:_LONGEST_LINE]) for line in lines if _LOGGED.match(line)][-_SHOWN_LOG:]
