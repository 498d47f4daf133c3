"""The token that a trainer and its servers share: where it comes from, and what it must be like."""

import re
from pathlib import Path

from lightning_megatron_rl.utilities.text_files import text_file, user_path

TOKEN_VARIABLE = "LIGHTNING_MEGATRON_RL_TOKEN"
LEAST_TOKEN = 16  # characters
_CARRIED = re.compile(r"[!-~]+")  # what a header carries: ASCII without blanks


def read_token_file(path: str | Path, setting: str) -> str:
    """Return what a private file has, for `check_token`.

    Args:
        path: Of the file.
        setting: That named it.

    Raises:
        ValueError: It is missing, or others can read it.
    """
    if not user_path(path).exists():
        raise ValueError(f"{setting} names {str(path)!r}, and there is no such file (working directory {Path.cwd()})")
    file = text_file(path)
    if file.stat().st_mode & 0o077:
        raise ValueError(f"{setting} {path} can be read by others: chmod 600 {path}")
    return file.read_text()


def check_token(token: str, where: str, remedy: str) -> str:
    """Return a token without the blanks around it, such as the line's end that a secret of a cluster may have.

    Args:
        token: As it was found.
        where: It was found.
        remedy: What to do if it is none.

    Raises:
        ValueError: It is short, or has characters that HTTP does not carry.
    """
    found = token.strip()
    if len(found) < LEAST_TOKEN:
        raise ValueError(f"the token in {where} has {len(found)} characters: at least {LEAST_TOKEN}. {remedy}")
    if not _CARRIED.fullmatch(found):
        raise ValueError(f"the token in {where} has blanks or other characters than ASCII's. {remedy}")
    return found
