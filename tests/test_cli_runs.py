"""Real runs of the command line, in processes of their own: how they end."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import lightning.pytorch as pl
import psutil
import pytest
import yaml

from lightning_megatron_rl.rewards.base import reward_names
from tests.command_line import ROOT

GRPO = ROOT / "configs" / "demo" / "grpo.yaml"
SFT = ROOT / "configs" / "demo" / "sft.yaml"


def start(*args: str | Path) -> subprocess.Popen[str]:
    """Start a real command line whose working directory is the repository, as a script's background job."""
    command = ["bash", "-c", 'trap "" INT; exec "$@"', "bash"]
    command += [sys.executable, "-m", "lightning_megatron_rl", *map(str, args)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def small_run(model: Path, directory: Path) -> Path:
    """The GRPO demo as a config for `model` in `directory`, with few and short samples, and parts of a user's own."""
    text = GRPO.read_text().replace("runs/demo/sft/hf/last", str(model)).replace("runs/demo", str(directory))
    config = yaml.safe_load(text)
    config["trainer"] |= {"max_steps": 1000, "limit_val_batches": 0}
    config["data"]["init_args"] |= {"batch_size": 4}
    config["trainer"]["callbacks"][2:] = [
        {"class_path": "custom_callback_and_reward.LengthHistogram"}  # no checkpoint: nothing to monitor
    ]
    config["model"]["init_args"] |= {"rewards": ["custom_callback_and_reward.last_digit"], "num_generations": 2}
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    return directory / "config.yaml"


class Fails(pl.Callback):
    """Raises one of this package's own errors, before the first step or in it."""

    def __init__(self, at: str) -> None:
        self.at = at

    def _raise(self, at: str) -> None:
        if at == self.at:
            reward_names([])

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._raise("setup")

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, _: int) -> None:
        self._raise("step")


@pytest.mark.slow  # test_cli.py has the line without ranks
@pytest.mark.parametrize(("at", "code"), [("setup", 2), ("step", 1)])
def test_what_is_refused_while_a_run_is_set_up_is_one_line(qwen3_dir, tmp_path, at: str, code: int):
    """With two real ranks; an error in a step, here of one rank, has its traceback. Both are in the run's record."""
    config = yaml.safe_load(
        SFT.read_text().replace("runs/demo/model", str(qwen3_dir)).replace("runs/demo", str(tmp_path))
    )
    config["trainer"] |= {
        "limit_val_batches": 0,
        "callbacks": [{"class_path": "tests.test_cli_runs.Fails", "init_args": {"at": at}}],
    }
    config["data"]["init_args"]["batch_size"] = 2
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    layout = () if at == "setup" else ("--config", ROOT / "configs/layouts/tp1.yaml", "--trainer.devices", "1")
    run = start("fit", "--config", tmp_path / "config.yaml", *layout)
    output, _ = run.communicate(timeout=180)
    assert run.returncode == code, output
    assert ("Traceback" in output) == (at == "step")
    message = "there are no rewards: name at least one"
    if at == "setup":
        assert f"\nlightning-megatron-rl fit: error: {message}" in f"\n{output}"
    assert message in json.loads((tmp_path / "sft" / "run.json").read_text())["ending"]


@pytest.mark.slow
def test_a_directory_that_takes_no_log_is_one_line(qwen3_dir, tmp_path):
    """Below a file, where nobody, root included, can make one."""
    config = yaml.safe_load(SFT.read_text().replace("runs/demo/model", str(qwen3_dir)))
    config["trainer"] |= {"limit_val_batches": 0, "max_steps": 1, "callbacks": []}
    config["trainer"]["logger"]["init_args"]["save_dir"] = str(tmp_path / "config.yaml")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    run = start("fit", "--config", tmp_path / "config.yaml", "--config", ROOT / "configs/layouts/tp1.yaml")
    output, _ = run.communicate(timeout=180)
    assert run.returncode == 2, output
    assert "Traceback" not in output
    assert re.search(r"fit: error: directory of the logger .*config.yaml/sft' cannot be written: .*Choose", output)


@pytest.mark.slow
def test_a_run_whose_output_is_on_a_full_disk_goes_on(qwen3_dir, tmp_path):
    """With one real rank, to its end."""
    text = SFT.read_text().replace("runs/demo/model", str(qwen3_dir)).replace("runs/demo", str(tmp_path))
    config = yaml.safe_load(text)
    config["trainer"] |= {"limit_val_batches": 0, "max_steps": 2, "callbacks": [], "enable_checkpointing": False}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "lightning_megatron_rl", "fit", "--config", str(tmp_path / "config.yaml")]
    command += ["--config", str(ROOT / "configs/layouts/tp1.yaml"), "--trainer.devices", "1"]
    with open("/dev/full", "w") as full:
        run = subprocess.run(
            command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=180, check=False
        )
    assert run.returncode == 0, run.stderr
    assert "the standard output takes no more (No space left on device)" in run.stderr
    assert json.loads((tmp_path / "sft" / "run.json").read_text())["ending"].startswith("finished")


@pytest.mark.slow
def test_interrupted_run_ends_whole_and_its_saved_config_runs_again(qwen3_dir, tmp_path):
    """Two real ranks and vLLM: Ctrl-C after the first step, then the saved config, into the same directory.

    The shell has SIGINT ignored in what it starts.
    """
    run = start("fit", "--config", small_run(qwen3_dir, tmp_path))
    samples = tmp_path / "grpo" / "samples" / "rollouts-dp0.jsonl"
    while not samples.exists():
        assert run.poll() is None, run.communicate()[0]
        time.sleep(0.2)
    others = psutil.Process(run.pid).children(recursive=True)
    assert len(others) >= 2  # the second rank, vLLM
    run.send_signal(signal.SIGINT)
    output, _ = run.communicate(timeout=180)  # ends when every process that writes to it has ended
    _, left = psutil.wait_procs(others, timeout=15)
    assert not left
    assert run.returncode == 1
    assert "stopped by KeyboardInterrupt after step" in output
    assert re.search(r"^step 1/1000 \(0%\), .* left \| reward .* \| length .* \| [\d.]+ s \(", output, re.MULTILINE)
    for noise in ("GPU available", "distributed_backend", "Epoch", "Warning", "Seed set", "padded vocab", "it/s"):
        assert noise not in output, noise  # of libraries
    assert "GPU available" in (tmp_path / "grpo" / "run.log").read_text()
    assert "Traceback" not in output
    assert "response lengths of step 1 " in output

    saved = tmp_path / "grpo" / "config.yaml"
    before = yaml.safe_load(saved.read_text())
    assert before["trainer"]["strategy"]["init_args"]["tensor_model_parallel_size"] == 2
    changes = ("--config", ROOT / "configs/layouts/tp1.yaml", "--trainer.max_steps", "1")
    again = start("fit", "--config", saved, *changes)
    output, _ = again.communicate(timeout=240)
    assert again.returncode == 0, output
    before["trainer"] |= {"max_steps": 1, "devices": 1}
    before["trainer"]["strategy"]["init_args"] |= {"tensor_model_parallel_size": 1, "sequence_parallel": False}
    # its own, in `fit-2` if the first run has come to log its step
    config, log = (
        max(tmp_path.glob(f"grpo/**/{name}"), key=os.path.getmtime) for name in ("config*.yaml", "metrics.csv")
    )
    assert config != saved
    assert config.parent == log.parent
    assert yaml.safe_load(config.read_text()) == before
    assert "reward/last_digit" in log.read_text()
    assert (tmp_path / "grpo" / "hf" / "last" / "config.json").exists()
