"""The command `convert`: arguments, which way it goes, what is printed, and the exit code."""

import argparse
import signal
import sys
import time
from pathlib import Path

from lightning_megatron_rl.utilities.arguments import new_parser

PROGRAM = "lightning-megatron-rl convert"
_DESCRIPTION = """Convert a Hugging Face model into a distributed checkpoint, or the other way round.

Which way it goes follows from SRC. The checkpoint loads in every parallel layout. The command runs on the CPU, in one
process, and holds one parameter at a time."""
_EPILOG = """exit code: 0 if DST is complete, 1 if it could not be written or --verify found a difference, 2 for
arguments that cannot be, 130 if it was interrupted by Ctrl-C.

examples:
  lightning-megatron-rl convert Qwen/Qwen3-0.6B qwen3.ckpt --verify
  lightning-megatron-rl convert runs/grpo/checkpoints/step=100.ckpt runs/grpo/hf --dtype bfloat16"""
_DTYPES = ("float32", "bfloat16", "float16")
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "": 1}
_DIFFERENCES = 20  # that are printed


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    parser = new_parser(PROGRAM, _DESCRIPTION, _EPILOG)
    parser.add_argument("source", metavar="SRC", help="Hugging Face directory or hub name, or distributed checkpoint")
    parser.add_argument("destination", metavar="DST", help="directory to write: new, or empty")
    parser.add_argument("--dtype", choices=_DTYPES, help="of what is written; default: that of the Hugging Face model")
    parser.add_argument("--verify", action="store_true", help="convert what was written back and compare every tensor")
    parser.add_argument(
        "--skip-checksums",
        action="store_true",
        help="trust a checkpoint's files without reading them once more; their sizes are compared all the same",
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="Hugging Face model that a checkpoint was trained from; default: as the checkpoint says",
    )
    parser.add_argument(
        "--part",
        metavar="NAME",
        help="model of a checkpoint that was saved beside the trained one: critic, reference",
    )
    parser.add_argument(
        "--adapter",
        choices=("merged", "peft"),
        default="merged",
        help="adapters of a checkpoint: added to the weights (default), or alone in PEFT's format",
    )
    parser.add_argument(
        "--max-shard-size", metavar="SIZE", default="5GB", type=parse_size, help="of a safetensors file (default 5GB)"
    )
    return parser


def parse_size(text: str) -> int:
    """Return a number of bytes.

    Raises:
        ArgumentTypeError: It is none.

    Example:
        ``parse_size("5GB") == 5_000_000_000``
    """
    number = text.upper().rstrip("KMGB")
    unit = text.upper()[len(number) :]
    if unit not in _UNITS or not number.isdecimal() or int(number) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: give bytes, or a number with KB, MB or GB")
    return int(number) * _UNITS[unit]


def main(args: list[str]) -> int:
    """Run the command and return its exit code.

    Args:
        args: Arguments after `convert`.
    """
    try:
        return _convert(args)
    except KeyboardInterrupt:
        print(f"\n{PROGRAM}: interrupted; DST is complete or not there", file=sys.stderr)
        return 128 + signal.SIGINT


def _convert(args: list[str]) -> int:
    parser = make_parser()
    options = parser.parse_args(args)
    destination = Path(options.destination).expanduser().resolve()  # a link's target, not a directory in its place
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        parser.error(f"DST {destination} exists and is not empty: remove it or choose another directory")

    from lightning_megatron_rl.checkpoints.manifest import MANIFEST_FILE, DamagedCheckpointError, is_checkpoint
    from lightning_megatron_rl.compat.single_process import single_process
    from lightning_megatron_rl.convert.process import peak_memory_gb

    around = next((parent for parent in destination.parents if is_checkpoint(parent)), None)
    if around is not None:
        parser.error(f"DST {destination} is inside the checkpoint {around}, and goes with it: choose another directory")
    started = time.perf_counter()
    source = Path(options.source).expanduser()
    to_hf = is_checkpoint(source)
    if not to_hf and source.is_dir() and not (source / "config.json").is_file():
        parser.error(
            f"SRC {source} is neither a distributed checkpoint nor a Hugging Face model: it has no {MANIFEST_FILE} and"
            " no config.json"
        )
    if not to_hf:
        for name, given in (
            ("--model", options.model),
            ("--part", options.part),
            ("--skip-checksums", options.skip_checksums or None),
        ):
            if given is not None:
                parser.error(f"{name} belongs to a distributed checkpoint, and SRC {options.source} is none")
        if options.adapter == "peft":
            parser.error(f"--adapter peft belongs to a distributed checkpoint, and SRC {options.source} is none")
    try:
        with single_process():
            written, differences = (_to_hf if to_hf else _to_checkpoint)(options, destination)
    except DamagedCheckpointError as error:
        print(f"{PROGRAM}: error: {error.what} Restore the file from a copy, or convert another one.", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 1
    seconds = time.perf_counter() - started
    print(f"{written} in {seconds:.1f} s, with at most {peak_memory_gb():.3f} GB of memory")
    for difference in differences[:_DIFFERENCES]:
        print(f"{PROGRAM}: {difference}", file=sys.stderr)
    if differences:
        print(f"{PROGRAM}: error: {len(differences)} tensors of {destination} differ from SRC", file=sys.stderr)
        return 1
    if options.verify:
        print("verified: every tensor is the same")
    return 0


def _to_checkpoint(options: argparse.Namespace, destination: Path) -> tuple[str, list[str]]:
    """Write a distributed checkpoint; return what to say about it, and what `--verify` found."""
    from lightning_megatron_rl.convert.source import DTYPES, open_model
    from lightning_megatron_rl.convert.to_checkpoint import verify_checkpoint, write_checkpoint

    model = open_model(options.source)
    skeleton = write_checkpoint(model, destination, DTYPES.get(options.dtype))
    differences = verify_checkpoint(skeleton, destination) if options.verify else []
    return f"{destination}: a distributed checkpoint of {skeleton.bytes / 1e9:.2f} GB", differences


def _to_hf(options: argparse.Namespace, destination: Path) -> tuple[str, list[str]]:
    """Write a Hugging Face model, or adapters; return what to say about it, and what `--verify` found."""
    from lightning_megatron_rl.convert.source import DTYPES, StoredModel, other_models
    from lightning_megatron_rl.convert.to_hf import HFConversion

    stored = StoredModel.find(
        Path(options.source).expanduser(),
        part=options.part,
        model=options.model,
        verify=not options.skip_checksums,
    )
    others = other_models(stored.tensors)
    if others and options.part is None:
        print(f"not converted: {', '.join(others)} (--part NAME)")
    conversion = HFConversion(stored, DTYPES.get(options.dtype))
    if options.adapter == "peft":
        conversion.write_adapter(destination)
        differences = conversion.verify_adapter(destination) if options.verify else []
        return f"{destination}: adapters in PEFT's format", differences
    conversion.write(destination, options.max_shard_size)
    differences = conversion.verify(destination) if options.verify else []
    return f"{destination}: a Hugging Face model of {conversion.bytes / 1e9:.2f} GB", differences
