"""The seed of a run."""

import os

_DEFAULT = 1234


def run_seed() -> int:
    """Return the seed of the run, which `seed_everything` left in the environment."""
    return int(os.environ.get("PL_GLOBAL_SEED", _DEFAULT))
