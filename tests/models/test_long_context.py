"""Positions beyond those that a model was first trained with: scaled rotary embeddings, and long packed sequences."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_megatron_rl.models.families.rope import scaled_positions
from lightning_megatron_rl.modules.start import check_positions
from lightning_megatron_rl.rollout import GenerationRequest, SamplingParams, VLLMEngine
from tests.distributed import WorkerPool
from tests.models.conftest import TOLERANCE, hf_logprobs, worst_difference
from tests.models.workers import families_under_layout
from tests.selection import by_default
from tests.tiny_models import VOCAB_SIZE

ORIGINAL, FACTOR = 64, 4.0
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": FACTOR, "original_max_position_embeddings": ORIGINAL}
FAMILIES = ("qwen2", "qwen3", "qwen3_moe", "llama")
LAYOUTS = {"tp1": {}, "tp2+sp": {"tp": 2}, "pp2": {"pp": 2}, "cp2": {"cp": 2}}
SAMPLER = 1e-5  # fp32 on both sides


@pytest.fixture(scope="session")
def scaled(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models with YaRN in config.json."""
    found = {}
    for family in FAMILIES:
        found[family] = tmp_path_factory.mktemp("yarn") / family
        shutil.copytree(checkpoint(family), found[family])
        config = json.loads((found[family] / "config.json").read_text())
        config |= {"rope_parameters": YARN, "max_position_embeddings": int(ORIGINAL * FACTOR)}
        (found[family] / "config.json").write_text(json.dumps(config))
    return found


def tokens(*lengths: int) -> list[list[int]]:
    """Sequences of random tokens."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("layout", by_default(["tp1"], LAYOUTS))
def test_yarn_is_that_of_transformers_beyond_the_original_length(
    layout: str, scaled: dict[str, Path], checkpoint: Callable[[str], Path], worker_pool: WorkerPool
):
    sequences = tokens(250, 40, 129, 2)  # of 64 positions at first, and 256 when scaled
    sizes, sp = LAYOUTS[layout], "+sp" in layout
    directories = {family: str(path) for family, path in scaled.items()}
    [*_, last] = worker_pool.run(families_under_layout, directories, sequences, sp, sizes, world_size=len(sizes) + 1)
    for family, directory in scaled.items():
        expected = hf_logprobs(directory, sequences, temperature=0.7)
        padded, packed, _ = last[family]
        assert worst_difference(packed, expected) <= TOLERANCE, family
        assert padded is None or worst_difference(padded, expected) <= TOLERANCE, family
        plain = hf_logprobs(checkpoint(family), sequences, temperature=0.7)
        assert worst_difference(plain, expected) > 100 * TOLERANCE, family


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_sampler_scales_positions_as_the_trainer_does(family: str, scaled: dict[str, Path]):
    """Prompts end beyond the original length, and so does every sampled token."""
    engine = VLLMEngine(max_model_len=256, max_num_seqs=4, kv_cache_memory_gb=0.1, device="cpu", dtype="float32")
    prompts = tokens(100, 180)
    engine.start(scaled[family])
    try:
        groups = engine.generate(
            [GenerationRequest(prompt, seed, 1) for seed, prompt in enumerate(prompts)],
            SamplingParams(max_tokens=60, ignore_eos=True),
        )
    finally:
        engine.close()
    for prompt, [response] in zip(prompts, groups, strict=True):
        [expected] = hf_logprobs(scaled[family], [[*prompt, *response.token_ids]])
        ours = torch.tensor(response.logprobs)
        assert (ours - expected[0, -len(ours) :]).abs().max() <= SAMPLER


@pytest.mark.slow
@pytest.mark.deadline(600)
@pytest.mark.parametrize("cp", [2, 4])
def test_long_packed_sequences_under_context_parallelism(
    cp: int, checkpoint: Callable[[str], Path], worker_pool: WorkerPool
):
    """16k tokens and shorter ones, shared out over ranks, have the log-probs that one process gives them."""
    sequences = tokens(16_384, 3_000, 77)
    directories = {"qwen3": str(checkpoint("qwen3"))}
    [[_, alone, _]] = [
        result["qwen3"]
        for result in worker_pool.run(
            families_under_layout, directories, sequences[:], False, {}, world_size=1, timeout=250
        )
    ]
    [*_, last] = worker_pool.run(
        families_under_layout, directories, sequences, False, {"cp": cp}, world_size=cp, timeout=250
    )
    assert worst_difference(last["qwen3"][1], alone) <= TOLERANCE


def test_sequences_beyond_the_scaled_positions_are_refused():
    assert scaled_positions(YARN) == 256
    assert scaled_positions({"rope_type": "default"}) is None
    sampled: Any = SimpleNamespace(engine=SimpleNamespace(max_model_len=300), model_path="some/model")
    with pytest.raises(ValueError, match=r"max_model_len=300: yarn of some/model .* 64 x factor 4.0 = 256 .* to 5"):
        check_positions(sampled, None, YARN)
    trained: Any = SimpleNamespace(engine=None, model_path="some/model")
    with pytest.raises(ValueError, match=r"data.max_length=257: "):
        check_positions(trained, SimpleNamespace(max_length=257), YARN)
    check_positions(trained, SimpleNamespace(max_length=256), YARN)
    check_positions(trained, object(), YARN)
    check_positions(sampled, None, {"rope_type": "default", "rope_theta": 1e4})
