"""Entry point of `lightning-megatron-rl` and `python -m lightning_megatron_rl`: light until a run needs more."""

import difflib
import os
import signal
import sys
from importlib import import_module
from typing import NoReturn

from lightning_megatron_rl import __version__
from lightning_megatron_rl.utilities.cpus import openmp_defaults
from lightning_megatron_rl.utilities.garbage import collect_rarely

TOOLS = {  # by command: where its `main` is
    "init": "lightning_megatron_rl.recipes.init",
    "plan": "lightning_megatron_rl.plan.command",
    "verify-layout": "lightning_megatron_rl.verify.command",
    "convert": "lightning_megatron_rl.convert.command",
    "doctor": "lightning_megatron_rl.doctor.command",
    "serve": "lightning_megatron_rl.serve.command",
    "report": "lightning_megatron_rl.report.command",
    "schema": "lightning_megatron_rl.schema.command",
}
COMMANDS = ("fit", "validate", "test", "predict", *TOOLS)
_USAGE = """usage: lightning-megatron-rl [--help] [--version] COMMAND ...

Reinforcement-learning post-training of language models at Megatron scale, from a plain Lightning Trainer.

commands:
  fit            train: SFTModule, GRPOModule, PPOModule, DPOModule, RewardModule or a module of your own
  validate       run the validation loop once
  test           run the test loop once
  predict        run the predict loop once
  init           write a recipe for a model, with a layout for your GPUs (init --help)
  plan           say whether a config fits GPUs that need not be here, and how long a step takes (plan --help)
  report         write what a run has logged as one HTML file: curves, checks, samples (report --help)
  verify-layout  prove that no parallel layout changes the numbers of your config (verify-layout --help)
  convert        Hugging Face models to distributed checkpoints and back (convert --help)
  doctor         say what this machine has, what it lacks, and what helps (doctor --help)
  serve          serve a model for trainers on other hosts (serve --help)
  schema         print a JSON schema of the YAML files, for editors (schema --help)

`fit --shrink` trains a small model of the same family and layout for two steps on a CPU (docs/recipes.md).
The first four take Lightning's arguments: --config FILE (repeat it for overlays, later ones win; configs/... that is
not there is the one that came with the package), --trainer.*,
--model.*, --data.*, --ckpt_path PATH, --print_config. `lightning-megatron-rl fit --help` lists them, and
`lightning-megatron-rl fit --model.help GRPOModule` those of a class. Environment variables such as
PL_FIT__CONFIG=FILE or PL_FIT__TRAINER__MAX_STEPS=10 set what neither files nor arguments do.

Shell completion: lightning-megatron-rl --print_completion bash > FILE, and `source FILE` in your shell's start-up
file (bash, zsh, tcsh or fish).

example:
  lightning-megatron-rl fit --config configs/demo/grpo.yaml --trainer.max_steps 20
"""


def allow_interrupt() -> None:
    """Let SIGINT end this process and what it starts where it was started with the signal ignored.

    Shells ignore it for background jobs of scripts, and some CI systems do; a run could not be interrupted there.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def main(args: list[str] | None = None) -> None:
    """Run the command line; importing Lightning takes seconds, so help and version do without it.

    Args:
        args: Command line without the program's name; the process's own if not given.
    """
    arguments = sys.argv[1:] if args is None else args
    if not arguments or arguments in (["--help"], ["-h"]):
        print(_USAGE, end="")
        return
    if arguments == ["--version"]:
        print(f"lightning-megatron-rl {__version__}")
        return
    if not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        near = difflib.get_close_matches(arguments[0], COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(COMMANDS)}"
        sys.exit(_refuse(f"lightning-megatron-rl: error: unknown command {arguments[0]}; {hint}"))
    if args is None:  # this process is the command's own, and has not loaded OpenMP yet
        os.environ.update(openmp_defaults())
        allow_interrupt()
        collect_rarely()  # until the first batch of a training: what comes until then are imports
    if arguments[0] in ("init", "plan", "convert"):
        from lightning_megatron_rl.utilities import console

        console.begin()  # before libraries are imported, which warn of each other
    if arguments[0] in TOOLS:
        sys.exit(_run_tool(arguments))
    try:
        _run_trainer(arguments, args)
    except KeyboardInterrupt:  # before the Trainer runs, which has an answer of its own, or for the second time
        sys.exit(_say_interrupted(arguments[0]))


def _run_trainer(arguments: list[str], args: list[str] | None) -> None:
    """Run a command of Lightning's."""
    if arguments[0] == "fit" and "--shrink" in arguments:
        _run_shrunk(arguments)
    from lightning_megatron_rl.utilities import console
    from lightning_megatron_rl.utilities.config_files import check_configs, shipped_configs

    try:  # importing what the parser needs takes many seconds
        check_configs(shipped_configs(arguments), os.environ)
    except ValueError as error:
        sys.exit(_refuse(f"lightning-megatron-rl {arguments[0]}: error: {error}"))
    console.begin()  # before libraries are imported, which warn of each other
    from lightning_megatron_rl.cli import run

    console.begin()  # their loggers have handlers by now
    run(args)


def _run_tool(arguments: list[str]) -> int:
    """Run a command that is no training, and return its exit code."""
    try:
        code = int(import_module(TOOLS[arguments[0]]).main(arguments[1:]))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:  # of which the command has nothing to say
        return _say_interrupted(arguments[0])
    except BrokenPipeError:  # whoever reads, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is not flushed yet
        return 128 + signal.SIGPIPE


def _say_interrupted(command: str) -> int:
    print(f"\nlightning-megatron-rl {command}: interrupted", file=sys.stderr)
    return 128 + signal.SIGINT


def _run_shrunk(arguments: list[str]) -> NoReturn:
    """Write the small run's files, and become that run: a fresh process, as any `fit`, which starts its other ranks."""
    from lightning_megatron_rl.utilities import console
    from lightning_megatron_rl.utilities.config_files import check_configs, shipped_configs

    console.begin()
    from lightning_megatron_rl.recipes.shrink import FLAG, shrink_arguments

    own = [argument for argument in arguments[1:] if argument != FLAG]
    try:
        check_configs(shipped_configs(own), os.environ)
        small = shrink_arguments(own)
    except (ValueError, OSError) as error:  # of OSError: where nothing can be written
        sys.exit(_refuse(f"lightning-megatron-rl fit {FLAG}: error: {error}"))
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "lightning_megatron_rl", *small])


def _refuse(message: str) -> int:
    print(message, file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
