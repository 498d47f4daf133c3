"""The command `report`: arguments, where the file goes, and errors of a line."""

import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_megatron_rl.utilities.arguments import new_parser
from lightning_megatron_rl.utilities.files import check_writable, write_whole
from lightning_megatron_rl.utilities.text_files import user_path

PROGRAM = "lightning-megatron-rl report"
REPORT = "report.html"
_DESCRIPTION = """Write what a run has logged as one HTML file without need of a network: curves, checks, samples."""
_EPILOG = """RUN is the directory of the run's CSVLogger, the one with metrics.csv. Several runs are drawn into the same
charts. A run may still be going on, or have been killed.

exit code: 0 if the file was written, 2 if it could not be.

example:
  lightning-megatron-rl report runs/demo/grpo"""


def main(args: list[str]) -> int:
    """Run the command and return its exit code.

    Args:
        args: Arguments after `report`.
    """
    parser = new_parser(PROGRAM, _DESCRIPTION, _EPILOG)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="directory of a run")
    parser.add_argument("--out", metavar="FILE", help=f"the file; {REPORT} in the first run's directory if not given")
    options = parser.parse_args(args)
    try:
        written = write_report(options.runs, options.out)
    except (ValueError, OSError) as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    print(f"{written} ({written.stat().st_size / 1e6:.1f} MB)")
    return 0


def write_report(runs: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write the report of runs and return its path; an older report makes way for it.

    Args:
        runs: Directories of runs.
        out: The file; ``report.html`` in the first directory if not given.

    Raises:
        ValueError: One is no run, or is named twice; `out` is a directory, a URL or a file that is no report.
        OSError: The file cannot be written.
    """
    from lightning_megatron_rl.report.page import GENERATOR, write_page
    from lightning_megatron_rl.report.run import name_runs, read_run

    found = [read_run(path, name) for path, name in zip(runs, name_runs([user_path(run) for run in runs]), strict=True)]
    target = found[0].path / REPORT if out is None else user_path(out)
    if target.is_dir():
        raise ValueError(f"--out {target} is a directory: name a file in it, such as {target / REPORT}")
    check_writable(target.parent if target.exists() else target, "--out")
    if target.exists():
        with target.open("rb") as file:
            if f'name="generator" content="{GENERATOR}"'.encode() not in file.read(2_000):
                raise ValueError(f"{target} is there already and is no report of this command: name another --out")
    page = write_page(found)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, page, errors="backslashreplace")  # halves of characters
    return target
