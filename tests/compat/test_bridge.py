"""Megatron-Bridge's AutoBridge comes with our families and without the rest of Megatron-Bridge."""

import importlib.util
import logging
import sys

import pytest

from lightning_megatron_rl.compat.bridge import import_auto_bridge
from lightning_megatron_rl.models.families.registry import FAMILIES, bridges
from tests.distributed import WorkerPool


def import_and_look_around() -> tuple[list[str], list[str], bool, bool]:
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)  # as in a user's script: without one, Megatron's modules add theirs
    auto_bridge = import_auto_bridge(bridges())
    assert root.handlers == []
    assert root.level == logging.WARNING
    assert import_auto_bridge(bridges()) is auto_bridge
    unwanted = ("megatron.bridge.diffusion", "megatron.bridge.models.qwen_vl", "megatron.bridge.recipes")
    loaded = [name for name in sys.modules if name.startswith(unwanted)]
    from megatron.core.models.gpt import gpt_layer_specs

    return (
        auto_bridge.list_supported_models(),
        loaded,
        gpt_layer_specs.HAVE_TE,
        importlib.util.find_spec("transformer_engine") is not None,
    )


@pytest.mark.slow
def test_only_what_is_needed_is_imported(fresh_worker: WorkerPool):
    [(supported, unwanted, megatron_has_te, te_is_importable)] = fresh_worker.run(import_and_look_around, world_size=1)
    assert sorted(supported) == sorted(family.architecture for family in FAMILIES.values())
    assert unwanted == []
    # the stand-in for Transformer Engine's names must be gone, and must not have been taken for the real one
    assert megatron_has_te == te_is_importable == (importlib.util.find_spec("transformer_engine") is not None)
