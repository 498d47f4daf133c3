"""Finding checkpoints: directories, the hub's cache, and what is said about names that lead nowhere."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_megatron_rl.models.hf_files import local_checkpoint, read_header
from tests.distributed import WorkerPool
from tests.models.workers import cached_hub_model

REVISION = "0123456789abcdef0123456789abcdef01234567"


def test_a_directory_is_taken_as_it_is(checkpoint: Callable[[str], Path]):
    assert local_checkpoint(str(checkpoint("qwen3"))) == checkpoint("qwen3")


@pytest.mark.parametrize("name", ["/no/such/model", "./model", "~/no-such-model-here", "gpt2", "a/b/c"])
def test_a_path_that_does_not_exist_is_named(name: str):
    with pytest.raises(ValueError, match=f"{name!r} is neither a directory nor a hub name"):
        local_checkpoint(name)


def test_a_directory_without_config_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"has no config\.json: give the directory"):
        local_checkpoint(str(tmp_path))


def test_a_directory_without_weights_is_refused(checkpoint: Callable[[str], Path], tmp_path: Path):
    shutil.copy(checkpoint("qwen3") / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match=r"no \*\.safetensors weights: save the model again"):
        local_checkpoint(str(tmp_path))


def test_a_damaged_file_is_named(checkpoint: Callable[[str], Path], tmp_path: Path):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes((checkpoint("qwen3") / weights.name).read_bytes()[:500])
    with pytest.raises(ValueError, match=rf"{weights} is damaged or no safetensors file"):
        read_header(weights)


def test_a_hub_name_leads_to_the_cache_on_all_ranks(
    checkpoint: Callable[[str], Path], tmp_path: Path, worker_pool: WorkerPool
):
    model = tmp_path / "models--acme--tiny"
    shutil.copytree(checkpoint("qwen3"), model / "snapshots" / REVISION)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(REVISION)
    results = worker_pool.run(cached_hub_model, "acme/tiny", str(tmp_path), world_size=2)
    assert results == [str(model / "snapshots" / REVISION)] * 2


def test_a_failed_download_is_reported_by_all_ranks(tmp_path: Path, worker_pool: WorkerPool):
    results = worker_pool.run(cached_hub_model, "acme/absent", str(tmp_path), world_size=2)
    assert all(result.startswith("ValueError: cannot download model 'acme/absent'") for result in results)
