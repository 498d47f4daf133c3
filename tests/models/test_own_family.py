"""A family from outside the package, examples/families: checked by the probe, computed, exported."""

import json
import os
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from lightning_megatron_rl.models.families.registry import ADDED, FAMILIES
from tests.command_line import ROOT
from tests.distributed import WorkerPool
from tests.models.conftest import TOLERANCE, hf_logprobs, worst_difference
from tests.models.test_families import different
from tests.models.workers import families_under_layout
from tests.tiny_models import save_tiny_model

EXAMPLES = ROOT / "examples" / "families"


def own_family(directory: str, cache: str, sequences: list[list[int]]):
    from lightning_megatron_rl.models.families.registry import add_family

    sys.path.insert(0, str(EXAMPLES))
    os.environ["XDG_CACHE_HOME"] = cache
    assert add_family("own_qwen") is add_family("own_qwen")
    assert os.environ[ADDED] == "own_qwen"
    return families_under_layout({"own": directory}, sequences, False, {}, verify="auto")["own"]


@pytest.mark.slow
def test_family_of_another_package(qwen2_dir: Path, tmp_path: Path, sequences: list[list[int]]):
    own = tmp_path / "own"
    own.mkdir()
    for file in qwen2_dir.iterdir():
        (own / file.name).symlink_to(file)
    config = json.loads((qwen2_dir / "config.json").read_text())
    (own / "config.json").unlink()
    named = {"model_type": "own_qwen", "architectures": ["OwnQwenForCausalLM"]}
    (own / "config.json").write_text(json.dumps({**config, **named}))
    pool = WorkerPool(1)  # of its own: the family stays in the process
    [(padded, packed, exported)] = pool.run(own_family, str(own), str(tmp_path / "cache"), sequences, world_size=1)
    pool.close()
    expected = hf_logprobs(qwen2_dir, sequences, temperature=0.7)
    for found in (padded, packed):
        assert worst_difference(found, expected) <= TOLERANCE
    assert different(exported, load_file(qwen2_dir / "model.safetensors")) == []
    (verdict,) = (tmp_path / "cache").rglob("*.json")  # no proof covers it: a probe did
    assert json.loads(verdict.read_text())["difference"] <= TOLERANCE
    assert "own_qwen" not in FAMILIES  # of this process


@pytest.fixture(scope="session")
def qwen2_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("qwen2"), "qwen2")
