"""Every family under every layout: log-probs are those of Transformers, and the export is what was loaded."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lightning_megatron_rl.models.families.family import Family
from lightning_megatron_rl.models.families.registry import FAMILIES
from scripts import model_table
from tests.distributed import WorkerPool
from tests.models.conftest import TOLERANCE, hf_logprobs, worst_difference
from tests.models.workers import families_under_layout
from tests.selection import by_default
from tests.tiny_models import tiny_config

# model_type -> tiny models of the family
VARIANTS = {
    "llama": ("llama",),
    "mistral": ("mistral", "mistral_window"),
    "qwen2": ("qwen2", "qwen2_tied"),
    "qwen3": ("qwen3",),
    "qwen3_moe": ("qwen3_moe",),
    "mixtral": ("mixtral",),
    "deepseek_v3": ("deepseek_v3", "deepseek_v3_plain"),
    "gemma3_text": ("gemma3",),
    "gpt_oss": ("gpt_oss",),
    "glm4_moe": ("glm4_moe",),
    "olmoe": ("olmoe",),
    "minimax_m2": ("minimax_m2",),
    "nemotron": ("nemotron",),
    "gemma": ("gemma",),
    "gemma2": ("gemma2",),
    "exaone4": ("exaone4",),
    "hy_v3": ("hy_v3",),
}
# layout -> sizes and sequence parallelism; the world is the smallest that holds the layout
LAYOUTS = {
    "tp1": ({}, False),
    "tp2": ({"tp": 2}, False),
    "tp2+sp": ({"tp": 2}, True),
    "pp2": ({"pp": 2}, False),
    "tp2xpp2+sp": ({"tp": 2, "pp": 2}, True),
    "cp2": ({"cp": 2}, False),
    "tp2xcp2+sp": ({"tp": 2, "cp": 2}, True),
    "ep2": ({"ep": 2}, False),
    "ep4": ({"ep": 4}, False),
    "pp2xep2": ({"pp": 2, "ep": 2}, False),
    "tp2xetp1+sp": ({"tp": 2, "etp": 1}, True),
    "tp2xep2+sp": ({"tp": 2, "ep": 2}, True),
    "tp2xep2xetp1+sp": ({"tp": 2, "ep": 2, "etp": 1}, True),
}


def needed(family: Family, sizes: dict[str, int], sp: bool) -> set[str]:
    """What a model of `family` must be able to do for a layout."""
    features = {name.upper() for name in ("pp", "cp", "ep") if name in sizes} | {"packing"}
    if "tp" in sizes:
        features.add("TP+SP" if sp else "TP")
    if "etp" in sizes and family.experts is None:
        features.add("experts")
    if family.experts is not None and sizes.get("etp", sizes.get("tp", 1)) > 1:
        features.add("ETP")
    return features


def models_of(sizes: dict[str, int], sp: bool) -> list[str]:
    """The tiny models of all families that say that they can be split like this."""
    able = [name for name, family in FAMILIES.items() if needed(family, sizes, sp) <= family.features]
    return [model for model_type in able for model in VARIANTS[model_type]]


def test_the_table_says_what_the_tests_run():
    assert list(VARIANTS) == list(FAMILIES)
    for model_type, family in FAMILIES.items():
        assert {tiny_config(name).model_type for name in VARIANTS[model_type]} == {model_type}
        run = [layout for layout in LAYOUTS.values() if set(VARIANTS[model_type]) <= set(models_of(*layout))]
        assert set().union(*(needed(family, *layout) for layout in run)) == family.features
    document = model_table.DOCUMENT.read_text()
    assert document == model_table.with_table(document), "run scripts/model_table.py"


# all families in all layouts are minutes on two cores
@pytest.mark.parametrize("layout", by_default(["tp2+sp", "ep2"], LAYOUTS))
def test_logprobs_and_export(
    layout: str, checkpoint: Callable[[str], Path], sequences: list[list[int]], worker_pool: WorkerPool
):
    sizes, sp = LAYOUTS[layout]
    families = models_of(sizes, sp)
    tp, pp = sizes.get("tp", 1), sizes.get("pp", 1)
    world_size = pp * max(tp * sizes.get("cp", 1), sizes.get("etp", tp) * sizes.get("ep", 1))
    directories = {family: str(checkpoint(family)) for family in families}
    results = worker_pool.run(families_under_layout, directories, sequences, sp, sizes, world_size=world_size)
    for family in families:
        expected = hf_logprobs(checkpoint(family), sequences, temperature=0.7)
        weights = load_file(checkpoint(family) / "model.safetensors")
        for rank, result in enumerate(results):
            padded, packed, exported = result[family]
            assert different(exported, weights) == [], f"{family}, rank {rank}"
            if rank < world_size // pp * (pp - 1):
                assert padded is packed is None
                continue
            assert worst_difference(packed, expected) <= TOLERANCE, f"{family}, packed"
            assert padded is not None or "cp" in sizes
            assert padded is None or worst_difference(padded, expected) <= TOLERANCE, f"{family}, padded"


@pytest.mark.parametrize("model", [model for models in VARIANTS.values() for model in models])
def test_no_matrix_of_a_tiny_model_is_constant(model: str, checkpoint: Callable[[str], Path]):
    """A router of zeros scores all experts alike, by whatever formula."""
    weights = load_file(checkpoint(model) / "model.safetensors")
    assert [name for name, weight in weights.items() if weight.ndim > 1 and weight.std() == 0] == []


def different(exported: dict[str, Tensor], loaded: dict[str, Tensor]) -> list[str]:
    """Tensors that an export lacks, has too much or does not have bit for bit like the checkpoint."""
    shared = set(exported) & set(loaded)
    changed = {name for name in shared if not torch.equal(exported[name], loaded[name])}
    return sorted(changed | set(exported) ^ set(loaded))
