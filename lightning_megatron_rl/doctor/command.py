"""The command `doctor`: arguments, the report as text or JSON, and the exit code."""

import argparse
import json
import textwrap
from dataclasses import asdict

from lightning_megatron_rl.devices.facts import DeviceFacts
from lightning_megatron_rl.doctor.findings import Finding
from lightning_megatron_rl.utilities.arguments import new_parser

PROGRAM = "lightning-megatron-rl doctor"
_DESCRIPTION = """Say what this machine has for training and sampling, what it lacks, and what helps."""
_EPILOG = """exit code: 0 if nothing that is needed is missing, 1 if something is, 2 for arguments that cannot be.

example:
  lightning-megatron-rl doctor --device cuda"""
_MARKS = {"ok": "ok", "note": "note", "warning": "WARNING", "missing": "MISSING"}
_WIDTH = 118


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    parser = new_parser(PROGRAM, _DESCRIPTION, _EPILOG)
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="what the machine is for; auto: CUDA where there is a driver, a device, or vLLM for CUDA",
    )
    parser.add_argument("--json", action="store_true", help="print facts and findings as JSON")
    return parser


def main(args: list[str]) -> int:
    """Run the command and return its exit code.

    Args:
        args: Arguments after `doctor`.
    """
    options = make_parser().parse_args(args)

    from lightning_megatron_rl.doctor.findings import examine, wanted_device
    from lightning_megatron_rl.doctor.packages import measure_system

    system, facts = measure_system(), _measure_devices()
    device = wanted_device(options.device, facts)
    findings = examine(system, facts, device)
    missing = sum(finding.level == "missing" for finding in findings)
    if options.json:
        devices = None
        if facts is not None:
            devices = asdict(facts)
            devices["links"] = {f"{first}-{second}": link for (first, second), link in facts.links.items()}
            devices["vllm_packages"] = sorted(facts.vllm_packages)
        print(
            json.dumps(
                {
                    "device": device,
                    "ok": missing == 0,
                    "findings": [asdict(finding) for finding in findings],
                    "system": asdict(system),
                    "devices": devices,
                },
                indent=2,
            )
        )
    else:
        print("\n".join(format_finding(finding) for finding in findings))
        print(f"\n{conclusion(device, findings)}")
    return 1 if missing else 0


def _measure_devices() -> DeviceFacts | None:
    """The facts that torch knows; None where it cannot be imported."""
    try:
        from lightning_megatron_rl.devices.measure import measure_devices
    except (ImportError, OSError):  # not installed, or a library of it is missing
        return None
    return measure_devices()


def format_finding(finding: Finding) -> str:
    """Return a finding as a line, with its remedy below it.

    Example:
        ``MISSING  libnuma             not found``, and below it ``apt-get install libnuma1``.
    """
    head = f"{_MARKS[finding.level]:8s} {finding.name:19s} "
    lines = textwrap.wrap(finding.found, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head))
    for line in finding.remedy.splitlines():
        lines += textwrap.wrap(line, _WIDTH, initial_indent=" " * 9 + "-> ", subsequent_indent=" " * 12)
    return "\n".join(lines)


def conclusion(device: str, findings: list[Finding]) -> str:
    """Return the last line: whether runs on `device` can start."""
    missing = [finding.name for finding in findings if finding.level == "missing"]
    if missing:
        return f"not ready for runs on {device}: {', '.join(missing)}"
    warnings = sum(finding.level == "warning" for finding in findings)
    return f"ready for runs on {device}" + (f", with {warnings} warnings" if warnings else "")
