"""Megatron-Bridge's `AutoBridge` without importing all of Megatron-Bridge.

`import megatron.bridge` imports about sixty model families and diffusion pipelines, with their dependencies. The
modules that convert weights need none of them, so the packages above them are put in place without their `__init__`.
"""

import contextlib
import functools
import importlib.machinery
import importlib.util
import logging
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BRIDGES = "megatron.bridge.models"
# Architecture in config.json -> module that registers its bridge; add a line to support another.
FAMILIES = {
    "LlamaForCausalLM": f"{_BRIDGES}.llama.llama_bridge",
    "MistralForCausalLM": f"{_BRIDGES}.mistral.mistral_bridge",
    "Qwen2ForCausalLM": f"{_BRIDGES}.qwen.qwen2_bridge",
    "Qwen3ForCausalLM": f"{_BRIDGES}.qwen.qwen3_bridge",
    "Qwen3MoeForCausalLM": f"{_BRIDGES}.qwen.qwen3_moe_bridge",
    "MixtralForCausalLM": "lightning_megatron_rl.models.families.mixtral_bridge",
    "DeepseekV3ForCausalLM": f"{_BRIDGES}.deepseek.deepseek_v3_bridge",
    "Gemma3ForCausalLM": f"{_BRIDGES}.gemma.gemma3_bridge",
    "GptOssForCausalLM": f"{_BRIDGES}.gpt_oss.gpt_oss_bridge",
}
_ORIENTED = "lightning_megatron_rl.models.families.gpt_oss_bridge"  # takes the place of Bridge's own


@functools.cache
def import_auto_bridge() -> Any:
    """Return Megatron-Bridge's `AutoBridge` class with the bridges of `FAMILIES` registered.

    A `megatron.bridge` that somebody imported whole before is used as it is. Takes seconds: call it late.

    Example:
        ``import_auto_bridge().from_hf_pretrained("path/to/qwen3")``
    """
    with _root_logger_kept():
        # Megatron-core must look for Transformer Engine before the stand-in below exists, or it would find that.
        importlib.import_module("megatron.core.transformer.moe.moe_utils")
        importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
        if not any((Path(location) / "bridge").is_dir() for location in importlib.import_module("megatron").__path__):
            raise RuntimeError(
                "Megatron-Bridge, which converts Hugging Face models, is not installed: pip install --no-deps"
                " megatron-bridge==0.6.2 (docs/install.md says why without its dependencies)"
            )
        packages = {module.rpartition(".")[0] for module in FAMILIES.values() if module.startswith(_BRIDGES)}
        for package in ("megatron.bridge", _BRIDGES, *sorted(packages)):
            _add_bare_package(package)
        with _transformer_engine_names():
            importlib.import_module("megatron.bridge.peft.lora_layers")
        auto_bridge = importlib.import_module(f"{_BRIDGES}.conversion.auto_bridge")
        for module in (*FAMILIES.values(), _ORIENTED):
            importlib.import_module(module)
        return auto_bridge.AutoBridge


def model_bridge(auto_bridge: Any) -> Any:
    """Return a new converter for the model of an `AutoBridge`, as the bridge makes one for itself."""
    import transformers
    from megatron.bridge.models.conversion.model_bridge import get_model_bridge
    from megatron.bridge.models.conversion.utils import get_causal_lm_class_name_via_auto_map

    config = auto_bridge.hf_pretrained.config
    remote = get_causal_lm_class_name_via_auto_map(config=config)
    kind = remote if remote is not None else getattr(transformers, config.architectures[0])
    converter = get_model_bridge(kind, hf_config=config)
    converter.export_weight_dtype = auto_bridge.export_weight_dtype
    return converter


def set_weights(auto_bridge: Any, source: Any) -> None:
    """Let an `AutoBridge` read the weights of a `StateSource`, in place of the files that it would open."""
    from megatron.bridge.models.hf_pretrained.state import StateDict

    auto_bridge.hf_pretrained._state_dict_accessor = StateDict(source)


@contextlib.contextmanager
def _root_logger_kept() -> Iterator[None]:
    """Leave the root logger, which is the user's, as it is: `megatron.training` shows every library's INFO by it."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        root.setLevel(level)
        for handler in [handler for handler in root.handlers if handler not in handlers]:
            root.removeHandler(handler)


@functools.cache
def import_lora() -> Any:
    """Return Megatron-Bridge's `LoRA` class, which wraps a linear layer into one with an adapter.

    Example:
        ``import_lora()(target_modules=["linear_qkv"], dim=8, alpha=16)``
    """
    import_auto_bridge()
    utils = importlib.import_module("megatron.bridge.peft.utils")
    if importlib.util.find_spec("transformer_engine") is None:
        # without it Megatron-core's classes on top of it are None, which Bridge takes for types
        utils.HAVE_TE = False  # type: ignore[attr-defined]
    return importlib.import_module("megatron.bridge.peft.lora").LoRA


def _add_bare_package(name: str) -> None:
    """Register package `name` without running its `__init__`, unless it was imported before."""
    if name in sys.modules:
        return
    parent, _, child = name.rpartition(".")
    locations = [
        str(Path(location) / child)
        for location in importlib.import_module(parent).__path__
        if (Path(location) / child).is_dir()
    ]
    spec = importlib.machinery.ModuleSpec(name, loader=None, is_package=True)
    spec.submodule_search_locations = locations
    sys.modules[name] = importlib.util.module_from_spec(spec)


@contextlib.contextmanager
def _transformer_engine_names() -> Iterator[None]:
    """The names that Bridge's LoRA layers take from Transformer Engine while they are imported, if it is absent.

    They serve as types in `isinstance` only. They are removed again, because everybody else takes an importable
    `transformer_engine` for an installed one.
    """
    if importlib.util.find_spec("transformer_engine") is not None:
        yield
        return
    package = types.ModuleType("transformer_engine")
    module = types.ModuleType("transformer_engine.pytorch")
    module.__dict__.update(
        Linear=type("Linear", (), {}),
        LayerNormLinear=type("LayerNormLinear", (), {}),
        ops=types.SimpleNamespace(Sequential=type("Sequential", (), {})),
    )
    package.__dict__.update(pytorch=module, __path__=[])
    stand_ins = {"transformer_engine": package, "transformer_engine.pytorch": module}
    sys.modules.update(stand_ins)
    disabled = logging.root.manager.disable
    logging.disable(logging.INFO)  # Bridge reports every name that it tries and does not find
    try:
        yield
    finally:
        logging.disable(disabled)
        for name in stand_ins:
            del sys.modules[name]
