"""Trainer settings that this strategy refuses, each with what to use in its place."""

import lightning.pytorch as pl


def check_trainer(trainer: "pl.Trainer") -> None:
    """Refuse Trainer settings that would change numbers or cannot work with Megatron's schedule.

    Raises:
        ValueError: Naming the setting, its value and what to use in its place.
    """
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches}: one batch is one mini-batch here, and"
            " Megatron's schedule accumulates over its micro-batches. Set accumulate_grad_batches=1, raise the data"
            " module's batch_size for a larger mini-batch, and lower max_tokens_per_microbatch to save memory."
        )
    module = trainer.lightning_module
    if not module.automatic_optimization:
        raise ValueError(
            f"{type(module).__name__}.automatic_optimization=False: under manual optimisation Lightning neither clips"
            " gradients nor steps learning-rate schedulers, and counts steps differently. Keep automatic optimisation;"
            " for several updates per batch call self.optimizers().step() for all but the last."
        )
