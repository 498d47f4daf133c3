"""An argument parser with one-line errors, for the tools of the command line."""

import argparse
from typing import NoReturn


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


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
