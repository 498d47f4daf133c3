"""Builds what `verify-layout` trains from the YAML files of `fit`."""

from collections.abc import Sequence
from typing import Any

from jsonargparse import Namespace

from lightning_megatron_rl.cli import Built
from lightning_megatron_rl.verify.job import Subject

_KEPT = ("gradient_clip_val", "gradient_clip_algorithm")  # settings of the Trainer that change an optimizer step


class FromConfig:
    """Builds the subject of a verification from the command line of `fit`.

    Module and strategy are the config's own; of the Trainer's settings only gradient clipping is used, and neither
    callbacks, loggers nor the data module.

    Args:
        args: Arguments of `lightning-megatron-rl fit`.
    """

    def __init__(self, args: Sequence[str]) -> None:
        self.args = list(args)

    def __call__(self, layout: dict[str, Any]) -> Subject:
        """Parse and build.

        Raises:
            ValueError: A class refuses its settings; or the config's strategy is another than `MegatronStrategy`.
            SystemExit: The parser refuses the config, as in `fit`.
        """

        def lay_out(trainer: Namespace) -> None:
            for name, value in layout.items():
                trainer["strategy"]["init_args"][name] = value

        built = Built(self.args, "verify-layout compares layouts of MegatronStrategy.", lay_out)
        trainer = built.config_init["fit"]["trainer"]
        return Subject(built.model, built.strategy, {name: trainer[name] for name in _KEPT})
