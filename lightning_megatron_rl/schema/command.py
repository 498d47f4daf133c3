"""The command `schema`: a JSON schema of the YAML files that `fit` takes, for editors that complete and check them."""

import argparse
import dataclasses
import inspect
import json
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_megatron_rl import cli
from lightning_megatron_rl.rollout.protocol import RolloutEngine
from lightning_megatron_rl.utilities.arguments import new_parser
from lightning_megatron_rl.weights.transports.base import Transport

PROGRAM = "lightning-megatron-rl schema"
_DESCRIPTION = """Print a JSON schema of the YAML files that fit, validate, test and predict take."""
_EPILOG = """editors with a YAML language server read it from a comment at the top of a config:
  # yaml-language-server: $schema=lightning-megatron-rl.schema.json

example:
  lightning-megatron-rl schema > lightning-megatron-rl.schema.json"""
Schema = dict[str, Any]
_SIMPLE: dict[Any, Schema] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    # YAML 1.1 takes 1e-4, without a point, for text, and the parser reads it as a number
    float: {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$"}]},
    str: {"type": "string"},
    Path: {"type": "string"},
    type(None): {"type": "null"},
}


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments: there are none."""
    return new_parser(PROGRAM, _DESCRIPTION, _EPILOG)


def main(args: list[str]) -> int:
    """Print the schema.

    Args:
        args: Arguments after `schema`.
    """
    make_parser().parse_args(args)
    print(json.dumps(make_schema(), indent=1))
    return 0


def make_schema() -> Schema:
    """Return the schema of a config: the Trainer's settings, module, data module, and those of this project's classes.

    Classes of others are accepted by their import path, with any settings.
    """
    trainer = _parameters(pl.Trainer)
    trainer["properties"]["strategy"] = _choice((cli.MegatronStrategy,))
    callback = _choice(cli._CALLBACKS)
    trainer["properties"]["callbacks"] = {"anyOf": [{"type": "array", "items": callback}, callback, {"type": "null"}]}
    anything = _choice(())
    for name in ("logger", "plugins", "profiler"):
        one = {"anyOf": [anything, {"type": ["boolean", "null"]}]}
        trainer["properties"][name] = {"anyOf": [one, {"type": "array", "items": anything}]}
    trainer["properties"] = _with_additions(trainer["properties"])
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "lightning-megatron-rl",
        "type": "object",
        "properties": {
            "seed_everything": {"type": ["integer", "boolean"]},
            "trainer": trainer,
            "model": _choice(cli._MODELS),
            "data": _choice(cli._DATA),
            "ckpt_path": {"type": ["string", "null"]},
            "weights_only": {"type": ["boolean", "null"]},
            "verbose": {"type": "boolean"},
            "return_predictions": {"type": ["boolean", "null"]},
        },
        "additionalProperties": False,
    }


def _choice(classes: Iterable[type]) -> Schema:
    """Return the schema of an object: one of `classes`, known by its name or path, or any other class."""
    known = [
        {
            "if": {
                "required": ["class_path"],
                "properties": {"class_path": {"enum": [kind.__name__, f"{kind.__module__}.{kind.__qualname__}"]}},
            },
            "then": {"properties": {"init_args": _parameters(kind)}},
        }
        for kind in classes
    ]
    names = [kind.__name__ for kind in classes]
    path: Schema = {"anyOf": [{"enum": names}, {"type": "string"}]} if names else {"type": "string"}
    settings: Schema = {
        "type": "object",
        "properties": {
            "class_path": path,
            "init_args": {"type": ["object", "null"]},
            "dict_kwargs": {"type": "object"},
        },
        "additionalProperties": False,
    }
    return {"anyOf": [path, settings | ({"allOf": known} if known else {})]}


def _parameters(kind: type) -> Schema:
    """Return the schema of what a class is built with."""
    hints = typing.get_type_hints(kind.__init__, localns=_imported_late())  # type: ignore[misc]
    wanted = [
        parameter.name
        for parameter in inspect.signature(kind).parameters.values()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    takes_more = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(kind).parameters.values())
    return {
        "type": "object",
        "properties": _with_additions({name: of_type(hints.get(name, Any)) for name in wanted}),
        "additionalProperties": takes_more,
    }


def _with_additions(properties: Schema) -> Schema:
    """Return properties, each list also under its name and a plus, which adds to the list of the files before."""
    items = {name: _items(schema) for name, schema in properties.items() if not name.endswith("+")}
    lists = {name: item for name, item in items.items() if item is not None}
    return properties | {f"{name}+": {"anyOf": [properties[name], item]} for name, item in lists.items()}


def _items(schema: Schema) -> Schema | None:
    """Return the schema of an item where a value may be a list; None where it may not."""
    if schema.get("type") == "array":
        return schema.get("items", {})  # type: ignore[no-any-return]
    return next((item for one in schema.get("anyOf", ()) if (item := _items(one)) is not None), None)


def _imported_late() -> dict[str, Any]:
    """Classes that our own import for type checkers alone."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

    return {"OptimizerConfig": OptimizerConfig, "DistributedDataParallelConfig": DistributedDataParallelConfig}


def of_type(hint: Any) -> Schema:
    """Return the schema of a value of a type; {} for whatever has none.

    Example:
        ``of_type(int | None) == {"anyOf": [{"type": "integer"}, {"type": "null"}]}``
    """
    if hint in _SIMPLE:
        return _SIMPLE[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return of_type(arguments[0])
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [of_type(argument) for argument in arguments]}
    if inspect.isclass(origin) and issubclass(origin, dict):
        return {"type": "object", "additionalProperties": of_type(arguments[1])}
    if origin in (list, tuple, set):
        return {"type": "array"} | ({"items": of_type(arguments[0])} if origin is list else {})
    if hint is RolloutEngine:
        return _choice(cli._ENGINES)
    if hint is Transport:
        return {"type": "object", "required": ["class_path"]}
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _dataclass(hint)
    return {}


def _dataclass(hint: type) -> Schema:
    """Return the schema of a dataclass's fields, which YAML has directly, or under class_path and init_args."""
    try:
        ours = hint.__module__.startswith("lightning_megatron_rl.")
        hints = typing.get_type_hints(hint, localns=_imported_late() if ours else None)
    except (NameError, TypeError):  # names that Megatron imports for type checkers alone
        hints = {}
    fields = [field.name for field in dataclasses.fields(hint) if field.init]
    settings = {
        "type": "object",
        "properties": {name: _simple(hints.get(name, Any)) for name in fields},
        "additionalProperties": False,
    }
    return {"anyOf": [settings, _choice(())]}


def _simple(hint: Any) -> Schema:
    """`of_type` for a field, not for what is a dataclass in it: Megatron's refer to each other."""
    return {} if dataclasses.is_dataclass(hint) else of_type(hint)
