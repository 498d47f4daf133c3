"""Entry point of `lightning-megatron-rl` and `python -m lightning_megatron_rl`: light until a run needs more."""

import sys
from importlib.metadata import version

_USAGE = """usage: lightning-megatron-rl [--help] [--version] COMMAND ...

Reinforcement-learning post-training of language models at Megatron scale, from a plain Lightning Trainer.

commands:
  fit         train: SFTModule, GRPOModule or a module of your own
  validate    run the validation loop once
  test        run the test loop once
  predict     run the predict loop once

Each command takes Lightning's arguments: --config FILE (repeat it for overlays), --trainer.*, --model.*, --data.*,
--ckpt_path PATH, --print_config; `lightning-megatron-rl fit --help` lists them. Environment variables work as well:
PL_FIT__TRAINER__MAX_STEPS=10. Shell completion: `lightning-megatron-rl --print_shtab bash`.

example:
  lightning-megatron-rl fit --config configs/demo/grpo.yaml --trainer.max_steps 20
"""


def main(args: list[str] | None = None) -> None:
    """Run the command line; importing Lightning takes seconds, so help and version do without it.

    Example:
        ``main(["fit", "--config", "configs/demo/sft.yaml"])``
    """
    arguments = sys.argv[1:] if args is None else args
    if not arguments or arguments in (["--help"], ["-h"]):
        print(_USAGE, end="")
        return
    if arguments == ["--version"]:
        print(f"lightning-megatron-rl {version('lightning-megatron-rl')}")
        return
    from lightning_megatron_rl.cli import run

    run(arguments)


if __name__ == "__main__":
    main()
