"""An argument parser with one-line errors, for the tools of the command line."""

import argparse
from typing import NoReturn


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def check_counts(parser: argparse.ArgumentParser, options: argparse.Namespace, *names: str) -> None:
    """End with an error if one of these options is given and below one."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} {value}: it is a number, at least 1")


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
