"""Loading, exporting and saving: bit-equal weights under every layout, files that Transformers reads, and refusals."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lightning_megatron_rl.models.hf.model import HFModel
from lightning_megatron_rl.models.hf.writer import CheckpointWriter
from lightning_megatron_rl.models.layers.lora import LoRASettings
from tests.distributed import WorkerPool
from tests.models.workers import (
    build_error,
    copies_of_the_model,
    exported_weights,
    random_weights,
    save_under_layout,
    save_until_files_are_too_large,
    sinks_of_rank,
)
from tests.selection import by_default


@pytest.mark.parametrize(
    "options",
    [{"vpp": 2}, {"config_overrides": {"num_layers_in_first_pipeline_stage": 1}}],
    ids=["virtual stages", "uneven stages"],
)
@pytest.mark.parametrize("family", ["qwen2_tied", "deepseek_v3"])  # the first layer of one is unlike its others
def test_export_under_other_pipelines(
    family: str, options: dict[str, Any], checkpoint: Callable[[str], Path], worker_pool: WorkerPool
):
    directory = checkpoint(family)
    expected = load_file(directory / "model.safetensors")
    for result in worker_pool.run(exported_weights, str(directory), 1, 2, world_size=2, **options):
        assert set(result) == set(expected)
        assert all(torch.equal(result[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("tp", "pp"), by_default([(1, 1)], [(1, 1), (2, 2)], several=True))
def test_export_cuts_off_the_padding_of_the_vocabulary(tp: int, pp: int, odd_vocabulary: Path, worker_pool: WorkerPool):
    expected = load_file(odd_vocabulary / "model.safetensors")
    for result in worker_pool.run(exported_weights, str(odd_vocabulary), tp, pp, world_size=tp * pp):
        assert result["model.embed_tokens.weight"].shape[0] == 127
        assert all(torch.equal(result[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("family", "bias"), [("deepseek_v3", "gate.e_score_correction_bias"), ("hy_v3", "expert_bias")]
)
def test_export_in_another_dtype(family: str, bias: str, checkpoint: Callable[[str], Path], worker_pool: WorkerPool):
    directory = checkpoint(family)
    [result] = worker_pool.run(exported_weights, str(directory), 1, 1, dtype=torch.bfloat16, world_size=1)
    kept = [name for name, tensor in result.items() if tensor.dtype == torch.float32]
    assert kept == [f"model.layers.{layer}.mlp.{bias}" for layer in (1, 2, 3)]
    for name, tensor in load_file(directory / "model.safetensors").items():
        assert torch.equal(result[name], tensor if name in kept else tensor.bfloat16())


@pytest.mark.parametrize(("family", "tp", "pp"), [("qwen2_tied", 1, 2), ("qwen3", 2, 1)])
def test_saved_checkpoint_loads_in_transformers_with_the_same_logits(
    family: str, tp: int, pp: int, checkpoint: Callable[[str], Path], tmp_path: Path, worker_pool: WorkerPool
):
    directory, target = checkpoint(family), tmp_path / "deep" / "export"
    worker_pool.run(save_under_layout, str(directory), str(target), tp, pp, max_shard_size=200_000, world_size=tp * pp)
    assert len(list(target.glob("model-*-of-*.safetensors"))) > 2
    assert [path.name for path in target.parent.iterdir()] == ["export"]
    ids = torch.arange(1, 20)[None]
    ours, theirs = (AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval() for path in (target, directory))
    assert ours.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)
    tokenizers = [AutoTokenizer.from_pretrained(path) for path in (target, directory)]
    conversation = [{"role": "user", "content": "1+1="}]
    assert len({str(tokenizer.apply_chat_template(conversation)) for tokenizer in tokenizers}) == 1
    assert (target / "generation_config.json").read_text() == (directory / "generation_config.json").read_text()


def test_saved_checkpoint_names_its_dtype(checkpoint: Callable[[str], Path], tmp_path: Path, worker_pool: WorkerPool):
    target = tmp_path / "export"
    target.mkdir()  # an empty directory is no obstacle
    arguments = (str(checkpoint("qwen3")), str(target), 1, 1)
    worker_pool.run(save_under_layout, *arguments, dtype=torch.bfloat16, world_size=1)
    assert (target / "model.safetensors").is_file()
    assert AutoModelForCausalLM.from_pretrained(target, dtype="auto").dtype == torch.bfloat16


def test_saving_into_a_directory_with_files_is_refused_on_all_ranks(
    checkpoint: Callable[[str], Path], tmp_path: Path, worker_pool: WorkerPool
):
    (tmp_path / "precious").write_text("work")
    with pytest.raises(RuntimeError) as error:
        worker_pool.run(save_under_layout, str(checkpoint("qwen3")), str(tmp_path), 2, 1, world_size=2)
    assert str(error.value).count("exists and is not empty: remove it or choose another directory") >= 2
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_a_writing_error_of_rank_0_reaches_all_ranks_and_leaves_nothing(
    checkpoint: Callable[[str], Path], tmp_path: Path, worker_pool: WorkerPool
):
    target = str(tmp_path / "export")
    arguments = (str(checkpoint("qwen3")), target, 50_000)
    for message, left in worker_pool.run(save_until_files_are_too_large, *arguments, world_size=2):
        assert message.startswith(f"writing {target} failed")
        assert left == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_layer": 2}, r"'num_layer' is no field of .* did you mean num_layers"),
        ({"mtp_num_layers": 1}, "mtp_num_layers=1 .*neither loaded, trained nor exported"),
        ({"sequence_parallel": True}, "sequence_parallel is decided by the strategy"),
        ({"recompute_granularity": "full", "zzz": 1}, "'zzz' is no field"),
    ],
)
def test_overrides_that_nobody_reads_are_refused(
    overrides: dict[str, Any], message: str, checkpoint: Callable[[str], Path], worker_pool: WorkerPool
):
    [error] = worker_pool.run(build_error, str(checkpoint("qwen3")), 1, 1, config_overrides=overrides, world_size=1)
    assert re.search(message, error)


def test_a_layout_that_does_not_divide_is_refused_before_loading(
    checkpoint: Callable[[str], Path], worker_pool: WorkerPool
):
    errors = worker_pool.run(build_error, str(checkpoint("qwen3")), 1, 3, world_size=3)
    assert all("num_hidden_layers=4 over pipeline_model_parallel_size=3" in error for error in errors)


def test_weights_are_random_without_loading(checkpoint: Callable[[str], Path], worker_pool: WorkerPool):
    [weights] = worker_pool.run(random_weights, str(checkpoint("qwen3")), world_size=1)
    loaded = load_file(checkpoint("qwen3") / "model.safetensors")["model.embed_tokens.weight"]
    assert all(weight.isfinite().all() for weight in weights.values())
    assert weights["embedding.word_embeddings.weight"].std() > 0
    assert not torch.equal(weights["embedding.word_embeddings.weight"], loaded)


@pytest.mark.parametrize("lora", [None, LoRASettings(target_modules=["linear_qkv"])])
def test_layers_copies_of_the_config_have_no_copy_of_the_model(checkpoint, worker_pool, lora):
    """Megatron copies its config for each layer of experts: all names of a model would go along each time."""
    assert worker_pool.run(copies_of_the_model, str(checkpoint("qwen3_moe")), lora, world_size=1) == [[]]


def test_quantization_is_not_claimed_of_an_export(checkpoint: Callable[[str], Path], tmp_path: Path):
    config = AutoConfig.from_pretrained(checkpoint("qwen3"))
    config.quantization_config = {"quant_method": "fp8"}
    writer = CheckpointWriter(tmp_path / "export", 1000)
    writer.add("weight", torch.ones(2))
    writer.finish(checkpoint("qwen3"), config, torch.bfloat16)
    assert "quantization_config" not in json.loads((tmp_path / "export" / "config.json").read_text())
    assert config.quantization_config == {"quant_method": "fp8"}


def test_sinks_are_split_over_tensor_parallel_ranks(checkpoint: Callable[[str], Path], worker_pool: WorkerPool):
    sinks = load_file(checkpoint("gpt_oss") / "model.safetensors")["model.layers.0.self_attn.sinks"]
    for rank, (part, in_checkpoint, counts) in enumerate(
        worker_pool.run(sinks_of_rank, str(checkpoint("gpt_oss")), world_size=2)
    ):
        assert torch.equal(part, sinks.chunk(2)[rank])
        assert in_checkpoint == ((4, 4), (0, 2 * rank))  # all layers, all heads; where this rank's begin
        assert counts  # otherwise the gradient norm takes rank 1's for a copy of rank 0's


def test_tokenizer_and_dtype_are_the_checkpoints(checkpoint: Callable[[str], Path]):
    model = HFModel(str(checkpoint("qwen3")))
    assert model.tokenizer.encode("1+1=") == AutoTokenizer.from_pretrained(model.path).encode("1+1=")
    assert model.dtype == torch.float32
