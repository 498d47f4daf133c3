"""Log-probs, entropy and gradients of Megatron chunks against Transformers, per token, under every layout."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.distributed import WorkerPool
from tests.models.conftest import TOLERANCE, hf_logprobs, reference, worst_difference
from tests.models.workers import (
    bf16_logprobs,
    equal_length_logprobs,
    exported_gradients,
    logprobs_under_layout,
)
from tests.selection import by_default


@pytest.mark.parametrize(
    "family", by_default(["olmoe"], ["llama", "olmoe"])
)  # 4 heads in 2 groups; norms over all heads
def test_more_ranks_than_key_value_heads(
    family: str, checkpoint: Callable[[str], Path], sequences: list[list[int]], worker_pool: WorkerPool
):
    directory = checkpoint(family)
    results = worker_pool.run(logprobs_under_layout, str(directory), sequences, 4, 1, True, 1.0, world_size=4)
    expected = hf_logprobs(directory, sequences)
    for padded, packed in results:
        assert worst_difference(padded, expected) <= TOLERANCE
        assert worst_difference(packed, expected) <= TOLERANCE


def test_padded_vocabulary_takes_no_part_in_the_softmax(
    odd_vocabulary: Path, sequences: list[list[int]], worker_pool: WorkerPool
):
    sequences = [[min(token, 126) for token in sequence] for sequence in sequences]
    results = worker_pool.run(logprobs_under_layout, str(odd_vocabulary), sequences, 2, 2, True, 1.0, world_size=4)
    assert worst_difference(results[-1][1], hf_logprobs(odd_vocabulary, sequences)) <= TOLERANCE


def test_virtual_pipeline_stages(checkpoint: Callable[[str], Path], worker_pool: WorkerPool):
    sequences = [[(7 * i + 3 * j) % 128 for j in range(12)] for i in range(8)]
    directory = checkpoint("qwen2_tied")
    results = worker_pool.run(equal_length_logprobs, str(directory), sequences, 2, 2, world_size=2)
    assert results[0] is None
    assert worst_difference(results[1], hf_logprobs(directory, sequences)) <= TOLERANCE


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rope_scaling(
    rope: dict[str, float | str],
    checkpoint: Callable[[str], Path],
    sequences: list[list[int]],
    tmp_path: Path,
    worker_pool: WorkerPool,
):
    directory = tmp_path / "llama"
    shutil.copytree(checkpoint("llama"), directory)
    config = json.loads((directory / "config.json").read_text())
    config["rope_parameters"] = {"rope_theta": 500000.0, **rope}
    (directory / "config.json").write_text(json.dumps(config))
    [[_, packed]] = worker_pool.run(logprobs_under_layout, str(directory), sequences, 1, 1, False, 1.0, world_size=1)
    expected = hf_logprobs(directory, sequences)
    assert worst_difference(packed, expected) <= TOLERANCE
    assert worst_difference(hf_logprobs(checkpoint("llama"), sequences), expected) > 10 * TOLERANCE


def test_bf16_agrees_with_transformers_in_bf16(
    checkpoint: Callable[[str], Path], sequences: list[list[int]], worker_pool: WorkerPool
):
    directory = checkpoint("qwen2")
    [results] = worker_pool.run(bf16_logprobs, str(directory), sequences, world_size=1)
    exact = hf_logprobs(directory, sequences)
    theirs = hf_logprobs(directory, sequences, dtype=torch.bfloat16)

    def mean_error(values: list[Tensor]) -> float:
        return (torch.cat(values, 1)[0] - torch.cat(exact, 1)[0]).abs().mean().item()

    # both round at every layer, in other places: ours may not lose more than half again as much as Transformers does
    assert 0 < mean_error(results) <= 1.5 * mean_error(theirs)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(
    "family",
    by_default(
        ["qwen2_tied", "qwen3", "mistral_window", "qwen3_moe", "deepseek_v3", "gemma3", "gpt_oss", "olmoe", "gemma2"],
        [
            *("qwen2_tied", "qwen3", "mistral_window", "qwen3_moe", "deepseek_v3", "gemma3", "gpt_oss", "olmoe"),
            *("gemma2", "glm4_moe", "minimax_m2", "nemotron", "gemma", "exaone4", "hy_v3"),
        ],
    ),
)
def test_gradients_match_transformers(
    family: str,
    packed: bool,
    tp: int,
    checkpoint: Callable[[str], Path],
    sequences: list[list[int]],
    tmp_path: Path,
    worker_pool: WorkerPool,
):
    if family == "gpt_oss" and tp > 1:
        pytest.skip("its experts cannot be split over tensor-parallel ranks")
    directory = checkpoint(family)
    without_balancing = {"moe_aux_loss_coeff": 0.0}
    results = worker_pool.run(
        exported_gradients,
        str(directory),
        sequences,
        packed,
        tp,
        config_overrides=without_balancing,
        world_size=tp,
    )
    model = reference(directory)
    for sequence in sequences:
        ids = torch.tensor([sequence])
        log_p = model(ids[:, :-1]).logits.log_softmax(-1)
        (log_p.gather(-1, ids[:, 1:, None]).sum() - (log_p.exp() * log_p).sum()).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    model.save_pretrained(tmp_path)  # Transformers has the experts of a layer in one tensor, and saves them one by one
    expected = load_file(tmp_path / "model.safetensors")
    for result in results:
        assert set(result) == set(expected)
        for name, gradient in result.items():
            scale = expected[name].abs().max().item()
            # fp32 through 4 layers of a random model, relative to the largest element of the tensor
            torch.testing.assert_close(
                gradient, expected[name], atol=1e-4 * scale, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_recomputed_activations_give_the_same_gradients(
    checkpoint: Callable[[str], Path], sequences: list[list[int]], worker_pool: WorkerPool
):
    arguments = (str(checkpoint("qwen3")), sequences, True, 1)
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    [expected] = worker_pool.run(exported_gradients, *arguments, world_size=1)
    [result] = worker_pool.run(exported_gradients, *arguments, config_overrides=recompute, world_size=1)
    assert all(torch.equal(result[name], expected[name]) for name in expected)  # the same operations, done twice
