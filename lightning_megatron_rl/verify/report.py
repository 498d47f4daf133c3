"""The result of a verification: one row per layout, as a table, as JSON and as an exit code."""

import json
import math
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from lightning_megatron_rl.utilities.cpus import usable_cpus
from lightning_megatron_rl.utilities.versions import installed_versions

Verdict = Literal["reference", "same", "departs", "refused", "failed"]
_COLUMNS = (
    *("layout", "ranks", "loss", "grad norm", "|Δ logp|", "Δ grads", "Δ weights"),
    *("checksum", "s/step", "GB", "verdict"),
)
_WIDTHS = (20, 5, 11, 11, 9, 9, 9, 8, 7, 6, 9)
_NAMED = 5  # parameters that the conclusion names


@dataclass
class Row:
    """One layout, and how far it is from the single process."""

    layout: str
    world_size: int  # processes
    verdict: Verdict
    reason: str = ""  # why it was refused, how it failed, what departs
    losses: list[float] = field(default_factory=list)  # per step
    grad_norms: list[float] = field(default_factory=list)  # per step, before clipping
    metrics: list[dict[str, float]] = field(default_factory=list)  # per step: everything that was logged
    logprob_error: float | None = None  # largest difference of a token's log-prob before the first step, in nats
    gradient_error: float | None = None  # largest ||g - reference|| / ||reference|| of a parameter in the last update
    weight_error: float | None = None  # largest ||w - reference|| / ||reference|| of a parameter after the last step
    checksum: str = ""  # of all weights after the last step; equal only for bitwise equal weights
    step_s: float | None = None  # seconds of the last step, of the slowest rank
    peak_memory_gb: float | None = None  # of the largest rank
    log: str = ""  # tracebacks of all ranks


@dataclass
class Report:
    """All rows, the reference first."""

    subject: str  # what was verified
    batch: str
    device: str
    steps: int
    tolerance: float  # relative
    rows: list[Row]
    requested: list[str]  # layouts that were asked for by name
    note: str = ""  # what may explain a departure
    blurred: list[str] = field(default_factory=list)  # parameters where rounding would hide an error of 0.1 %
    environment: dict[str, str] = field(default_factory=dict)  # command, machine and versions, for the JSON

    def __getitem__(self, layout: str) -> Row:
        """Return the row of a layout.

        Raises:
            KeyError: There is none.
        """
        for row in self.rows:
            if row.layout == layout:
                return row
        raise KeyError(f"{layout}: the report has {', '.join(row.layout for row in self.rows)}")

    @property
    def problems(self) -> list[str]:
        """Reasons why the verification fails: a line for each layout."""
        lines = [
            f"{row.layout}: {row.verdict}: {row.reason}" for row in self.rows if row.verdict in ("departs", "failed")
        ]
        lines += [
            f"{row.layout}: asked for, but refused: {row.reason}"
            for row in self.rows
            if row.verdict == "refused" and row.layout in self.requested
        ]
        if not any(row.verdict in ("same", "departs", "failed") for row in self.rows):
            lines.append("no layout was compared with the single process")
        return lines

    @property
    def ok(self) -> bool:
        """Whether every layout gives the numbers of one process."""
        return not self.problems

    @property
    def exit_code(self) -> int:
        """0 if `ok`, else 1."""
        return 0 if self.ok else 1

    def table(self) -> str:
        """Return the rows as text."""
        return "\n".join([header(self), *(format_row(row) for row in self.rows)])

    def conclusion(self) -> str:
        """Return what was refused, then the problems or that there are none."""
        lines = [f"{row.layout}: refused: {row.reason}" for row in self.rows if row.verdict == "refused"]
        lines = [line for line in lines if line.split(":")[0] not in self.requested]
        if self.blurred:
            more = f" and {len(self.blurred) - _NAMED} more" if len(self.blurred) > _NAMED else ""
            lines.append(
                f"rounding would hide an error of 0.1 % in the gradient of {', '.join(self.blurred[:_NAMED])}{more}"
            )
        if not self.ok:
            notes = [self.note] if self.note else []
            return "\n".join([*lines, *(f"NOT THE SAME  {line}" for line in self.problems), *notes])
        same = sum(row.verdict == "same" for row in self.rows)
        return "\n".join([*lines, f"{same} layouts give the numbers of one process (tolerance {self.tolerance:g})"])

    def __str__(self) -> str:
        return f"{self.table()}\n{self.conclusion()}"

    def to_json(self) -> str:
        """Return everything as JSON; numbers that JSON does not know become text."""
        return json.dumps({"ok": self.ok, **_plain(asdict(self))}, indent=2) + "\n"


def describe_environment(device: str) -> dict[str, str]:
    """Return the machine, and the versions of what computes."""
    cores = f"{usable_cpus().count} CPU cores, {platform.machine()}"
    machine = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if device == "cuda" else cores
    found = {"machine": machine, "python": platform.python_version(), "torch": torch.__version__}  # with its CUDA
    packages = ("lightning", "megatron-core", "megatron-bridge", "transformers", "transformer-engine")
    return found | installed_versions(packages)


def header(report: Report) -> str:
    """Return the lines above the rows."""
    lines = [
        f"{report.subject}",
        f"batch: {report.batch}",
        f"{report.steps} steps in fp32 on {report.device}; reference: a single process; tolerance {report.tolerance:g}",
        "",
        _line(_COLUMNS),
        _line(["-" * width for width in _WIDTHS]),
    ]
    return "\n".join(lines)


def format_row(row: Row) -> str:
    """Return one line of the table; loss and gradient norm are those of the last step."""
    cells = [
        row.layout,
        str(row.world_size),
        _number(row.losses[-1] if row.losses else None, ".7g"),
        _number(row.grad_norms[-1] if row.grad_norms else None, ".7g"),
        _number(row.logprob_error, ".1e"),
        _number(row.gradient_error, ".1e"),
        _number(row.weight_error, ".1e"),
        row.checksum or "-",
        _number(row.step_s, ".3f"),
        _number(row.peak_memory_gb, ".2f"),
        row.verdict.upper() if row.verdict in ("departs", "failed") else row.verdict,
    ]
    return _line(cells)


def _line(cells: Sequence[str]) -> str:
    left = {0, len(_WIDTHS) - 1}
    padded = [
        cell.ljust(width) if column in left else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, _WIDTHS, strict=True))
    ]
    return "  ".join(padded).rstrip()


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
