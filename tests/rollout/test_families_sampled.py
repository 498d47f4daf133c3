"""What vLLM samples of each family: log-probs are the reference's, before and after weights are pushed."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from lightning_megatron_rl.rollout import SamplingParams
from lightning_megatron_rl.weights.source import source_of
from tests.models.conftest import reference
from tests.rollout.conftest import make_engine, make_requests, max_logprob_error
from tests.tiny_models import save_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.deadline(600)]

EXACT = 1e-5  # fp32: sums in another order; the trainer is as near to the reference (tests/models/test_families.py)
# Not MiniMax-M2 and HunYuan V3, which are refused: of routers without groups, vLLM's experts on CPUs know softmax only.
FAMILIES = ["glm4_moe", "olmoe", "nemotron", "gemma", "gemma2", "exaone4"]


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_before_and_after_an_update(family: str, tmp_path: Path):
    first, second = (save_tiny_model(tmp_path / str(seed), family, seed=seed) for seed in (0, 1))
    requests = make_requests(3, 2, 20)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    engine = make_engine(start_timeout_s=500)
    engine.start(first)
    try:
        results = engine.generate(requests, params)
        assert max_logprob_error(reference(first), requests, results) <= EXACT
        assert max_logprob_error(reference(second), requests, results) > 0.1
        weights = load_file(second / "model.safetensors")
        engine.update_weights(source_of(list(weights.items())), 1)
        results = engine.generate(requests, params)
        assert max_logprob_error(reference(second), requests, results) <= EXACT
    finally:
        engine.close()


def test_a_model_in_mistrals_own_format_beside_it_is_not_sampled(tmp_path: Path):
    """Mistral's releases have both: vLLM by itself takes params.json and the tokenizer beside it."""
    model = save_tiny_model(tmp_path, "mistral")
    weights = load_file(model / "model.safetensors")
    (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
    files = dict.fromkeys(weights, "model-00001-of-00001.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    save_file({"norm.weight": weights["model.norm.weight"] * 2}, model / "consolidated.safetensors")
    sizes = {"dim": 64, "n_layers": 4, "head_dim": 32, "hidden_dim": 128, "n_heads": 4, "n_kv_heads": 2}
    (model / "params.json").write_text(json.dumps({**sizes, "norm_eps": 0.5, "vocab_size": 128, "rope_theta": 500.0}))
    (model / "tokenizer.model.v3").write_text("not for Transformers")
    requests = make_requests(2, 1, 20)
    engine = make_engine(start_timeout_s=500)
    engine.start(model)
    try:
        results = engine.generate(requests, SamplingParams(max_tokens=16, ignore_eos=True))
        assert max_logprob_error(reference(model), requests, results) <= EXACT
        engine.update_weights(source_of(list(weights.items())), 1)
        results = engine.generate(requests, SamplingParams(max_tokens=16, ignore_eos=True))
        assert max_logprob_error(reference(model), requests, results) <= EXACT
    finally:
        engine.close()
