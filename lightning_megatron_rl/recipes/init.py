"""The command `init`: a recipe for a model, with the fastest layout that fits the given GPUs."""

import argparse
import sys

from lightning_megatron_rl.planner.hardware import HARDWARE, find_hardware
from lightning_megatron_rl.utilities.arguments import check_counts, check_out, new_parser
from lightning_megatron_rl.utilities.files import write_whole

PROGRAM = "lightning-megatron-rl init"
_DESCRIPTION = """Write a recipe: a config for `fit` with a layout, samplers and micro-batches that fit your GPUs.

Every setting that is not a default has its reason beside it. Of the model only its config.json is read."""
_EPILOG = """example:
  lightning-megatron-rl init --model Qwen/Qwen3-8B --data gsm8k --devices 8 --device h200 --out qwen3.yaml
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    parser = new_parser(PROGRAM, _DESCRIPTION, _EPILOG)
    parser.add_argument("--model", required=True, metavar="NAME", help="hub name of a known model, or a directory")
    parser.add_argument(
        "--data", metavar="NAME", help="gsm8k, math-500, dapo-math-17k, ultrachat-200k; default: by model"
    )
    parser.add_argument("--method", choices=("sft", "grpo", "grpo_lora"), default="grpo", help="(default grpo)")
    parser.add_argument("--device", default="h100", metavar="KIND", help=f"{', '.join(HARDWARE)} (default h100)")
    parser.add_argument("--devices", type=int, default=8, metavar="N", help="GPUs of a node (default 8)")
    parser.add_argument("--nodes", type=int, default=1, metavar="M", help="nodes (default 1)")
    parser.add_argument("--out", metavar="FILE", help="write it there; default: print it")
    return parser


def main(args: list[str]) -> int:
    """Run the command and return its exit code.

    Args:
        args: Arguments after `init`.
    """
    parser = make_parser()
    options = parser.parse_args(args)
    check_counts(parser, options, "devices", "nodes")
    out = None if options.out is None else check_out(parser, options.out)
    if out is not None and out.exists():
        parser.error(f"--out {options.out}: there is such a file; remove it or take another name")

    from lightning_megatron_rl.plan.config import describe_model
    from lightning_megatron_rl.recipes.choose import choose
    from lightning_megatron_rl.recipes.datasets import find_dataset
    from lightning_megatron_rl.recipes.text import make_header, write_recipe

    try:
        kind = find_hardware(options.device)
        data = find_dataset(options.data) if options.data is not None else None
        model = describe_model(options.model)
        kind = kind.in_nodes(options.devices, options.nodes)
        choices, run = choose(options.method, model, kind, options.devices * options.nodes, data)
    except ValueError as error:
        parser.error(str(error))
    title, *rest = write_recipe(choices, run).splitlines()
    text = "\n".join([title, *make_header(run), *rest]) + "\n"
    if out is None:
        print(text, end="")
        return 0
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, text)
    print(f"wrote {options.out}; next: lightning-megatron-rl fit --config {options.out} --shrink", file=sys.stderr)
    return 0
