import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from lightning_megatron_rl.rollout.model_directory import OUTPUT_EMBEDDING, CheckpointLayout
from lightning_megatron_rl.weights.source import WeightView, WeightViews
from tests.tiny_models import tiny_config


@pytest.fixture(scope="module")
def layout(model_dir):
    return CheckpointLayout.read(model_dir)


@pytest.fixture(scope="module")
def weights(model_dir):
    return dict(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).state_dict())


def test_layout_is_that_of_the_model(layout, weights):
    assert layout.shapes == {name: tuple(tensor.shape) for name, tensor in weights.items()}
    assert layout.dtype == "float32"
    assert not layout.is_tied
    assert layout.architectures == ("Qwen3ForCausalLM",)


@pytest.mark.parametrize(("family", "tied"), [("gemma", True), ("gemma3", True), ("llama", False)])
def test_a_config_that_does_not_say_whether_embeddings_are_tied(family: str, tied: bool, tmp_path):
    """As Gemma's released ones; the output embedding beside them is a copy, of which no push has news."""
    config = tiny_config(family).to_dict()
    del config["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({OUTPUT_EMBEDDING: torch.ones(2, 2), "other": torch.ones(1)}, tmp_path / "model.safetensors")
    layout = CheckpointLayout.read(tmp_path)
    assert layout.is_tied == tied
    assert (OUTPUT_EMBEDDING in layout.shapes) != tied


def test_shards_are_read_through_their_index(tmp_path, model_dir, layout):
    AutoModelForCausalLM.from_pretrained(model_dir).save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert CheckpointLayout.read(tmp_path).shapes == layout.shapes


def test_a_complete_set_passes_unchanged(layout, weights):
    passed = dict(layout.check(weights.items()))
    assert passed.keys() == weights.keys()
    assert all(passed[name] is weights[name] for name in weights)


def test_views_and_buckets_are_held_to_the_layout_as_tensors_are(layout, weights):
    """Without a copy of what lies apart: only names and shapes are looked at."""
    name = "model.norm.weight"
    apart = weights[name].as_strided((2, 32), (0, 1))  # two blocks of rows
    views = [view for view in WeightViews.of(list(weights.items())).views if view.name != name]
    whole = layout.check_whole(WeightViews([*views, WeightView(name, apart, (64,))], stays=True))
    assert whole.stays
    assert whole.views[-1].view is apart
    buckets = [WeightViews(views[:5]), WeightViews([*views[5:], WeightView(name, apart, (64,))])]
    assert list(layout.check_buckets(buckets)) == buckets
    with pytest.raises(ValueError, match=f"1 of {len(weights)} weights are missing .*: {name}"):
        list(layout.check_buckets([WeightViews(views[:5]), WeightViews(views[5:])]))
    with pytest.raises(ValueError, match="was given twice"):
        list(layout.check_buckets([buckets[0], buckets[0]]))
    with pytest.raises(ValueError, match=rf"{name!r} has shape \(32,\)"):
        layout.check_whole(WeightViews([*views, WeightView(name, apart, (32,))]))


def test_tied_output_embedding_is_dropped_from_buckets(layout, weights):
    tied = CheckpointLayout(
        {name: shape for name, shape in layout.shapes.items() if name != OUTPUT_EMBEDDING}, layout.dtype, is_tied=True
    )
    views = WeightViews.of(list(weights.items())).views
    output = [view for view in views if view.name == OUTPUT_EMBEDDING]
    others = [view for view in views if view.name != OUTPUT_EMBEDDING]
    first, second = tied.check_buckets([WeightViews([*output, *others[:1]], stays=True), WeightViews(others[1:])])
    assert [view.name for view in first.views] == [others[0].name]
    assert first.stays
    assert len(second) == len(others) - 1
    taken = []  # whoever takes one bucket has one made: what it reads is overwritten by the next but one
    passed = tied.check_buckets(
        taken.append(number) or bucket for number, bucket in enumerate(map(WeightViews, [output, others]))
    )
    assert len(next(passed)) == 0
    assert taken == [0]
    assert len(next(passed)) == len(others)


def test_missing_weight_is_refused(layout, weights):
    part = [item for item in weights.items() if item[0] != "model.norm.weight"]
    with pytest.raises(ValueError, match=f"1 of {len(weights)} weights are missing .*: model.norm.weight"):
        list(layout.check(part))


def test_unknown_weight_is_refused(layout, weights):
    with pytest.raises(ValueError, match=r"'decoder.final_layernorm.weight' is not in the model's checkpoint"):
        list(layout.check([*weights.items(), ("decoder.final_layernorm.weight", torch.ones(64))]))


def test_repeated_weight_is_refused(layout, weights):
    with pytest.raises(ValueError, match=r"'model.norm.weight' was given twice"):
        list(layout.check([*weights.items(), ("model.norm.weight", torch.ones(64))]))


def test_padded_vocabulary_is_refused(layout, weights):
    padded = weights | {"lm_head.weight": torch.zeros(160, 64)}
    with pytest.raises(ValueError, match=r"'lm_head.weight' has shape \(160, 64\).*\(128, 64\)"):
        list(layout.check(padded.items()))


def test_tied_output_embedding_may_come_or_not(tied_model_dir):
    layout = CheckpointLayout.read(tied_model_dir)
    assert layout.is_tied
    weights = dict(AutoModelForCausalLM.from_pretrained(tied_model_dir).state_dict())
    assert "lm_head.weight" in weights
    without = {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}
    assert dict(layout.check(weights.items())).keys() == dict(layout.check(without.items())).keys() == without.keys()


def test_recomputed_buffers_of_old_checkpoints_are_not_asked_for(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16"}))
    names = ["model.norm.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"]
    save_file({name: torch.ones(2) for name in names}, tmp_path / "model.safetensors")
    layout = CheckpointLayout.read(tmp_path)
    assert list(layout.shapes) == ["model.norm.weight"]
    assert layout.dtype == "bfloat16"


def test_directory_without_config_or_weights_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no config\.json"):
        CheckpointLayout.read(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no model\.safetensors"):
        CheckpointLayout.read(tmp_path)
