"""What a signature has, and that the shipped proofs are those of the present code."""

from typing import Any

import pytest

from lightning_megatron_rl.models.verification import signature
from lightning_megatron_rl.models.verification.signature import PROOFS, departures, is_computed, proofs
from scripts import model_proofs
from tests.distributed import WorkerPool
from tests.models.verdicts import proof_differences, proof_signatures
from tests.selection import by_default

NAMES = list(model_proofs.config_files())
WAIT = 390.0  # seconds


def test_the_shipped_file_is_that_of_the_present_code(worker_pool: WorkerPool):
    [found] = worker_pool.run(proof_signatures, NAMES, world_size=1, timeout=WAIT)
    assert {name: whole for name, (whole, _) in found.items()} == {name: small for name, (_, small) in found.items()}
    text = model_proofs.content({name: whole for name, (whole, _) in found.items()})
    assert PROOFS.read_text() == text, "run scripts/model_proofs.py"


@pytest.mark.parametrize("part", by_default([0], range(4)))
def test_megatron_agrees_with_transformers_on_what_is_proved(part: int, worker_pool: WorkerPool):
    names = NAMES[part::4]
    [found] = worker_pool.run(proof_differences, names, world_size=1, timeout=WAIT)
    assert {name: each for name, each in zip(names, found, strict=True) if not each.agrees} == {}


def test_departures_name_the_settings_that_differ_from_the_nearest_proof():
    proof = proofs()["tiny qwen3"]
    assert departures(proof) == []
    changed: dict[str, Any] = {**proof, "rms_norm_eps": 2e-6, "new_key": [1, 2]}
    del changed["hidden_act"]
    assert departures(changed) == [
        "rms_norm_eps=2e-06 (proved: 1e-06)",
        "new_key=[1, 2] (proved: not set)",
        'hidden_act=not set (proved: "silu")',
    ]
    assert departures({"model_type": "unknown"}) is None


@pytest.mark.parametrize("library", signature.LIBRARIES)
def test_proofs_are_those_of_the_installed_versions(library: str, monkeypatch: pytest.MonkeyPatch):
    versions = signature.installed_versions(signature.LIBRARIES) | {library: "0.0.1"}
    monkeypatch.setattr(signature, "installed_versions", lambda names: versions)
    assert proofs() == {}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("layernorm_epsilon", True),
        ("activation_func", True),
        ("moe_router_topk_scaling_factor", True),
        ("a_field_of_a_later_version", True),
        ("recompute_granularity", False),
        ("tensor_model_parallel_size", False),
        ("moe_router_dtype", False),
        ("attention_dropout", False),
        ("fp8", False),
    ],
)
def test_fields_that_are_computed(name: str, expected: bool):
    assert is_computed(name) is expected
