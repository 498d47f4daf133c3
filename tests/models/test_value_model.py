"""Value heads: bit-equal weights in every layout, Transformers' classifiers as they come and go, and refusals."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSequenceClassification

from lightning_megatron_rl.models.families.registry import FAMILIES
from lightning_megatron_rl.models.layers.value_head import new_weight
from lightning_megatron_rl.models.value_model import HEAD, ValueModel
from tests.convert.jobs import convert
from tests.distributed import WorkerPool
from tests.models.test_hf_check import damaged
from tests.models.value_workers import build_error, exported, head_of_rank, save
from tests.tiny_models import make_tokenizer, tiny_config


@pytest.mark.parametrize(("tp", "pp", "vpp"), [(1, 1, None), (2, 1, None), (1, 2, None), (1, 2, 2)])
@pytest.mark.parametrize("family", ["qwen3", "qwen2_tied"])
def test_export_has_the_base_and_the_new_head_in_every_layout(
    family: str, tp: int, pp: int, vpp: int | None, checkpoint: Callable[[str], Path], worker_pool: WorkerPool
):
    directory = checkpoint(family)
    expected = load_file(directory / "model.safetensors")
    expected.pop("lm_head.weight", None)
    expected["score.weight"] = new_weight(expected["model.norm.weight"].numel())
    for result in worker_pool.run(exported, directory, tp, pp, vpp, world_size=tp * pp):
        assert result.keys() == expected.keys()
        assert all(torch.equal(result[name], expected[name]) for name in expected)


def test_new_head_does_not_depend_on_the_default_device():
    """Lightning builds models with the GPU as the default device; "meta" stands for any that is not the CPU."""
    expected = new_weight(8)
    with torch.device("meta"):
        head = new_weight(8)
    assert torch.equal(head, expected)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model that Transformers made."""
    directory = tmp_path_factory.mktemp("classifier") / "model"
    torch.manual_seed(5)
    config = tiny_config("qwen3")
    config.num_labels = 1
    AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_a_reward_model_of_transformers_is_loaded_with_its_head(
    tp: int, pp: int, classifier: Path, worker_pool: WorkerPool
):
    expected = load_file(classifier / "model.safetensors")
    for result in worker_pool.run(exported, classifier, tp, pp, world_size=2):
        assert result.keys() == expected.keys()
        assert all(torch.equal(result[name], expected[name]) for name in expected)


@pytest.mark.parametrize("family", ["llama", "qwen2_tied", "mistral", "gemma3"])
def test_families_save_classifiers_that_transformers_loads(
    family: str, checkpoint: Callable[[str], Path], worker_pool: WorkerPool, tmp_path: Path
):
    worker_pool.run(save, checkpoint(family), tmp_path / "model", world_size=1)
    model, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "model", dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.config.num_labels == 1
    assert model.config.pad_token_id == 0
    assert torch.equal(model.score.weight, new_weight(model.score.weight.numel()))


def test_one_head_on_tensor_parallel_ranks(checkpoint: Callable[[str], Path], worker_pool: WorkerPool):
    """Under sequence parallelism each rank's gradient is of its tokens; the norm must count the head once."""
    found = worker_pool.run(head_of_rank, checkpoint("qwen3"), world_size=2)
    assert [summed for summed, _, _ in found] == [True, True]
    assert sum(counted for _, counted, _ in found) == 1
    assert torch.equal(found[0][2], found[1][2])


def test_families_without_a_classifier_make_no_value_model(checkpoint: Callable[[str], Path]):
    from lightning_megatron_rl.models.value_model import _classifier

    without = {"glm4_moe", "olmoe", "minimax_m2", "hy_v3"}
    for model_type in FAMILIES.keys() - without:
        assert _classifier(type("Config", (), {"model_type": model_type})).endswith("ForSequenceClassification")
    for family in without:
        with pytest.raises(ValueError, match=rf"reward model of type '{family}' .* no sequence classifier"):
            ValueModel(str(checkpoint(family)))


def test_a_classifier_with_several_labels_is_refused(classifier: Path, tmp_path: Path):
    for file in classifier.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = AutoConfig.from_pretrained(classifier)
    config.num_labels = 3
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    with pytest.raises(ValueError, match="is a classifier with num_labels=3: a reward model or critic has one label"):
        ValueModel(str(tmp_path))


def test_checkpoints_without_padding_token_take_the_tokenizers(checkpoint: Callable[[str], Path], tmp_path: Path):
    for file in checkpoint("qwen3").iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((checkpoint("qwen3") / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({**config, "pad_token_id": None}))
    model = ValueModel(str(tmp_path))
    assert model.config.pad_token_id is None
    assert model.pad_token_id == model.export_config.pad_token_id == 0


def test_a_head_that_cannot_be_is_refused(classifier: Path, tmp_path: Path, worker_pool: WorkerPool):
    """By its shape before anything is loaded; NaN on all ranks, though the head is on the last stage only."""
    two = damaged(classifier, tmp_path / "two", lambda held: held.update({HEAD: held[HEAD].repeat(2, 1)}))
    with pytest.raises(ValueError, match=r"score\.weight has shape \(2, 64\) instead of \(1, 64\)"):
        ValueModel(two)
    nan = damaged(classifier, tmp_path / "nan", lambda held: held.update({HEAD: held[HEAD] * torch.nan}))
    messages = worker_pool.run(build_error, nan, 2, world_size=2)
    assert all(f"{HEAD} has 64 NaN and 0 infinite of 64 numbers" in message for message in messages)
    code, shown = convert(worker_pool, nan, tmp_path / "c.ckpt")
    assert code == 1
    assert f"{HEAD} has 64 NaN" in shown
