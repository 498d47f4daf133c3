"""An output layer that is tied to the embedding has the new weights after a push, also where vLLM packs it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lightning_megatron_rl.rollout import SamplingParams
from lightning_megatron_rl.weights.loader import layers_without_weights, tied_layers
from lightning_megatron_rl.weights.source import source_of
from tests.models.conftest import reference
from tests.rollout.conftest import make_engine, make_requests, max_logprob_error
from tests.tiny_models import save_tiny_model

EXACT = 1e-5  # fp32: sums in another order


FAMILIES = ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "nemotron"))]


@pytest.mark.deadline(600)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tied_output_layer_gets_the_new_weights(family: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """Llama-3.2-1B is such a model: without a step of its own vLLM samples with the old output layer."""
    models = [save_tiny_model(tmp_path / str(seed), family, seed=seed, tie_word_embeddings=True) for seed in (0, 1)]
    requests, params = make_requests(3, 2, 20), SamplingParams(max_tokens=16, ignore_eos=True)
    engine = make_engine(start_timeout_s=500, echo_output=True)
    engine.start(models[0])
    try:
        for version, model in enumerate(models):
            weights = load_file(model / "model.safetensors")
            assert "lm_head.weight" not in weights
            engine.update_weights(source_of(list(weights.items())), version)
            assert max_logprob_error(reference(model), requests, engine.generate(requests, params)) <= EXACT
    finally:
        engine.close()
    said = capfd.readouterr().err
    assert "vllm" in said
    assert "Failed to load weights" not in said  # vLLM's words of each layer that gets none by its own name


def test_layers_that_share_a_weight_are_found():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Embedding(2, 2), "c": nn.Linear(2, 2), "d": nn.Dropout()})
    model["c"].weight = model["b"].weight
    assert tied_layers(model) == [model["b"], model["c"]]


def test_a_warning_is_left_out_of_layers_without_weights_alone():
    model = nn.ModuleDict({"table": nn.Dropout(), "norm": nn.BatchNorm1d(2), "b": nn.Embedding(2, 2)})
    model["table"].register_buffer("angles", torch.ones(2), persistent=False)
    model["out"] = nn.Linear(2, 2, bias=False)
    model["out"].weight = model["b"].weight
    assert layers_without_weights(model) == {"Dropout", "ModuleDict", "Linear"}
    model["more"] = nn.Linear(2, 2)  # one layer of a class that has weights: nothing is said of the class
    assert layers_without_weights(model) == {"Dropout", "ModuleDict"}
