"""What a checkpoint holds besides a language model: adapters, value heads, a critic beside the policy."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from lightning_megatron_rl.checkpoints.manifest import FileRecord, read_manifest, write_manifest
from lightning_megatron_rl.models.layers.lora import LoRASettings
from tests.convert.jobs import assert_same_tensors, convert, must_convert, tensors
from tests.distributed import WorkerPool
from tests.modules.ppo_runs import fit_ppo
from tests.modules.preference_runs import fit_pairs
from tests.modules.test_lora import fit_lora
from tests.selection import by_default
from tests.strategy.test_megatron import LAYOUTS
from tests.tiny_models import save_tiny_model
from tests.training import Run, frozen_sequences


def saving(directory: Path) -> dict[str, Any]:
    keeper = ModelCheckpoint(directory, "{step}", every_n_train_steps=1)
    return {"steps": 1, "callbacks": [keeper], "trainer": {"enable_checkpointing": True}}


def run(pool: WorkerPool, function: Any, layout: str, *arguments: Any, **options: Any) -> Run:
    world_size, strategy = LAYOUTS[layout]
    return pool.run(
        function, *arguments, strategy, world_size, world_size=world_size, init_process_group=False, **options
    )[0]


@pytest.fixture(scope="module")
def adapted(worker_pool: WorkerPool, qwen3_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """A checkpoint of adapters, trained under TP2."""
    directory = tmp_path_factory.mktemp("adapted")
    settings = LoRASettings(rank=4, alpha=8)
    trained = run(worker_pool, fit_lora, "tp2_sp", qwen3_dir, settings=settings, **saving(directory))
    return directory / "step=1.ckpt", trained


def test_adapters_are_merged(worker_pool: WorkerPool, adapted: tuple[Path, Run], tmp_path: Path):
    """Into the model that they were trained on, which the checkpoint names; no --model."""
    path, trained = adapted
    must_convert(worker_pool, path, tmp_path / "hf", "--verify")
    have = tensors(tmp_path / "hf")
    assert have.keys() == trained.weights.keys()
    for name, weight in trained.weights.items():  # B A is a sum in another order on two ranks, in fp32
        torch.testing.assert_close(have[name], weight, rtol=0, atol=1e-6, msg=name)


def test_adapters_alone_are_those_of_the_run(
    worker_pool: WorkerPool, qwen3_dir: Path, adapted: tuple[Path, Run], tmp_path: Path
):
    path, trained = adapted
    must_convert(worker_pool, path, tmp_path / "peft", "--verify", "--adapter", "peft", "--model", qwen3_dir)
    have = {name.removeprefix("base_model.model."): t for name, t in tensors(tmp_path / "peft").items()}
    assert_same_tensors(have, trained.extra["adapter"])
    must_convert(worker_pool, path, tmp_path / "hf")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    base = AutoModelForCausalLM.from_pretrained(qwen3_dir, dtype=torch.float32)
    with_adapter = PeftModel.from_pretrained(base, tmp_path / "peft").eval()
    tokens = frozen_sequences(1, seed=9)[0].token_ids[None]
    with torch.no_grad():
        one, two = (model(tokens).logits.log_softmax(-1) for model in (merged, with_adapter))
    assert (one - two).abs().max() <= 1e-4  # two matrix products in place of one, in fp32


def test_adapters_on_another_model_are_refused(worker_pool: WorkerPool, adapted: tuple[Path, Run], tmp_path: Path):
    other = save_tiny_model(tmp_path / "other", "qwen3", seed=1)
    code, shown = convert(worker_pool, adapted[0], tmp_path / "hf", "--model", other)
    assert code == 1
    assert "holds adapters on other weights than those of" in shown
    assert not (tmp_path / "hf").exists()


@pytest.mark.slow
def test_adapters_of_experts_are_merged(worker_pool: WorkerPool, qwen3_moe_dir: Path, tmp_path: Path):
    settings = LoRASettings(rank=4, alpha=8)
    trained = run(worker_pool, fit_lora, "tp2_sp", qwen3_moe_dir, settings=settings, **saving(tmp_path))
    must_convert(worker_pool, tmp_path / "step=1.ckpt", tmp_path / "hf", "--verify")
    have = tensors(tmp_path / "hf")
    for name, weight in trained.weights.items():
        torch.testing.assert_close(have[name], weight, rtol=0, atol=1e-6, msg=name)


def test_reward_model_becomes_a_classifier_and_comes_back(worker_pool: WorkerPool, qwen3_dir: Path, tmp_path: Path):
    trained = run(worker_pool, fit_pairs, "pp2", "reward", qwen3_dir, **saving(tmp_path))
    must_convert(worker_pool, tmp_path / "step=1.ckpt", tmp_path / "hf", "--verify")
    assert_same_tensors(tensors(tmp_path / "hf"), trained.weights)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert torch.equal(model.score.weight, trained.weights["score.weight"])
    must_convert(worker_pool, tmp_path / "hf", tmp_path / "again.ckpt", "--verify")
    must_convert(worker_pool, tmp_path / "again.ckpt", tmp_path / "hf2", "--verify")
    assert_same_tensors(tensors(tmp_path / "hf2"), trained.weights)


@pytest.mark.parametrize("layout", by_default(["tp2_sp"], ["tp2_sp", "pp2"]))
def test_critic_is_chosen_by_name(worker_pool: WorkerPool, qwen3_dir: Path, tmp_path: Path, layout: str):
    trained = run(worker_pool, fit_ppo, layout, qwen3_dir, **saving(tmp_path))
    path = tmp_path / "step=1.ckpt"
    shown = must_convert(worker_pool, path, tmp_path / "actor")
    assert "not converted: critic (--part NAME)" in shown
    assert_same_tensors(tensors(tmp_path / "actor"), trained.weights)
    must_convert(worker_pool, path, tmp_path / "critic", "--part", "critic", "--verify")
    assert_same_tensors(tensors(tmp_path / "critic"), trained.extra["critic"])
    config = json.loads((tmp_path / "critic" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]
    code, shown = convert(worker_pool, path, tmp_path / "no", "--part", "referee")
    assert code == 1
    assert "has no model 'referee' beside the trained one: it has critic." in shown


def test_checkpoint_without_settings_wants_a_model(
    worker_pool: WorkerPool, qwen3_dir: Path, adapted: tuple[Path, Run], tmp_path: Path
):
    """As a strategy writes them whose module does not say what it trains."""
    must_convert(worker_pool, qwen3_dir, tmp_path / "c.ckpt")
    old = without_settings(tmp_path / "c.ckpt")
    code, shown = convert(worker_pool, old, tmp_path / "hf")
    assert code == 1
    assert "has no hf/ with config and tokenizer" in shown
    must_convert(worker_pool, old, tmp_path / "hf", "--model", qwen3_dir)
    assert_same_tensors(tensors(tmp_path / "hf"), tensors(qwen3_dir))
    shutil.copytree(adapted[0], tmp_path / "adapted.ckpt")
    code, shown = convert(worker_pool, without_settings(tmp_path / "adapted.ckpt"), tmp_path / "no")
    assert code == 1
    assert "holds adapters only, and does not say of which model" in shown


def without_settings(path: Path) -> Path:
    manifest = read_manifest(path)
    kept = {name: FileRecord(**record) for name, record in manifest["files"].items() if not name.startswith("hf/")}
    description = {name: manifest[name] for name in manifest if name not in ("files", "manifest_sha256")}
    write_manifest(path, description, kept)
    shutil.rmtree(path / "hf")
    return path
