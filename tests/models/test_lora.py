"""LoRA against the model without it, against its own merged weights, and against PEFT on Transformers."""

import json
import re
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from lightning_megatron_rl.models.hf.files import fingerprint
from lightning_megatron_rl.models.hf.peft_files import merge_adapter, write_adapter
from lightning_megatron_rl.models.layers.lora import LoRASettings, initial_weight
from tests.models.conftest import hf_logprobs
from tests.models.lora_runs import (
    adapter_error,
    adapter_gradients,
    adapter_logprobs,
    adapter_save_error,
    initial_adapter,
)
from tests.tiny_models import save_without_numbers

SETTINGS = LoRASettings(rank=4, alpha=6)
# fp32 sums in another order (one matrix product or two): 1e-6 is usual here, log-probs being of size 5
MERGED = 1e-5
# the same against another implementation of the whole model
TRANSFORMERS = 1e-4


def largest_difference(ours, theirs) -> float:
    return max((mine - other).abs().max().item() for mine, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, r"lora\.rank=0.*at least 1"),
        ({"alpha": 0.0}, r"lora\.alpha=0\.0.*above 0"),
        ({"alpha": float("nan")}, r"lora\.alpha=nan"),
        ({"dropout": 1.0}, r"lora\.dropout=1\.0"),
        ({"target_modules": []}, r"target_modules is empty"),
        ({"dora": True}, r"dora=True.*magnitudes"),
    ],
)
def test_settings_that_cannot_train_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LoRASettings(**options)


def test_rank_that_tensor_parallel_ranks_cannot_share_is_refused():
    with pytest.raises(ValueError, match=r"lora\.rank=6 .*tensor_model_parallel_size=4, but 6 % 4 = 2"):
        LoRASettings(rank=6).check_layout(4)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen2_tied", "qwen3"])
def test_adapters_off_merged_and_in_peft(worker_pool, checkpoint, sequences, tmp_path, family):
    """`qwen2` has biases in its attention and `qwen3` norms behind it; norms before layers are part of them in all."""
    directory = checkpoint(family)
    [found] = worker_pool.run(adapter_logprobs, directory, sequences, SETTINGS, str(tmp_path), world_size=1)
    assert_adapters_are_exported(found, directory, tmp_path, sequences)
    assert all(".adapter." in name for name in found["trainable"])
    assert len(found["trainable"]) == 4 * 4 * 2, "4 layers, 4 targets, A and B"


def assert_adapters_are_exported(found, directory: Path, written: Path, sequences) -> None:
    """`found`, of `adapter_logprobs`, is what the base, the merged export and the adapter in PEFT compute."""
    assert largest_difference(found["start"], found["base"]) == 0.0, "B is zero"
    assert largest_difference(found["off"], found["base"]) == 0.0
    assert largest_difference(found["lora"], found["base"]) > 0.1, "the adapters do nothing: this test shows nothing"
    assert largest_difference(found["lora"], found["merged"]) <= MERGED
    assert found["unchanged"], "an export changed the training weights"
    assert largest_difference(found["after"], found["lora"]) == 0.0

    assert largest_difference(found["lora"], hf_logprobs(written / "merged", sequences)) <= TRANSFORMERS
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(model, written / "adapter").eval()
    assert largest_difference(found["lora"], hf_logprobs(adapted, sequences)) <= TRANSFORMERS
    merged = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    merge_adapter(merged, written / "adapter")
    assert largest_difference(found["lora"], hf_logprobs(merged, sequences)) <= TRANSFORMERS


@pytest.mark.parametrize("family", ["qwen2_tied", "qwen3"])
def test_gradients_equal_peft_and_autograd(worker_pool, checkpoint, sequences, tmp_path, family):
    directory = checkpoint(family)
    [found] = worker_pool.run(
        adapter_gradients, directory, sequences, SETTINGS, target=str(tmp_path / "adapter"), random=True, world_size=1
    )
    assert_gradients_of_peft(found, directory, tmp_path / "adapter", sequences)


def assert_gradients_of_peft(found, directory: Path, adapter: Path, sequences) -> None:
    """`found`, of `adapter_gradients`, is what PEFT and autograd make of the same loss."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    for sequence in sequences:
        ids = torch.tensor([sequence])
        log_p = adapted(ids[:, :-1]).logits.log_softmax(-1)
        (log_p.gather(-1, ids[:, 1:, None]).sum() - (log_p.exp() * log_p).sum()).backward()
    theirs = {
        name.removeprefix("base_model.model.").replace(".default", ""): parameter.grad
        for name, parameter in adapted.named_parameters()
        if parameter.requires_grad
    }
    assert theirs.keys() == found.keys()
    for name, ours in found.items():
        # PEFT has an A for each projection, which all are ours where the layer is one: its gradient is their sum
        shared = next((group for group in (("q", "k", "v"), ("gate", "up")) if f".{group[0]}_proj.lora_A" in name), ())
        expected = theirs[name]
        if shared:
            expected = sum(theirs[name.replace(f".{shared[0]}_proj", f".{other}_proj")] for other in shared)
        elif re.search(r"\.(k|v|up)_proj\.lora_A", name):
            continue  # a copy of the one above
        # reassociated fp32 sums: some 1e-6 relative
        assert (ours - expected).norm() <= 1e-4 * expected.norm(), name


@pytest.mark.parametrize(("tp", "pp", "vpp"), [(2, 1, None), (1, 2, None), (1, 2, 2)])
def test_initial_values_do_not_depend_on_the_layout(worker_pool, checkpoint, tp, pp, vpp):
    directory = checkpoint("qwen3")
    [alone] = worker_pool.run(initial_adapter, directory, SETTINGS, 1, 1, world_size=1)
    assert len({tuple(tensor.flatten()[:4].tolist()) for name, tensor in alone.items() if "lora_A" in name}) == 4 * 4
    bound = 1 / 64**0.5  # 1 / sqrt(hidden size)
    largest = max(tensor.abs().max().item() for name, tensor in alone.items() if "q_proj.lora_A" in name)
    assert 0.95 * bound < largest <= bound
    for rank in worker_pool.run(initial_adapter, directory, SETTINGS, tp, pp, vpp, world_size=2):
        assert rank.keys() == alone.keys()
        assert all(torch.equal(rank[name], tensor) for name, tensor in alone.items())


@pytest.fixture(scope="module")
def broken(checkpoint, tmp_path_factory) -> Path:
    """A checkpoint that cannot be loaded: its weights are NaN."""
    return save_without_numbers(checkpoint("qwen3"), tmp_path_factory.mktemp("broken") / "model")


def test_initial_values_do_not_depend_on_the_default_device():
    """Lightning builds models with the GPU as the default device; "meta" stands for any that is not the CPU."""
    expected = initial_weight((4, 9), "0/layer")
    with torch.device("meta"):
        weight = initial_weight((4, 9), "0/layer")
    assert torch.equal(weight, expected)
    assert 0.25 < weight.abs().max() <= 1 / 3


def test_loading_a_broken_checkpoint_fails(worker_pool, broken):
    """What the tests of refusals before loading rest on."""
    [message] = worker_pool.run(adapter_error, broken, SETTINGS, world_size=1)
    assert "loaded weights are not finite" in message


def test_other_seed_is_another_adapter(worker_pool, checkpoint):
    [one] = worker_pool.run(initial_adapter, checkpoint("qwen3"), SETTINGS, 1, 1, world_size=1)
    [two] = worker_pool.run(initial_adapter, checkpoint("qwen3"), LoRASettings(rank=4, seed=1), 1, 1, world_size=1)
    name = "model.layers.0.self_attn.q_proj.lora_A.weight"
    assert not torch.equal(one[name], two[name])


@pytest.mark.parametrize("targets", [["linear_qkv", "linear_fc2"], ["linear_fc1"]])
@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    ],
    ids=["full", "mlp"],
)
def test_recompute_does_not_lose_gradients(worker_pool, checkpoint, sequences, targets, recompute):
    """A recomputed block none of whose inputs needs a gradient never runs its backward: here that is the first."""
    settings = LoRASettings(rank=4, target_modules=targets)
    directory = checkpoint("qwen3")
    [plain] = worker_pool.run(adapter_gradients, directory, sequences, settings, random=True, world_size=1)
    [again] = worker_pool.run(
        adapter_gradients, directory, sequences, settings, random=True, config_overrides=recompute, world_size=1
    )
    assert plain.keys() == again.keys()
    for name, gradient in plain.items():
        assert gradient.norm() > 0, name
        assert torch.allclose(gradient, again[name], rtol=1e-5, atol=1e-6 * gradient.abs().max().item()), name


def test_patterns_count_layers_over_the_whole_model(worker_pool, checkpoint):
    """Under PP2 layers 0 and 2 are both the first of their stage."""
    settings = LoRASettings(rank=4, target_modules=["*.layers.0.*.linear_qkv", "*.layers.3.mlp.linear_fc2"])
    for world_size in (1, 2):
        for found in worker_pool.run(
            initial_adapter, checkpoint("qwen3"), settings, 1, world_size, world_size=world_size
        ):
            assert {name.rpartition(".lora_")[0] for name in found} == {
                *(f"model.layers.0.self_attn.{part}_proj" for part in "qkv"),
                "model.layers.3.mlp.down_proj",
            }


@pytest.mark.parametrize(
    "target", ["q_proj", "*.linear_q", "linear", "output_layer", "*.layers.4.*", "word_embeddings"]
)
def test_target_that_matches_nothing_is_refused_before_weights_are_loaded(worker_pool, broken, target):
    settings = LoRASettings(rank=4, target_modules=["linear_qkv", target])
    for message in worker_pool.run(adapter_error, broken, settings, 2, world_size=2):
        assert message.startswith(
            f"train.lora.target_modules: {target!r} matches no linear layer. There are linear_fc1"
        )
        assert "linear_fc1, linear_fc2, linear_proj, linear_qkv, in full for example decoder.layers.0" in message


def test_stage_with_nothing_to_train_is_refused(worker_pool, checkpoint):
    settings = LoRASettings(rank=4, target_modules=["*.layers.0.*"])
    for message in worker_pool.run(adapter_error, checkpoint("qwen3"), settings, 2, world_size=2):
        assert message.startswith("train.lora.target_modules=['*.layers.0.*'] adapts no layer of some pipeline stage")
    [message] = worker_pool.run(adapter_error, checkpoint("qwen3"), settings, world_size=1)
    assert message == "no error"


def test_weights_that_would_not_stay_are_refused(worker_pool, checkpoint):
    """Megatron moves expert biases outside the optimizer; a dense model with the settings of one that has them."""
    overrides = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    directory = checkpoint("qwen3")
    for rate, message in ((1e-3, "moe_router_bias_update_rate=0.001 changes"), (0.0, "no error")):
        options = {"config_overrides": {**overrides, "moe_router_bias_update_rate": rate}, "world_size": 1}
        options["verify"] = None  # a dense model computes nothing of them
        [said] = worker_pool.run(adapter_error, directory, SETTINGS, **options)
        assert said.startswith(message)


def test_adapter_of_some_layers_names_them_in_full(worker_pool, checkpoint, sequences, tmp_path):
    settings = LoRASettings(rank=4, alpha=6, target_modules=["*.layers.1.*.linear_qkv", "linear_proj"])
    [found] = worker_pool.run(adapter_logprobs, checkpoint("qwen3"), sequences, settings, str(tmp_path), world_size=1)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == [*(f"model.layers.1.self_attn.{part}_proj" for part in "kqv"), "o_proj"]
    model = AutoModelForCausalLM.from_pretrained(checkpoint("qwen3"), dtype=torch.float32)
    adapted = PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    assert len([name for name, _ in adapted.named_parameters() if "lora_A" in name]) == 3 + 4
    assert largest_difference(found["lora"], hf_logprobs(adapted, sequences)) <= TRANSFORMERS


def test_adapter_that_cannot_be_written_is_refused_on_every_rank(worker_pool, checkpoint, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for message in worker_pool.run(
        adapter_save_error, checkpoint("qwen3"), str(tmp_path / "full"), SETTINGS, world_size=2
    ):
        assert "exists and is not empty" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]


def test_failed_write_leaves_nothing(tmp_path):
    with pytest.raises(TypeError):
        write_adapter(tmp_path / "adapter", {"a": torch.zeros(1)}, {"not JSON": object()})
    assert list(tmp_path.iterdir()) == []


def test_fingerprint_is_of_the_weights_and_not_of_their_files(checkpoint, tmp_path):
    """The same tensors in other files have it; one changed number at the start of a tensor changes it."""
    directory = checkpoint("qwen3")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    assert fingerprint(tmp_path / "sharded") == fingerprint(directory)
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[0, 0] += 1e-3
    model.save_pretrained(tmp_path / "other")
    assert fingerprint(tmp_path / "other") != fingerprint(directory)
