"""Masks secrets in configs, hyper-parameters and messages."""

import os
import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
# HF_TOKEN, WANDB_API_KEY, AWS_SECRET_ACCESS_KEY, password, Authorization
_SECRET_NAME = re.compile(
    r"(?:^|_)(?:token|secret|password|passwd|passphrase|pwd|api_?key|access_?key(?:_id)?|private_?key|credentials?"
    r"|authorization|bearer|cookie|(?:auth|pass|connection_string|dsn)$)(?:$|_)"
)
_PLACE = re.compile(r"_(?:file|path|variable)$")  # where a secret is
_KEY = re.compile(r"[A-Z0-9_]*KEY")  # a variable of the environment: OPENAI_KEY
# eos_token and the like: pieces of text; moe_token_dispatcher_type
_TEXT_TOKEN = re.compile(
    r"(?:^|_)(?:(?:pad|eos|bos|unk|mask|sep|cls|stop|start|end|special|image|think|moe|per)_token"
    r"|token_(?:ids?|threshold))(?:$|_)"
)
# by how well-known services write theirs
_SECRET_VALUE = re.compile(
    r"hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[a-z]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|xox[a-z]-[\w-]{10,}|AKIA[0-9A-Z]{16}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"
    r"|(?:Bearer|Basic)\s+[\w.~+/=-]{8,}|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*"
)
_URL_PASSWORD = re.compile(r"(://[^/\s:@]*:)[^@\s/]+(?=@)")
_ASSIGNMENT = re.compile(r"""(['"]?)([\w.-]+)\1(\s*[:=]\s*)(['"]?)([^'",}\s]+)\4""")


def is_secret_name(name: str) -> bool:
    """Whether a setting is a secret, by its name.

    Example:
        ``is_secret_name("HF_TOKEN")``, and not ``is_secret_name("max_tokens")``
    """
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[-. ]", "_", name).lower()
    if _TEXT_TOKEN.search(words) or _PLACE.search(words):
        return False
    return bool(_SECRET_NAME.search(words) or _KEY.fullmatch(name))


def mask_secrets(settings: Any) -> Any:
    """Return a copy of settings in which the texts that look like secrets are `MASK`.

    Args:
        settings: Dictionaries, lists and tuples of anything. A text is a secret by the name that it or what it is in
            has, or by its look; of an address only the password.

    Example:
        ``mask_secrets({"env": {"HF_TOKEN": "abc"}}) == {"env": {"HF_TOKEN": "***"}}``
    """
    return _masked(settings, "")


def _masked(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        return {key: _masked(inner, str(key) if not is_secret_name(name) else name) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_masked(inner, name) for inner in value)
    if not isinstance(value, str) or not value:
        return value
    if is_secret_name(name):
        return MASK
    return _URL_PASSWORD.sub(rf"\g<1>{MASK}", _SECRET_VALUE.sub(MASK, value))


def mask_text(text: str) -> str:
    """Return a message in which the values that follow the names of secrets, or look like them, are `MASK`.

    Example:
        ``mask_text("got {'HF_TOKEN': 'abc'}") == "got {'HF_TOKEN': '***'}"``
    """

    def mask(found: re.Match[str]) -> str:
        quote, name, between, opening, value = found.groups()
        shown = MASK if is_secret_name(name) else _ASSIGNMENT.sub(mask, value)  # "module: HF_TOKEN=abc"
        return f"{quote}{name}{quote}{between}{opening}{shown}{opening}"

    return _URL_PASSWORD.sub(rf"\g<1>{MASK}", _SECRET_VALUE.sub(MASK, _ASSIGNMENT.sub(mask, text)))


def unmasked_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables for a process; one whose value was masked is taken from this process's environment.

    Raises:
        ValueError: It is not there.
    """
    found = {}
    for name, value in variables.items():
        if MASK in value:
            if name not in os.environ:
                raise ValueError(
                    f"env: the value of {name} was masked when this config was written: set {name} in the environment"
                    " of the run, from where it is taken, or give its value"
                )
            value = os.environ[name]
        found[name] = value
    return found
