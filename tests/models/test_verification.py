"""When a model is probed, what is kept of it, and what becomes of a probe that does not end."""

import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron_rl.models.hf.model import HFModel
from lightning_megatron_rl.models.verification import verify as verification
from lightning_megatron_rl.models.verification.probe import Comparison
from lightning_megatron_rl.models.verification.probe_process import ProbeError, _environment, run_probe
from lightning_megatron_rl.modules.sft import SFTModule
from lightning_megatron_rl.modules.training import TrainingSettings
from tests.distributed import WorkerPool
from tests.models.verdicts import tiny
from tests.models.workers import start_megatron
from tests.tiny_models import save_tiny_model

AGREES, DIFFERS = Comparison(1e-6, 0.0), Comparison(0.5, 0.0)


@pytest.fixture
def probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Probes so far, which agree, in a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found: list[Any] = []
    monkeypatch.setattr(verification, "run_probe", lambda *request: found.append(request) or AGREES)
    return found


@pytest.fixture
def uncovered(qwen3_dir: Path, tmp_path: Path) -> Path:
    """A model that no proof covers."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "model.safetensors").symlink_to(qwen3_dir / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(tiny("qwen3", rms_norm_eps=5e-6)))
    return directory


def cache_files(tmp_path: Path) -> list[Path]:
    return [file for file in (tmp_path / "cache" / "lightning_megatron_rl").rglob("*") if file.is_file()]


def test_a_covered_model_is_probed_if_always(probes, qwen3_dir, tmp_path):
    HFModel(str(qwen3_dir)).check_computation()
    HFModel(str(qwen3_dir), verify="never").check_computation()
    assert probes == []
    for _ in range(2):  # what is kept does not count
        HFModel(str(qwen3_dir), verify="always").check_computation()
    assert len(probes) == 2


def test_what_a_probe_found_is_kept(probes, uncovered, tmp_path):
    model = HFModel(str(uncovered))
    model.check_computation()
    model.check_computation({"recompute_granularity": "full"})  # changes nothing that is computed
    HFModel(str(uncovered)).check_computation()
    assert len(probes) == 1
    [file] = cache_files(tmp_path)
    file.write_text('{"difference": 1e-6')
    HFModel(str(uncovered)).check_computation()
    assert len(probes) == 2
    assert json.loads(file.read_text()) == {"difference": 1e-6, "frequencies": 0.0}
    file.write_text('{"difference": 0.1, "frequencies": 0}')
    HFModel(str(uncovered)).check_computation()
    assert len(probes) == 3


def test_what_is_kept_is_of_one_config_version_and_source(probes, uncovered, tmp_path, monkeypatch):
    HFModel(str(uncovered)).check_computation()
    versions = verification.installed_versions
    monkeypatch.setattr(verification, "installed_versions", lambda names: {**versions(names), "megatron-core": "0.0.1"})
    HFModel(str(uncovered)).check_computation()
    monkeypatch.setattr(verification, "_source_hash", lambda: "another")
    HFModel(str(uncovered)).check_computation()
    (uncovered / "config.json").write_text(json.dumps(tiny("qwen3", rms_norm_eps=6e-6)))
    HFModel(str(uncovered)).check_computation()
    assert len(probes) == len(cache_files(tmp_path)) == 4


def test_without_a_place_to_keep_it_a_probe_counts_all_the_same(probes, uncovered, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.warns(UserWarning, match="is not kept"):
        HFModel(str(uncovered)).check_computation()


def test_refusals_name_the_settings_and_are_not_kept(probes, uncovered, tmp_path, monkeypatch):
    message = r"rms_norm_eps=5e-06 \(proved: 1e-06\)"
    with pytest.raises(ValueError, match=f"verify_model='never'.*{message}"):
        HFModel(str(uncovered), verify="never").check_computation()
    monkeypatch.setattr(verification, "run_probe", lambda *request: DIFFERS)
    with pytest.raises(ValueError, match=rf"differ by up to 0.5 \(allowed 0.0001\).*{message}"):
        HFModel(str(uncovered)).check_computation()

    def fail(*request: Any) -> Comparison:
        raise ProbeError("KeyError: 'x'")

    monkeypatch.setattr(verification, "run_probe", fail)
    with pytest.raises(ValueError, match=f"could not both run .*KeyError: 'x'.*{message}"):
        HFModel(str(uncovered)).check_computation()
    assert cache_files(tmp_path) == []


def test_overrides_of_what_is_computed_are_probed(probes, qwen3_dir):
    HFModel(str(qwen3_dir)).check_computation({"layernorm_epsilon": 1e-3, "recompute_granularity": "full"})
    [(_, overrides, _)] = probes
    assert overrides == {"layernorm_epsilon": 1e-3}
    with pytest.raises(ValueError, match="model_config: num_layers=2: sizes are those of the checkpoint's weights"):
        HFModel(str(qwen3_dir)).check_computation({"num_layers": 2})


def test_an_unknown_mode_is_refused(qwen3_dir):
    for make in (
        lambda: SFTModule(str(qwen3_dir), train=TrainingSettings(verify_model="maybe")),
        lambda: HFModel(str(qwen3_dir), verify="no"),
    ):
        with pytest.raises(ValueError, match=r"verify_model='.*' is none of 'auto', 'always', 'never'"):
            make()


# ---- the child -------------------------------------------------------------------------------------------------------


def refused_on_this_rank(model: str, cache: str) -> str:
    """The error of a fit on this rank, whose process groups have a timeout that the child is slow for."""
    from tests.strategy.test_refusals import refusal

    os.environ["XDG_CACHE_HOME"] = cache
    return refusal(model, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, 2)


def warm_up() -> None:
    """Import what a fit needs, which on a busy machine takes longer than its ranks wait for each other."""
    import tests.strategy.test_refusals

    start_megatron(2)
    assert tests.strategy.test_refusals.refusal


@pytest.mark.deadline(800)  # a real child after two cold workers
def test_all_ranks_get_the_verdict_of_a_real_probe(worker_pool: WorkerPool, tmp_path):
    (tmp_path / "model").mkdir()
    model = save_tiny_model(tmp_path / "model", "qwen3_moe", routed_scaling_factor=2.5)
    worker_pool.run(warm_up, world_size=2, timeout=390.0)
    errors = worker_pool.run(
        refused_on_this_rank,
        str(model),
        str(tmp_path / "cache"),
        world_size=2,
        init_process_group=False,
        timeout=390.0,
    )
    for error in errors:
        assert error.startswith("ValueError"), errors
        assert "computes it differently from Transformers" in error
        assert "routed_scaling_factor=2.5 (proved: not set)" in error
    assert cache_files(tmp_path) == []


def test_a_probe_that_does_not_end_is_ended():
    started = time.monotonic()
    with pytest.raises(ProbeError, match=r"did not end within 0\.3 s"):
        run_probe(tiny("qwen3"), {}, deadline_s=0.3)
    assert time.monotonic() - started < 30  # and no process is left: tests/policing.py


def test_nothing_stays_of_a_probe_that_is_killed(tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nmktemp > "{tmp_path}/made"\nexec sleep 60\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(ProbeError, match="did not end within 2 s"):
        run_probe(tiny("qwen3"), {}, deadline_s=2)
    assert not Path((tmp_path / "made").read_text().strip()).exists()


def test_a_probe_ends_with_the_process_that_asked_for_it(tmp_path):
    (tmp_path / "request.pickle").write_bytes(pickle.dumps((tiny("qwen3"), {})))
    command = [sys.executable, "-m", "lightning_megatron_rl.models.verification.probe_process", str(tmp_path)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, env=_environment(), stderr=subprocess.DEVNULL)
    assert child.stdin is not None
    assert child.poll() is None
    child.stdin.close()
    assert child.wait(60) == 1
    assert not (tmp_path / "answer.json").exists()


def test_a_probe_that_fails_says_how(monkeypatch):
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(ProbeError, match="it ended with code 1:"):
        run_probe(tiny("qwen3"), {})


def test_the_child_is_no_rank_of_the_job(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "SLURM_PROCID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "SLURM_PROCID", "TORCHELASTIC_RUN_ID"} & set(
        _environment()
    )
    assert _environment()["CUDA_VISIBLE_DEVICES"] == ""  # Megatron on the CPU beside GPUs that torch sees fails
