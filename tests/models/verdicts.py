"""What becomes of a config.json: functions that the tests of this folder run on a warm worker, without a child."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

from lightning_megatron_rl.models.verification import verify as verification
from lightning_megatron_rl.models.verification.probe import FREQUENCY_TOLERANCE, Comparison, _compare, compare
from lightning_megatron_rl.models.verification.probe_process import ProbeError
from scripts import model_proofs
from tests.models.workers import start_megatron

Verdict = tuple[str, Any]
"""("refused", the message), or ("accepted", how far the whole model is from Transformers, with other weights)."""


def tiny(family: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a tiny model with other settings; one with a dot is an entry of a dictionary."""
    raw = json.loads(json.dumps(model_proofs.config_files()[f"tiny {family}"]))
    for name, value in changes.items():
        *outer, last = name.split(".")
        place = raw
        for key in outer:
            place = place.setdefault(key, {})
        place[last] = value
    return raw


def verdicts(raws: list[dict[str, Any]], verify: str = "auto") -> list[Verdict]:
    """Judge each config.json; whatever is raised but `ValueError` is raised here."""
    start_megatron()
    with TemporaryDirectory() as cache, _probe_in_this_process():
        os.environ["XDG_CACHE_HOME"] = cache
        return [_verdict(raw, verify) for raw in raws]


def _verdict(raw: dict[str, Any], verify: str) -> Verdict:
    from lightning_megatron_rl.models.hf.model import HFModel

    class WithoutWeights(HFModel):
        """Only its config is judged."""

        def _check_weights(self) -> None:
            pass

    with TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(raw))
        save_file({"none.of.them": torch.zeros(1)}, Path(directory) / "model.safetensors")
        try:
            WithoutWeights(directory, verify=verify).check_computation()
        except ValueError as error:
            return "refused", str(error)
    # the whole model, not a miniature; two experts may have equal scores with some weights, not with others too
    return "accepted", min(_compare(raw, None, seed).difference for seed in (7, 8))


@contextmanager
def _probe_in_this_process() -> Iterator[None]:
    """Save each config the fifteen seconds of a child."""

    def run(small: dict[str, Any], overrides: dict[str, Any], while_waiting: Any) -> Comparison:
        try:
            return compare(small, overrides)
        except Exception as error:
            raise ProbeError(f"{type(error).__name__}: {error}") from error

    usual, verification.run_probe = verification.run_probe, run
    try:
        yield
    finally:
        verification.run_probe = usual


def proof_differences(names: list[str]) -> list[Comparison]:
    """How far Megatron is from Transformers on the miniatures that the shipped proofs stand for."""
    start_megatron()
    files = model_proofs.config_files()
    return [model_proofs.difference(files[name]) for name in names]


def proof_signatures(names: list[str]) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Signatures of models and of their miniatures, by name."""
    from transformers import AutoConfig

    from lightning_megatron_rl.models.verification.miniature import shrink

    start_megatron()
    found = {}
    for name, raw in model_proofs.config_files().items():
        if name in names:
            with TemporaryDirectory() as directory:
                (Path(directory) / "config.json").write_text(json.dumps(raw))
                small = shrink(raw, AutoConfig.from_pretrained(directory))
            found[name] = model_proofs.signature_of(raw), model_proofs.signature_of(small)
    return found


def unseen(name: str, overrides: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of some changes on Megatron's side alone that the probe does not see."""
    start_megatron()
    from transformers import AutoConfig

    from lightning_megatron_rl.models.verification.miniature import shrink

    raw = model_proofs.config_files()[name]
    with TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(raw))
        small = shrink(raw, AutoConfig.from_pretrained(directory))
    return [change for change in overrides if not _shows(small, change)]


def _shows(small: dict[str, Any], override: dict[str, Any]) -> bool:
    """Whether a change is far over the tolerance: a smaller one of the same kind must be seen, too."""
    found = _compare(small, override, 0)
    return found.difference > 1e-2 or found.frequencies > 100 * FREQUENCY_TOLERANCE
