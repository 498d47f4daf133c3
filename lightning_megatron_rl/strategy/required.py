"""`require_megatron`: the Trainer's strategy, for whatever runs on Megatron's alone."""

import lightning.pytorch as pl

from lightning_megatron_rl.strategy.megatron import MegatronStrategy


def require_megatron(trainer: "pl.Trainer", user: object) -> MegatronStrategy:
    """Return the Trainer's strategy.

    Args:
        trainer: Whose strategy it is.
        user: The module or callback that needs it.

    Raises:
        TypeError: It is not a `MegatronStrategy`.
    """
    if not isinstance(trainer.strategy, MegatronStrategy):
        raise TypeError(
            f"{type(user).__name__} runs on MegatronStrategy, the Trainer has {type(trainer.strategy).__name__}:"
            " use Trainer(strategy=MegatronStrategy(...)) or strategy='megatron'."
        )
    return trainer.strategy
