"""An argument parser with one-line errors, for the tools of the command line."""

import argparse
import difflib
import os
from pathlib import Path
from typing import NoReturn

from lightning_megatron_rl.utilities.files import check_writable
from lightning_megatron_rl.utilities.text_files import user_path


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def check_counts(parser: argparse.ArgumentParser, options: argparse.Namespace, *names: str) -> None:
    """End with an error if one of these options is given and below one."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} {value}: it is a number, at least 1")


def check_out(parser: argparse.ArgumentParser, out: str, *, is_directory: bool = False) -> Path:
    """Return the path that `--out` names, with `~` expanded; end with an error if nothing can be written there.

    Args:
        parser: Of the command.
        out: A file, or a directory.
        is_directory: The latter; neither it nor what is above it need be there.
    """
    try:
        path = user_path(out)
        check_writable(path if is_directory else path.absolute().parent, "--out")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if path.is_dir() and not is_directory:
        parser.error(f"--out {out} is a directory: name a file")
    return path


def parse_with_rest(parser: argparse.ArgumentParser, args: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the options of a command that hands all others on to `fit`; one that is nearly its own ends with an error.

    Args:
        parser: Of the command's own options, which have no dots; those of `fit` have, but a few.
        args: All arguments.

    Returns:
        The command's options, and the rest.
    """
    options, rest = parser.parse_known_args(args)
    own = [f"--{name.replace('_', '-')}" for name in vars(options)]
    for name in (argument.partition("=")[0] for argument in rest if argument.startswith("--")):
        if "." not in name and (near := difflib.get_close_matches(name, own, n=1, cutoff=0.8)):
            parser.error(f"unknown option {name}; did you mean {near[0]}?")
    if not rest and not any(name.startswith("PL_FIT__") for name in os.environ):
        parser.error("no config is given: --config FILE")
    return options, rest


def new_parser(program: str, description: str, epilog: str, usage: str | None = None) -> argparse.ArgumentParser:
    """Return a parser that takes no abbreviations, shows its texts as written, and exits with 2 on an error."""
    return _Parser(
        program,
        description=description,
        epilog=epilog,
        usage=usage,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
