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
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_BRIDGES = "megatron.bridge.models"
_REGISTER_OTHERS = tuple(f"{_BRIDGES}.{name}" for name in ("glm", "exaone", "exaone.exaone4"))
"""Packages whose `__init__` registers other models than the one that is asked for."""


def import_auto_bridge(bridges: Iterable[str]) -> Any:
    """Return Megatron-Bridge's `AutoBridge` class, with the converters that the modules `bridges` register.

    A `megatron.bridge` that was imported whole before is used as it is. Takes seconds: call it late.
    """
    auto_bridge = _import_conversion()
    with _root_logger_kept():
        for module in bridges:
            if module.startswith(_BRIDGES):
                _add_bare_package(module.rpartition(".")[0])
            importlib.import_module(module)
    return auto_bridge


@functools.cache
def _import_conversion() -> Any:
    with _root_logger_kept():
        # Megatron-core must look for Transformer Engine before the stand-in below exists, or it would find that.
        importlib.import_module("megatron.core.transformer.moe.moe_utils")
        importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
        if not any((Path(location) / "bridge").is_dir() for location in importlib.import_module("megatron").__path__):
            raise RuntimeError(
                "Megatron-Bridge, which converts Hugging Face models, is not installed: pip install --no-deps"
                " megatron-bridge==0.6.2 (docs/install.md says why without its dependencies)"
            )
        for package in ("megatron.bridge", _BRIDGES, *_REGISTER_OTHERS):
            _add_bare_package(package)
        with _transformer_engine_names():
            importlib.import_module("megatron.bridge.peft.lora_layers")
        return importlib.import_module(f"{_BRIDGES}.conversion.auto_bridge").AutoBridge


def model_bridge(auto_bridge: Any) -> Any:
    """Return a new converter for the model of an `AutoBridge`, as the bridge makes one for itself."""
    import transformers
    from megatron.bridge.models.conversion.model_bridge import get_model_bridge
    from megatron.bridge.models.conversion.utils import get_causal_lm_class_name_via_auto_map

    config = auto_bridge.hf_pretrained.config
    remote = get_causal_lm_class_name_via_auto_map(config=config)
    name = config.architectures[0]
    kind = remote if remote is not None else getattr(transformers, name, name)  # bridges of other packages go by names
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
    """Return Megatron-Bridge's `LoRA` class, which wraps a linear layer into one with an adapter."""
    _import_conversion()
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
