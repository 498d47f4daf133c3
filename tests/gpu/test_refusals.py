"""What a real GPU cannot hold is refused before anything is loaded, and `doctor` finds the machine fit."""

import json
import subprocess
import sys

import pytest
import torch

from tests.command_line import ROOT
from tests.training import fit_sft

pytestmark = pytest.mark.deadline(300)


def fit_too_much(model: str) -> tuple[str, int]:
    """Return the refusal of a run with a micro-batch of a hundred million tokens, and the memory it took. # bytes"""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()  # by other tests in this process
    with pytest.raises(ValueError, match=r"this run needs \d+\.\d GiB of a GPU that has") as error:
        fit_sft(
            model,
            {},
            1,
            module={"max_tokens_per_microbatch": 10**8},
            trainer={"accelerator": "cuda", "precision": "bf16-mixed"},
        )
    return str(error.value), torch.cuda.max_memory_allocated() - before


def test_run_that_does_not_fit_is_refused_before_it_loads(gpu_pool, qwen3_dir):
    message, taken = gpu_pool.run(fit_too_much, str(qwen3_dir), world_size=1, init_process_group=False)[0]
    assert "100000000 tokens, 4 layers" in message
    assert "- lower train.max_tokens_per_microbatch" in message
    assert taken < 2**20  # nothing but what torch itself keeps


def test_doctor_finds_this_machine_fit():
    done = subprocess.run(
        [sys.executable, "-m", "lightning_megatron_rl", "doctor", "--device", "cuda", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    report = json.loads(done.stdout)
    findings = {finding["name"]: finding for finding in report["findings"]}
    for name in ("driver", "devices", "GPU 0", "vLLM"):
        assert findings[name]["level"] in ("ok", "note"), findings[name]
    assert report["devices"]["gpus"][0]["name"] == torch.cuda.get_device_name(0)
