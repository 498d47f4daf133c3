"""Early checks of the command line's YAML files, with file, line and column in errors."""

import difflib
import inspect
import pydoc
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lightning_megatron_rl.utilities.text_files import read_lines

# an installed package has configs/ inside, a checkout beside it
CONFIG_ROOTS = (Path(__file__).parents[1], Path(__file__).parents[2])
_INPUTS = {"model", "tokenizer", "init_from"}  # settings that may name what an earlier run has written
_MAKERS = {  # of what no config writes
    "runs/demo/model": "python examples/demo/build_model.py runs/demo/model",
    "runs/calculator/model": (
        'python examples/demo/build_model.py runs/calculator/model --characters "0123456789+-*=[];"'
    ),
}
_FREE = {"model_config", "vllm_args", "chat_template_kwargs", "env", "resources"}  # whose names are not ours
_SUFFIXES = (".yaml", ".yml")
_PLAIN_TAG = "tag:yaml.org,2002:"
_KINDS = {yaml.SequenceNode: "a list", yaml.ScalarNode: "a single value"}


def shipped_configs(arguments: Sequence[str]) -> list[str]:
    """Return arguments in which a `--config configs/...` that is not there is the file that came with the package.

    Example:
        ``shipped_configs(["fit", "--config", "configs/lora.yaml"])`` in an empty directory
    """
    found = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        option, equals, path = argument.rpartition("=") if argument.startswith("--config=") else ("", "", argument)
        is_config = bool(equals) or before in ("--config", "-c")
        if is_config and path.startswith("configs/") and not Path(path).exists():
            path = next((str(root / path) for root in CONFIG_ROOTS if (root / path).is_file()), path)
        found.append(f"{option}{equals}{path}")
    return found


def check_configs(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Check every YAML file that a command line or its environment variables name.

    Args:
        arguments: Of the command, such as ``["fit", "--config", "grpo.yaml"]``.
        environment: Variables such as ``PL_FIT__CONFIG``.

    Raises:
        ValueError: As `check_config`.
    """
    for path in _named_files(arguments, environment):
        check_config(path)


def check_functions(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Refuse settings for a reward that is a function: the parser would drop them.

    Args:
        arguments: Of the command; its configs have been checked.
        environment: As for `check_configs`.

    Raises:
        ValueError: With the file, the function and its settings.
    """
    for path in _named_files(arguments, environment):
        text = "".join(line for _, line in read_lines(path))
        for name, given in _reward_settings(yaml.safe_load(text), ""):
            try:
                target = pydoc.locate(name)
            except pydoc.ErrorDuringImport:  # the parser tells
                continue
            if inspect.isfunction(target):
                raise ValueError(
                    f"{path}: the reward {name} is a function, which has no settings: init_args {given} would be"
                    " ignored. Write a class with __init__ and __call__, or leave init_args out"
                )


def _reward_settings(settings: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Class paths and settings of rewards, wherever they stand."""
    if isinstance(settings, list):
        for value in settings:
            yield from _reward_settings(value, key)
    if not isinstance(settings, dict):
        return
    name, given = settings.get("class_path"), settings.get("init_args")
    if key.rstrip("+") in ("rewards", "reward") and isinstance(name, str) and given:
        yield name, given
    for inner, value in settings.items():
        yield from _reward_settings(value, str(inner))


def replaced_settings(arguments: Sequence[str]) -> list[str]:
    """Return a sentence for each group of free settings that a later config replaces, and of which it has not all.

    Settings that we name are merged. Those that a library names, such as `model_config`, are one value.

    Args:
        arguments: Of the command; its configs have been checked.
    """
    found: dict[str, tuple[str, set[str]]] = {}  # file and keys by dotted name
    told = []
    for path in _named_files(arguments, {}):
        text = "".join(line for _, line in read_lines(path))
        for name, keys in _free_settings(yaml.safe_load(text), ""):
            before, had = found.get(name, (path, keys))
            if lost := sorted(had - keys):
                told.append(
                    f"{name} of {path} replaces that of {before}, and {', '.join(lost)} with it. Repeat what stays,"
                    f" or give what is new on the command line: --{name}.NAME VALUE adds to it"
                )
            found[name] = path, keys
    return told


def _free_settings(settings: Any, before: str) -> Iterator[tuple[str, set[str]]]:
    for key, value in settings.items() if isinstance(settings, dict) else ():
        name = before if key == "init_args" else f"{before}.{key}".lstrip(".")
        if key in _FREE and isinstance(value, dict):
            yield name, {str(one) for one in value}
        else:
            yield from _free_settings(value, name)


def _named_files(arguments: Sequence[str], environment: Mapping[str, str]) -> Iterator[str]:
    """Files that exist; the parser reports other errors than configs that are not there."""
    follows_config = False
    for argument in arguments:
        name, equals, value = argument.partition("=")
        is_config = (equals and name in ("--config", "-c")) or follows_config
        value = value if equals and name.startswith("-") else argument
        follows_config = argument in ("--config", "-c")
        if is_config:
            _check_there("--config", value)
        if (is_config or value.endswith(_SUFFIXES)) and Path(value).expanduser().exists():
            yield value
    for name, value in environment.items():
        if name.startswith("PL_") and name.endswith("__CONFIG"):
            _check_there(name, value)
            if Path(value).expanduser().exists():
                yield value


def _check_there(option: str, value: str) -> None:
    """Refuse a file of settings that is not there; settings themselves are no file."""
    path = Path(value).expanduser()
    if not value.endswith(_SUFFIXES) or path.exists():
        return
    beside = [str(path.with_name(found.name)) for suffix in _SUFFIXES for found in path.parent.glob(f"*{suffix}")]
    shipped = [str(found.relative_to(root)) for root in CONFIG_ROOTS for found in root.glob("configs/**/*.yaml")]
    near = difflib.get_close_matches(value, [*beside, *shipped], n=1)
    hint = f"; did you mean {near[0]}?" if near else "" if path.is_absolute() else f" in {Path.cwd()}"
    raise ValueError(f"{option} {value}: there is no such file{hint}")


def check_config(path: str | Path) -> None:
    """Refuse a YAML file that does not hold settings, each given once and with a value.

    Raises:
        ValueError: With the file and, where there is one, line, column and what is wrong there.
    """
    text = "".join(line for _, line in read_lines(path))
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            raise ValueError(f"{path} is empty: it has no settings. Leave it out, or write some")
        if not isinstance(root, yaml.MappingNode):
            raise ValueError(
                f"{_at(path, root.start_mark)}: the file holds {_KINDS[type(root)]}, not settings (`name: value`)"
            )
        _check_node(path, root, ())
        try:
            loader.construct_document(root)
        except ValueError as error:  # a date that there is not
            raise ValueError(f"{path}: {error}") from error
    except yaml.MarkedYAMLError as error:
        said = " ".join(part for part in (error.context, error.problem) if part)
        raise ValueError(f"{_at(path, error.problem_mark or error.context_mark)}: {said}") from error
    except yaml.YAMLError as error:  # a character that YAML does not have
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deep to be read") from error


def _check_node(path: str | Path, node: Any, owners: tuple[Any, ...]) -> None:
    if any(node is owner for owner in owners):
        raise ValueError(f"{_at(path, node.start_mark)}: an anchor that refers to itself")
    if not node.tag.startswith(_PLAIN_TAG) or node.tag.startswith(f"{_PLAIN_TAG}python"):
        raise ValueError(f"{_at(path, node.start_mark)}: the tag {node.tag} is not part of plain YAML")
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_node(path, item, (*owners, node))
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, Any] = {}
    for key, value in node.value:
        name = key.value if isinstance(key, yaml.ScalarNode) else ""
        if name and name != "<<" and name in seen:
            raise ValueError(
                f"{_at(path, key.start_mark)}: {name} is given twice, first in line {seen[name].line + 1}: the second"
                " would replace the first"
            )
        seen[name] = key.start_mark
        if isinstance(value, yaml.ScalarNode) and not value.style and value.value == "":
            raise ValueError(
                f"{_at(path, key.start_mark)}: {name} has no value: indent its settings below it, write `{name}: null`"
                " if it is to have none, or leave it out"
            )
        is_section = name in ("init_args", "class_path") or (name == "trainer" and not owners)
        if is_section and value.tag == f"{_PLAIN_TAG}null":
            raise ValueError(f"{_at(path, key.start_mark)}: {name} is null: write what belongs there, or leave it out")
        _check_node(path, value, (*owners, node))


def _at(path: str | Path, mark: Any) -> str:
    return f"{path}, line {mark.line + 1}, column {mark.column + 1}"


def check_stages(settings: Any, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Refuse a run whose model, tokenizer or checkpoint is what another config of its folder writes, or an example.

    Args:
        settings: Parsed: dictionaries, lists and values.
        arguments: Of the command.
        environment: As for `check_configs`.

    Raises:
        ValueError: With the path that is not there, and the command that makes it.
    """
    missing = [path for path in _inputs(settings) if "/" in path and not Path(path).expanduser().exists()]
    if not missing:
        return
    for path in missing:
        if maker := _MAKERS.get(str(Path(path))):
            raise ValueError(f"{path} is not there. Make it first, in a clone of the repository: {maker}")
    own = {Path(name).expanduser() for name in _named_files(arguments, environment)}
    for folder in sorted({path.parent for path in own}):
        for config in sorted(folder.glob("*.y*ml")):
            for directory in [] if config in own else _outputs(config):
                for path in missing:
                    if Path(directory) in Path(path).parents:
                        failed = Path(path).with_name(f"{Path(path).name}.failed")
                        why = f"that stage's export failed: {failed}" if failed.exists() else "that stage has not run"
                        raise ValueError(
                            f"{path} is not there. {config} writes it, and {why}. Run it first:"
                            f" lightning-megatron-rl fit --config {config}"
                        )


def _inputs(settings: Any, key: str = "") -> Iterator[str]:
    """What a run reads, wherever it stands in its settings."""
    if isinstance(settings, Mapping):
        for name, value in settings.items():
            yield from _inputs(value, str(name).rpartition(".")[2])
    elif isinstance(settings, list):
        for value in settings:
            yield from _inputs(value, key)
    elif isinstance(settings, str) and key in _INPUTS:
        yield settings


def _outputs(config: Path) -> Iterator[str]:
    """Directories that the callbacks of a config write into; none if it cannot be read."""
    try:
        callbacks = yaml.safe_load(config.read_text())["trainer"]["callbacks"]
        for callback in callbacks:
            yield callback["init_args"]["dirpath"]
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        return
