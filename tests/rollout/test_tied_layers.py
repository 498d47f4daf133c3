"""An output layer that is tied to the embedding has the new weights after a push, also where vLLM packs it."""

from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import nn

from lightning_megatron_rl.rollout import SamplingParams
from lightning_megatron_rl.weights.loader import tied_layers
from lightning_megatron_rl.weights.source import source_of
from tests.models.conftest import reference
from tests.rollout.conftest import make_engine, make_requests, max_logprob_error
from tests.tiny_models import save_tiny_model

EXACT = 1e-5  # fp32: sums in another order


FAMILIES = ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "nemotron"))]


@pytest.mark.deadline(600)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tied_output_layer_gets_the_new_weights(family: str, tmp_path: Path):
    """Llama-3.2-1B is such a model: without a step of its own vLLM samples with the old output layer."""
    models = [save_tiny_model(tmp_path / str(seed), family, seed=seed, tie_word_embeddings=True) for seed in (0, 1)]
    requests, params = make_requests(3, 2, 20), SamplingParams(max_tokens=16, ignore_eos=True)
    engine = make_engine(start_timeout_s=500)
    engine.start(models[0])
    try:
        for version, model in enumerate(models):
            weights = load_file(model / "model.safetensors")
            assert "lm_head.weight" not in weights
            engine.update_weights(source_of(list(weights.items())), version)
            assert max_logprob_error(reference(model), requests, engine.generate(requests, params)) <= EXACT
    finally:
        engine.close()


def test_layers_that_share_a_weight_are_found():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Embedding(2, 2), "c": nn.Linear(2, 2), "d": nn.Dropout()})
    model["c"].weight = model["b"].weight
    assert tied_layers(model) == [model["b"], model["c"]]
