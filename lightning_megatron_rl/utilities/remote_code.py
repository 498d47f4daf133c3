"""Whether Python files that lie in a model's directory are run: one switch for models, tokenizers and the sampler."""

import os

VARIABLE = "LIGHTNING_MEGATRON_RL_TRUST_REMOTE_CODE"
_VALUES = {"": False, "0": False, "false": False, "1": True, "true": True}


def trusts_remote_code() -> bool:
    """Return whether the user allows code of models to run; the default is no.

    A variable of the environment, not a setting: a config that came with a model cannot switch it on.

    Raises:
        ValueError: The variable has another value.
    """
    value = os.environ.get(VARIABLE, "")
    if value.lower() not in _VALUES:
        raise ValueError(f"{VARIABLE}={value!r}: set it to 1 (run code of models) or 0 (do not)")
    return _VALUES[value.lower()]


def remedy(error: Exception) -> str:
    """Return the remedy for an error of Transformers that asks for trust; "" for any other."""
    if "trust_remote_code" not in str(error):
        return ""
    return (
        f" (here: its directory holds Python code, which is not run. If you have read it and trust it, set {VARIABLE}=1"
        " in the environment)"
    )
