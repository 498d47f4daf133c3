"""The command `plan`: arguments, output and exit code."""

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

import yaml

from lightning_megatron_rl.planner.hardware import HARDWARE, find_hardware
from lightning_megatron_rl.planner.report import as_data, as_text, scaled_as_data, scaled_as_text, summary
from lightning_megatron_rl.planner.run import Run
from lightning_megatron_rl.planner.scaling import scale
from lightning_megatron_rl.planner.search import search
from lightning_megatron_rl.utilities.arguments import check_counts, check_out, new_parser, parse_with_rest

PROGRAM = "lightning-megatron-rl plan"
_DESCRIPTION = """Say whether a config fits GPUs that need not be here, how long a step takes, and what to change first.

All other arguments are those of `fit`: --config FILE (repeat it for overlays), --model.*, --trainer.*, and so on.
Of the model only its config.json is read; those of the models with a recipe come with the package."""
_EPILOG = """exit code: 0 if it fits, 1 if it does not (with --scale: on one of the numbers),
2 for arguments or a config that cannot be.

examples:
  lightning-megatron-rl plan --config configs/recipes/qwen3-8b/grpo.yaml
  lightning-megatron-rl plan --config configs/recipes/qwen3-8b/grpo.yaml --device h200 --scale 8,64,512
  lightning-megatron-rl plan --config configs/recipes/qwen3-8b/grpo.yaml --device h100 --devices 8 --search
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's own arguments."""
    parser = new_parser(PROGRAM, _DESCRIPTION, _EPILOG, usage=f"{PROGRAM} --config FILE [options]")
    parser.add_argument("--device", default="h100", metavar="KIND", help=f"{', '.join(HARDWARE)} (default h100)")
    parser.add_argument("--devices", type=int, metavar="N", help="GPUs of a node; default: trainer.devices")
    parser.add_argument("--nodes", type=int, metavar="M", help="nodes; default: trainer.num_nodes")
    parser.add_argument("--prompt-tokens", type=int, metavar="N", help="of a prompt (default: at most 256)")
    parser.add_argument(
        "--response-tokens", type=int, metavar="N", help="of a response (default: the most it may have)"
    )
    parser.add_argument("--search", action="store_true", help="propose the fastest layouts of these GPUs, as overlays")
    parser.add_argument(
        "--scale", metavar="N,...", help="the same run on these numbers of GPUs, each in its fastest layout that fits"
    )
    parser.add_argument("--same-batch", action="store_true", help="with --scale: the batch does not grow with the GPUs")
    parser.add_argument("--out", metavar="DIR", help="write the overlays of --search there, as layout-1.yaml, ...")
    parser.add_argument("--json", action="store_true", help="print plain data instead of tables")
    return parser


def main(args: list[str]) -> int:
    """Run the command and return its exit code.

    Args:
        args: Arguments after `plan`.
    """
    parser = make_parser()
    options, fit_args = parse_with_rest(parser, args)
    check_counts(parser, options, "devices", "nodes", "prompt_tokens", "response_tokens")
    if options.out is not None and not options.search:
        parser.error(f"--out {options.out} without --search: only its overlays are written")
    if options.out is not None:
        options.out = check_out(parser, options.out, is_directory=True)
    if options.scale is not None and options.search:
        parser.error("--scale with --search: --scale searches a layout for each number of GPUs itself")
    if options.same_batch and options.scale is None:
        parser.error("--same-batch without --scale: a batch stays as it is")
    gpus = None if options.scale is None else _counts(parser, options.scale)

    from lightning_megatron_rl.cli import explain
    from lightning_megatron_rl.modules.planning import Lengths
    from lightning_megatron_rl.plan.config import FromConfig
    from lightning_megatron_rl.utilities.config_files import check_configs, shipped_configs

    try:
        kind = find_hardware(options.device)
        check_configs(shipped_configs(fit_args), {})
        lengths = Lengths(options.prompt_tokens, options.response_tokens)
        built = FromConfig(fit_args)
        run = built.describe(kind, devices=options.devices, nodes=options.nodes, lengths=lengths)
        if options.search:
            per_node = run.world // (options.nodes or built.nodes)
            return _search(run, per_node, built.model.train_settings.model_config, options)
        if gpus is not None:
            return _scale(run, gpus, options)
        run.check()
    except ValueError as error:
        parser.error(explain(str(error)))
    print(json.dumps(as_data(run), indent=1) if options.json else as_text(run))
    if run.fits:
        return 0
    if not options.json:
        print(f"{PROGRAM}: {_refusal(run)}", file=sys.stderr)
    return 1


def _refusal(run: Run) -> str:
    try:
        run.require()
    except ValueError as error:
        return str(error)
    return ""


def _counts(parser: argparse.ArgumentParser, text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        parser.error(f"--scale {text}: give numbers of GPUs, such as 8,64,512")
    return sorted({int(part) for part in parts})


def _scale(run: Run, gpus: list[int], options: argparse.Namespace) -> int:
    rows = scale(run, gpus, same_batch=options.same_batch)
    print(json.dumps(scaled_as_data(rows), indent=1) if options.json else scaled_as_text(rows))
    return 0 if all(row.run for row in rows) else 1


def _search(run: Run, per_node: int, model_config: Mapping[str, Any], options: argparse.Namespace) -> int:
    found = search(run)
    overlays = [candidate.overlay(per_node, model_config) for candidate in found]
    if options.json:
        print(json.dumps([{**as_data(c.run), "overlay": o} for c, o in zip(found, overlays, strict=True)], indent=1))
    for number, (candidate, overlay) in enumerate(zip(found, overlays, strict=True), 1):
        layout = candidate.run.layout.describe(candidate.run.world)
        text = f"# {number}. {layout} on {run.world} x {run.kind.name}: {summary(candidate.run)}\n"
        text += yaml.safe_dump(overlay, sort_keys=False)
        if not options.json:
            print(text)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / f"layout-{number}.yaml").write_text(text)
    return 0
