"""Installs what benchmarks compare with into .peers, beside the environment: `make peers`."""

import os
import subprocess
import sys

from bootstrap import (
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


def main() -> None:
    """Install the pinned packages without what they depend on: the environment has that."""
    uv = find_uv(ROOT) or install_uv(ROOT, find_pip(ROOT, sys.executable))
    settings = pip_settings(capture([sys.executable, "-m", "pip", "config", "list"]))
    environment = uv_environment(os.environ, settings, has_uv_config(os.environ))
    command = [uv, "pip", "install", "--quiet", "--python", sys.executable, "--target", str(ROOT / ".peers")]
    command += ["--no-deps", "--require-hashes", "--requirements", "requirements/peers.txt"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    print("peers are in .peers: python benchmarks/grpo_step.py --peer all")


if __name__ == "__main__":
    try:
        main()
    except SetupError as error:
        sys.exit(f"peers: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"peers: uv could not install them (exit code {error.returncode}, see above)")
