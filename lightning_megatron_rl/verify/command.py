"""The command `verify-layout`: arguments, the table while it grows, and the exit code."""

import argparse
import shlex
import sys

from lightning_megatron_rl.utilities.arguments import check_out, new_parser, parse_with_rest

PROGRAM = "lightning-megatron-rl verify-layout"
_DESCRIPTION = """Freeze one batch, train on it under every parallel layout, and compare with a single process in fp32.

All other arguments are those of `fit`: --config FILE (repeat it for overlays), --model.*, --trainer.*, and so on. The
config's module and strategy are used, whatever their classes; the layout is replaced."""
_EPILOG = """exit code: 0 if every layout gives the same numbers, 1 if one departs, fails, or was asked for and refused,
2 for arguments that cannot be.

example:
  lightning-megatron-rl verify-layout --config configs/demo/grpo.yaml --processes 2 --layouts tp2_sp,pp2,dp2
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's own arguments."""
    parser = new_parser(PROGRAM, _DESCRIPTION, _EPILOG, usage=f"{PROGRAM} --config FILE [options]")
    parser.add_argument("--layouts", metavar="NAMES", help="like tp2,pp2_vpp2,tp2@4096; default: all that fit")
    parser.add_argument("--processes", type=int, default=4, metavar="N", help="most processes of a layout (default 4)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda takes a GPU per process")
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="optimizer steps on the batch (default 2)")
    parser.add_argument("--tolerance", type=float, default=1e-5, metavar="X", help="largest relative difference (1e-5)")
    parser.add_argument("--batch", metavar="FILE", help="rollout that RolloutSamples recorded; default: synthetic")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds per layout (default 600)")
    parser.add_argument("--out", metavar="FILE", help="write the report as JSON")
    return parser


def main(args: list[str]) -> int:
    """Run the command and return its exit code.

    Args:
        args: Arguments after `verify-layout`.
    """
    parser = make_parser()
    options, fit_args = parse_with_rest(parser, args)
    out = None if options.out is None else check_out(parser, options.out)

    from lightning_megatron_rl.cli import explain
    from lightning_megatron_rl.verify.config import FromConfig
    from lightning_megatron_rl.verify.report import format_row, header
    from lightning_megatron_rl.verify.runner import verify_layouts

    try:
        report = verify_layouts(
            FromConfig(fit_args),
            options.layouts.split(",") if options.layouts is not None else None,
            processes=options.processes,
            device=options.device,
            steps=options.steps,
            tolerance=options.tolerance,
            batch=options.batch,
            timeout_s=options.timeout,
            on_start=lambda report: print(header(report), flush=True),
            on_row=lambda row: print(format_row(row), flush=True),
        )
    except ValueError as error:
        parser.error(explain(str(error)))
    except RuntimeError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    print(report.conclusion())
    for row in report.rows:
        if row.log:
            print(f"\n{row.layout}: {row.log}", file=sys.stderr)
    if out is not None:
        report.environment["command"] = f"{PROGRAM} {shlex.join(args)}"
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(report.to_json())
    return report.exit_code
