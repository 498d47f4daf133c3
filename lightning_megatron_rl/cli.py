"""The command line: Lightning's own `LightningCLI` with this project's classes known by their short names."""

import argparse
import difflib
import inspect
import logging
import os
import pydoc
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import lightning.pytorch as pl
import shtab
import yaml
from jsonargparse import Namespace, get_loader, set_loader
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException

# jsonargparse finds a class by its short name among those that are imported
from lightning_megatron_rl import rewards
from lightning_megatron_rl.callbacks.hf_export import HFExport
from lightning_megatron_rl.callbacks.memory_snapshot import MemorySnapshot
from lightning_megatron_rl.callbacks.prediction_files import PredictionFiles
from lightning_megatron_rl.callbacks.rollout_samples import RolloutSamples
from lightning_megatron_rl.callbacks.run_progress import RunLog, RunProgress
from lightning_megatron_rl.callbacks.run_report import RunReport
from lightning_megatron_rl.callbacks.timeline import Timeline
from lightning_megatron_rl.callbacks.weight_average import WeightAverage
from lightning_megatron_rl.callbacks.weight_sync import WeightSync
from lightning_megatron_rl.compat.lightning import read_one_as_one
from lightning_megatron_rl.data.base import RowDataModule
from lightning_megatron_rl.data.preference import PreferenceDataModule
from lightning_megatron_rl.data.prompts import PromptDataModule
from lightning_megatron_rl.data.sft import SFTDataModule
from lightning_megatron_rl.devices.checks import check_auto, check_cuda, check_device_count
from lightning_megatron_rl.devices.measure import count_gpus, measure_devices
from lightning_megatron_rl.modules.dpo import DPOModule
from lightning_megatron_rl.modules.grpo import GRPOModule
from lightning_megatron_rl.modules.model import ModelModule
from lightning_megatron_rl.modules.ppo import PPOModule
from lightning_megatron_rl.modules.reward_model import RewardModule
from lightning_megatron_rl.modules.sft import SFTModule
from lightning_megatron_rl.modules.training import TrainingSettings, describe_moved
from lightning_megatron_rl.rollout.replay import ReplayEngine
from lightning_megatron_rl.rollout.servers.engine import VLLMServers
from lightning_megatron_rl.rollout.servers.ray_engines import RayEngines
from lightning_megatron_rl.rollout.vllm.colocated import ColocatedVLLMEngine
from lightning_megatron_rl.rollout.vllm.engine import VLLMEngine
from lightning_megatron_rl.strategy.megatron import MegatronStrategy
from lightning_megatron_rl.strategy.required import require_megatron
from lightning_megatron_rl.utilities.config_files import (
    check_configs,
    check_functions,
    check_stages,
    replaced_settings,
    shipped_configs,
)
from lightning_megatron_rl.utilities.console import outlived_output
from lightning_megatron_rl.utilities.files import numbered
from lightning_megatron_rl.utilities.masking import is_secret_name, mask_secrets, mask_text

__all__ = ["Built", "CommandLine", "Parser", "explain", "run"]

_MODELS = (GRPOModule, PPOModule, SFTModule, DPOModule, RewardModule)  # offered by shell completion
_DATA = (PromptDataModule, SFTDataModule, PreferenceDataModule)
_ENGINES = (VLLMEngine, ColocatedVLLMEngine, VLLMServers, RayEngines, ReplayEngine)
_CALLBACKS = (
    HFExport,
    MemorySnapshot,
    PredictionFiles,
    RolloutSamples,
    RunProgress,
    RunReport,
    Timeline,
    WeightAverage,
    WeightSync,
)
_CLASSES = (*_MODELS, *_DATA, *_ENGINES, *_CALLBACKS, MegatronStrategy)
PROGRAM = "lightning-megatron-rl"
GPU_PRECISION = "bf16-mixed"  # where a config states none; Lightning's default is fp32
_DEBUG = "JSONARGPARSE_DEBUG"  # jsonargparse's own switch: exceptions instead of short messages
_WHERE_RAISED = f"({_DEBUG}=true shows where this was raised)"
_MAX_LISTED = 20  # keys of a class that a message lists if none is similar to the unknown one
_NEAREST = 3  # of those of a class with more
_OTHER_NAMES = {"learning_rate": "lr"}  # that no similarity finds
_OPTIMIZER = ("model", "train", "optimizer")  # where the optimizer's settings are
# how jsonargparse begins an error with others below it, and its lines without information
_NESTED = re.compile(r'Does not validate against|Parser key "|Problem with given class_path')
_NOISE = re.compile(
    r"Does not validate against|Subtypes:|Errors:$|Given value type|Subclass types expect|- (a class path|a dict)\b"
    r"|(- )?Expected a <class '(NoneType|str)'>$"
)
_FILES = ("pathlib", "os", "shutil", "tempfile")  # modules that open files for us
_LOOPS = re.compile(r"lightning\.pytorch\.loops\b")
_UNKNOWN_KEY = re.compile(
    r"Option '(?P<option>[^']+)' is not accepted"
    r"|Group '(?P<group>[^']+)' does not accept option '(?P<member>[^']+)'"
    r"|Subcommand '\w+' does not accept option '(?P<key>[^']+)'"
    r"|unrecognized arguments: --(?P<argument>[\w.]+)"
)


_READ_YAML = get_loader("yaml")


def read_value(text: str) -> Any:
    """Return what YAML makes of a text; one that is a comment in YAML stays as it is.

    jsonargparse reads each value of a file, and each default, as YAML once more: for a setting that may be null, the
    text "####" was null.

    Example:
        ``read_value("[1]") == [1]``, ``read_value("~")`` is None, and ``read_value("####") == "####"``
    """
    value = _READ_YAML(text)
    return text if value is None and text.lstrip().startswith("#") else value


set_loader("yaml", read_value, (yaml.YAMLError,))


class Parser(LightningArgumentParser):
    """Lightning's parser with errors of a line or two in place of pages of usage."""

    chosen: LightningArgumentParser | None = None  # of the command that the command line names

    def parse_args(self, args: Any = None, *rest: Any, **kwargs: Any) -> Any:
        """Parse; jsonargparse hands the null of a setting two levels down, as in `train.lora`, on as the text None."""
        if args is not None:
            args = [f"{arg[:-4]}null" if arg.startswith("--") and arg.endswith("=None") else arg for arg in args]
        return super().parse_args(args, *rest, **kwargs)

    def dump(self, cfg: Any, *args: Any, **kwargs: Any) -> str:
        """Return the config as text, as `--print_config` and config.yaml have it, with secrets masked."""
        return super().dump(_mask_config(cfg), *args, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print what is wrong and end with code 2, as argparse does."""
        if not self.exit_on_error or _is_debugging():
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self.chosen or self
        program = parser.prog.replace(" [options]", "")
        known = parser.get_defaults(skip_validation=True).keys()
        self.exit(
            2, f"{program}: error: {mask_text(explain(message, known))}\n({program} --help lists what there is)\n"
        )


class ConfigOfRun(SaveConfigCallback):
    """Saves the config beside the log as ``config.yaml``; if another one has that name, as ``config-2.yaml``, ..."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Choose the name, then save as Lightning does; nothing if this very config is there already."""
        directory = trainer.log_dir  # a collective
        if not self.already_saved and trainer.is_global_zero and directory is not None:
            files, text = get_filesystem(directory), self.parser.dump(self.config, skip_none=False)
            for path in numbered(Path(self.config_filename)):
                place = os.path.join(directory, path.name)
                if not files.isfile(place):
                    break
                self.already_saved = files.read_text(place, encoding="utf-8") == text
                if self.already_saved:
                    break
            self.config_filename = path.name
        self.already_saved = trainer.strategy.broadcast(self.already_saved)
        super().setup(trainer, pl_module, stage)


class CommandLine(LightningCLI):
    """LightningCLI that refuses what it would otherwise ignore, with short error messages."""

    def __init__(self, args: list[str] | None = None, run: bool = True) -> None:
        read_one_as_one()
        self._runs = run  # otherwise there are no subcommands: the classes are built, and the caller uses them
        super().__init__(
            model_class=pl.LightningModule,
            datamodule_class=pl.LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            # inference mode would make tensors that Megatron's buffers could not be updated with afterwards
            # and the table at start says what Lightning's summary of the modules would
            trainer_defaults={
                "inference_mode": False,
                "enable_model_summary": False,
                "callbacks": [PredictionFiles()],
            },
            seed_everything_default=1234,
            save_config_callback=ConfigOfRun,
            parser_class=Parser,
            parser_kwargs={"prog": PROGRAM, "default_env": True},
            # Lightning's top-level `optimizer:` replaces the module's, and Megatron's has to be built by the strategy
            auto_configure_optimizers=False,
            args=args,
            run=run,
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Refuse environment variables that would be ignored, then parse as always."""
        arguments = sys.argv[1:] if args is None else args
        if arguments and arguments[0].partition("=")[0] == "--print_completion" and self._runs:
            # also in jsonargparse's words, `--print_completion=shtab-bash`, whose own takes minutes
            self._print_completion(*[word for word in (arguments[0].partition("=")[2], *arguments[1:]) if word])
        found = self._arguments = shipped_configs(arguments)
        try:
            check_configs(found, os.environ)
            check_functions(found, os.environ)
        except ValueError as error:
            parser.error(str(error))
        for replaced in replaced_settings(found):
            rank_zero_warn(replaced)
        if self._runs and arguments and arguments[0] in self.subcommands():
            assert isinstance(parser, Parser)  # parser_class
            parser.chosen = self._parser(arguments[0])
        for command in self.subcommands() if self._runs else [None]:
            self._check_environment(parser, command)
        with warnings.catch_warnings():
            if found != arguments:  # meant for users who pass them
                warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
            super().parse_arguments(parser, args if found == arguments else found)
        try:
            _check_sections(self.config[self.config["subcommand"]] if self._runs else self.config)
        except ValueError as error:
            parser.error(str(error))

    def _check_environment(self, parser: LightningArgumentParser, command: str | None) -> None:
        start = "PL_" if command is None else f"PL_{command.upper()}__"
        keys = ["trainer", *self._parser(command).get_defaults(skip_validation=True).keys()]
        names = [start + key.upper().replace(".", "__") for key in keys]
        # without a command, PL_... may also be a variable of Lightning's own
        prefixes = (start,) if command else tuple(f"{start}{part}__" for part in ("TRAINER", "MODEL", "DATA"))
        for name in os.environ:
            if name.startswith(prefixes) and name not in names:
                parser.error(f"unknown environment variable {name}{_suggest(name, names)}")

    def check_stages(self) -> None:
        """Refuse a run whose model should come from an earlier stage that has not run."""
        settings = self.config[self.subcommand] if self._runs else self.config
        try:
            check_stages(settings.as_dict(), self._arguments, os.environ)
        except ValueError as error:
            self._fail(str(error))

    def before_instantiate_classes(self) -> None:
        """Refuse missing outputs of earlier stages and unusable GPUs; bf16 is the default on GPUs."""
        self.check_stages()
        trainer = self._get(self.config, "trainer")
        if trainer["accelerator"] not in ("auto", "gpu", "cuda"):
            return
        check = check_auto if trainer["accelerator"] == "auto" else check_cuda
        available = count_gpus()
        if available and trainer["precision"] is None and not trainer["plugins"]:
            trainer["precision"] = GPU_PRECISION
        try:
            if available == 0:
                check(measure_devices(imports=False))
            elif str(trainer["devices"]).isdecimal():  # from the command line it comes as text
                check_device_count(int(trainer["devices"]), available)
        except (RuntimeError, ValueError) as error:
            self._fail(f"trainer.accelerator={trainer['accelerator']}: {error}")

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Add the console's progress, unless the config has a progress bar or wants none, and the report."""
        settings = self._get(self.config_init, "trainer")
        given = settings["callbacks"] or []
        callbacks = [*given] if isinstance(given, list) else [given]
        has_bar = any(isinstance(callback, pl.callbacks.ProgressBar) for callback in callbacks)
        if settings["enable_progress_bar"] is not False and not has_bar:
            callbacks.append(RunProgress())
        if not any(isinstance(callback, RunReport) for callback in callbacks):
            callbacks.append(RunReport())
        return super().instantiate_trainer(**{"callbacks": [*callbacks, RunLog()], **kwargs})

    def instantiate_classes(self) -> None:
        """Build module, data and Trainer; settings that one of them refuses are the user's errors, not ours."""
        try:
            super().instantiate_classes()
        except (ValueError, TypeError, MisconfigurationException) as error:
            if _is_debugging():
                raise
            message = explain(str(error)) if _NESTED.match(str(error)) else str(error)
            self._fail(f"{message}\n{_WHERE_RAISED}")
        evaluates = self._runs and self.subcommand != "fit"
        if evaluates and isinstance(self.datamodule, RowDataModule) and not self.datamodule.val_sources:
            self._fail(f"data.val names no rows, which {self.subcommand} runs on: give it a set by name, as in `fit`")
        if isinstance(self.model, ModelModule):  # before any logger opens a directory, which may be another run's
            try:
                require_megatron(self.trainer, self.model)
            except TypeError as error:
                self._fail(f"trainer.strategy: {error}")

    def fit(self, **arguments: Any) -> None:
        """Train."""
        with outlived_output():
            self._call(self.trainer.fit, arguments)

    def validate(self, **arguments: Any) -> None:
        """Run the validation loop."""
        self._call(self.trainer.validate, arguments)

    def test(self, **arguments: Any) -> None:
        """Run the test loop."""
        self._call(self.trainer.test, arguments)

    def predict(self, **arguments: Any) -> None:
        """Run the predict loop."""
        self._call(self.trainer.predict, arguments)

    def _call(self, method: Callable[..., Any], arguments: dict[str, Any]) -> None:
        """Run; what this package refuses while the run is set up is the user's error, too. Callbacks know it by now."""
        try:
            method(**arguments)
        except (ValueError, OSError) as error:
            if _is_debugging() or not _is_refusal(error):
                raise
            self._fail(f"{error}\n{_WHERE_RAISED}")

    def _print_completion(self, shell: str = "") -> NoReturn:
        # shtab on jsonargparse's parser writes 120 MB: it follows a tensor's `data` from tensor to tensor
        shell = shell.removeprefix("shtab-")
        if shell not in shtab.SUPPORTED_SHELLS:
            self.parser.error(f"--print_completion {shell}: name one of {', '.join(shtab.SUPPORTED_SHELLS)}")
        parser = argparse.ArgumentParser(PROGRAM)
        parser.add_argument("--version", action="store_true")
        commands = parser.add_subparsers()
        for command in self.subcommands():
            subparser = commands.add_parser(command, help=f"Trainer.{command}")  # shtab hides one without help
            subparser.add_argument("--print_config", action="store_true")
            options: dict[str, list[str] | None] = {
                **dict.fromkeys(self._parser(command).get_defaults(skip_validation=True).keys()),
                **{f"model.{name}": None for cls in _MODELS for name in inspect.signature(cls).parameters},
                **{f"model.train.{name}": None for name in inspect.signature(TrainingSettings).parameters},
                **{f"data.{name}": None for cls in _DATA for name in inspect.signature(cls).parameters},
                "model": [cls.__name__ for cls in _MODELS],
                "data": [cls.__name__ for cls in _DATA],
            }
            for name, choices in options.items():
                action = subparser.add_argument(f"--{name}", choices=choices)
                if name in ("config", "ckpt_path"):
                    action.complete = shtab.FILE  # type: ignore[attr-defined]
        print(shtab.complete(parser, shell))
        self.parser.exit()

    def _fail(self, message: str) -> NoReturn:
        program = f"{PROGRAM} {self.subcommand}" if self._runs else PROGRAM
        self.parser.exit(2, f"{program}: error: {mask_text(message)}\n")


def _mask_config(config: Any, name: str = "") -> Any:
    """Return a copy of a parsed config, or of what it has under `name`, whose secrets are masked."""
    if isinstance(config, Namespace):
        copy = config.clone()
        for key, value in config.items():  # of nested namespaces, too: trainer.max_steps
            copy[key] = _mask_config(value, key.rpartition(".")[2])
        return copy
    if type(config) in (list, tuple):
        return type(config)(_mask_config(value, name) for value in config)
    if type(config) is dict and not is_secret_name(name):
        return {key: _mask_config(value, str(key)) for key, value in config.items()}
    return mask_secrets({name: config})[name]


def run(args: list[str] | None = None) -> LightningCLI:
    """Parse the command line and run the command in it.

    Args:
        args: Command line without the program's name; the process's own if not given.
    """
    return CommandLine(args)


def _check_sections(settings: Namespace) -> None:
    """Refuse null for a group of settings that a class of ours cannot be without, such as `model.sampling`."""
    for part in ("model", "data"):
        chosen = settings.get(part)
        if not isinstance(chosen, Namespace):  # none, or an object
            continue
        given = chosen.get("init_args", Namespace()).as_dict()
        for name, parameter in inspect.signature(pydoc.locate(chosen["class_path"])).parameters.items():  # type: ignore[arg-type]
            if is_dataclass(parameter.annotation) and given.get(name, parameter) is None:
                raise ValueError(f"{part}.{name} is null, and is always needed: leave it out for its defaults")


def _is_debugging() -> bool:
    return os.environ.get(_DEBUG, "").lower() == "true"


def _is_refusal(error: ValueError | OSError) -> bool:
    """Whether this package has raised it, and no loop had begun: a loop runs rewards and other code of the user's."""
    names = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    while len(names) > 1 and names[-1].partition(".")[0] in _FILES:  # of a file that cannot be read, named in the error
        names.pop()
    return names[-1].startswith("lightning_megatron_rl.") and not any(map(_LOOPS.match, names))


class Built(CommandLine):
    """`fit` up to the built module, data and strategy; nothing is loaded, written or asked of devices.

    Args:
        args: Arguments of `fit`.
        purpose: Ends the error of a strategy that is none of Megatron's: what is built is for what?
        change: Gets the Trainer's settings, with those of a `MegatronStrategy`, before anything is left out of them.

    Raises:
        ValueError: A class refuses its settings, or the strategy is another one.
        SystemExit: The parser refuses the config, as in `fit`.
    """

    strategy: MegatronStrategy
    config_dump: Mapping[str, Any] = MappingProxyType({})  # of `save_hyperparameters`; to write it takes as long again

    def __init__(self, args: Sequence[str], purpose: str, change: Callable[[Namespace], None]) -> None:
        self._purpose, self._change = purpose, change
        environment = dict(os.environ)
        disabled = logging.root.manager.disable
        logging.disable(logging.INFO)  # what a Trainer tells about itself, for one that is not used
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
                super().__init__(["fit", *args])
        finally:  # seed_everything leaves variables
            logging.disable(disabled)
            os.environ.clear()
            os.environ.update(environment)

    def before_instantiate_classes(self) -> None:
        """Change the Trainer's settings, and leave out whatever writes files or asks for devices."""
        trainer = self._get(self.config, "trainer")
        strategy = trainer["strategy"]
        if not isinstance(strategy, Namespace):
            if strategy not in ("megatron", "auto"):
                raise ValueError(f"trainer.strategy={strategy}: {self._purpose}")
            path = f"{MegatronStrategy.__module__}.{MegatronStrategy.__qualname__}"
            trainer["strategy"] = Namespace(class_path=path, init_args=Namespace())
        self._change(trainer)
        trainer["callbacks"], trainer["logger"], trainer["plugins"], trainer["profiler"] = None, False, None, None

    def instantiate_classes(self) -> None:
        """Build; what a class refuses is an error of whoever builds."""
        LightningCLI.instantiate_classes(self)
        strategy = self._get(self.config_init, "trainer")["strategy"]
        if not isinstance(strategy, MegatronStrategy):
            raise ValueError(f"trainer.strategy is {type(strategy).__name__}: {self._purpose}")
        self.strategy = strategy

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Return a Trainer that is not used."""
        return pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, barebones=False)

    def fit(self, **_: Any) -> None:
        """Do not train."""


def explain(message: str, known: Iterable[str] = ()) -> str:
    """Return the innermost complaint of a jsonargparse message, with the nearest key that exists.

    Args:
        message: The error; complaints about nested keys are indented below those about their owners.
        known: All keys of the command, for complaints about its top level.

    Example:
        ``explain("Subcommand 'fit' does not accept option 'trainer.max_stps'", ["trainer.max_steps"])`` is
        ``'unknown key trainer.max_stps; did you mean trainer.max_steps?'``
    """
    owners: list[tuple[int, str, str]] = []  # of the current line: indentation, key, class
    complaints: list[tuple[int, str]] = []
    for line in message.splitlines():
        text = line.strip()
        if not text or _NOISE.match(text):
            continue
        indent = len(line) - len(line.lstrip(" ")) + 2 * text.startswith("- ")
        text = text.removeprefix("- ")
        owners = [owner for owner in owners if owner[0] < indent]
        path = ".".join(key for _, key, _ in owners if key)
        cls = next((name for _, _, name in reversed(owners) if name), "")
        if match := re.match(r'Parser key "([^"]+)":$', text):
            owners.append((indent, match[1], ""))
        elif match := re.match(r"Problem with given class_path '([^']+)':$", text):
            owners.append((indent, "", match[1]))
        elif match := re.match(r"Given value: (.*)", text):  # of the complaints in the list above it
            complaints = [
                (depth, _with_value(said, match[1]) if depth == indent + 4 else said) for depth, said in complaints
            ]
        else:
            complaints.append((indent, _explain_line(text, path, cls, list(known))))
    deepest = max((indent for indent, _ in complaints), default=0)
    return "\n".join(dict.fromkeys(text for indent, text in complaints if indent == deepest)) or message


def _with_value(said: str, value: str) -> str:
    """Return a complaint with the value that it is about, which jsonargparse gives after it."""
    if match := re.match(r"(.*)Import path does not implement protocol (\w+)$", said):
        return match[1] + _explain_protocol(value, match[2])
    return f"{said}, got {value}" if re.search(r"expected [^,]+$", said) else said


def _explain_line(text: str, path: str, cls: str, known: list[str]) -> str:
    if match := re.match(r"Expected a dot import path string: (\w+)", text):
        if match[1] in rewards.__all__:
            return f"{path}: a reward is named by its path: {rewards.__name__}.{match[1]}"
        return f"{path}: unknown class {match[1]}{_suggest(match[1], [cls.__name__ for cls in _CLASSES])}"
    if match := re.match(r"Import path (\S+) does not implement protocol (\w+)", text):
        return f"{path}: {_explain_protocol(match[1], match[2])}"
    if match := re.match(r"Expected an? (.+?)(\. Got value: (.*))?$", text):
        kind = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", match[1]).replace("typing.Literal", "one of ")
        return f"{path}: expected {kind}" + (f", got {match[3]}" if match[2] else "")
    if "arguments are required: " in text and "fit.model" in text:
        return f"{text}. Give a config, which has them: --config FILE"
    if not (match := _UNKNOWN_KEY.match(text)):
        return f"{path}: {text}" if path else text
    key, group = match["option"] or match["member"] or match["key"] or match["argument"], match["group"]
    if cls:
        where = ".".join(part for part in (path, group, key) if part)
        if pydoc.locate(cls) in (pl.LightningModule, pl.LightningDataModule):
            return f"unknown key {where}: nothing before it gives {path} a class_path. An overlay comes after its base"
        return _explain_moved(where, cls) or f"unknown key {where}{_suggest(key, _parameters(cls, group))}"
    key = ".".join(part for part in (path, group, key) if part)  # no class's: the command's own
    parent = key.rpartition(".")[0]
    depth = key.count(".") + 1
    siblings = {".".join(name.split(".")[:depth]) for name in known if not parent or name.startswith(f"{parent}.")}
    siblings = siblings or {name.split(".")[0] for name in known}
    return f"unknown key {key}{_suggest(key, sorted(siblings))}"


def _explain_moved(key: str, cls: str) -> str:
    """Say where an old flat key of a module is now, such as `model.optimizer.lr`; nothing of other keys."""
    name = key.removeprefix("model.")
    moved = describe_moved([name.partition(".")[0]])
    is_ours = bool(moved) and "train" in _parameters(cls, None)
    return f"unknown key {key}: {moved} Write model.train.{name}." if is_ours else ""


def _explain_protocol(target_path: str, name: str) -> str:
    """Say which method of a protocol of ours a function or class lacks, or which has another signature."""
    target = pydoc.locate(target_path)
    modules = [module for path, module in sys.modules.items() if path.startswith("lightning_megatron_rl.")]
    protocol = next((vars(module)[name] for module in modules if name in vars(module)), None)
    if target is None or protocol is None:
        return f"{target_path} is no {name}"
    methods = {
        key: member
        for key, member in vars(protocol).items()
        if inspect.isfunction(member) and (key == "__call__" or not key.startswith("_"))
    }
    needed = {key: f"{key}{_signature(member)}" for key, member in methods.items()}
    if inspect.isclass(target):
        missing = [key for key in methods if not any(key in vars(cls) for cls in target.__mro__)]
        if missing:
            return f"{target_path} has no method {', '.join(needed[key] for key in missing)}, which {name} asks for"
        found = {key: f"{key}{_signature(getattr(target, key))}" for key in methods}
    else:
        found = {"__call__": f"{target_path}{_signature(target)}"}
        needed = {"__call__": f"{target_path}{_signature(protocol.__call__)}"}
    wrong = [key for key in found if found[key].partition("(")[2] != needed[key].partition("(")[2]]
    said = "; ".join(f"{found[key]} is to be {needed[key]}, with these annotations" for key in wrong)
    offered = vars(sys.modules["lightning_megatron_rl"])["__all__"]
    ours = [word for word in dict.fromkeys(re.findall(r"\w+", said)) if word in offered]
    imports = f" (from lightning_megatron_rl import {', '.join(ours)})" if ours else ""
    return f"{target_path} is no {name}: {said}{imports}" if said else f"{target_path} is no {name}"


def _signature(function: Any) -> str:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return "(...)"
    parameters = [parameter for parameter in signature.parameters.values() if parameter.name != "self"]
    text = str(signature.replace(parameters=parameters))
    return re.sub(r"(?:\w+\.)+(\w+)", r"\1", text).replace(", /)", ")").replace("'", "")


def _parameters(cls: str, group: str | None) -> list[str]:
    """Return the names that the class, or the dataclass it takes as `group`, is built with."""
    target = pydoc.locate(cls)
    if group:
        target = inspect.signature(target).parameters[group].annotation  # type: ignore[arg-type]
    return list(inspect.signature(target).parameters)  # type: ignore[arg-type]


def _suggest(key: str, names: list[str]) -> str:
    last = key.rpartition(".")[2]
    last = _OTHER_NAMES.get(last, last)
    near = []
    if last in ("lr", "weight_decay"):  # they are the optimizer's
        places = [".".join((*_OPTIMIZER[depth:], last)) for depth in (3, 2, 1, 0)]
        near = [place for place in places if place.partition(".")[0] in names]  # the nearest first
    if near := near or difflib.get_close_matches(key, names, n=1, cutoff=0.6):
        return f"; did you mean {near[0]}?"
    if len(names) > _MAX_LISTED:
        near = difflib.get_close_matches(key, names, n=_NEAREST, cutoff=0.3)
        return f"; nearest: {', '.join(near)}" if near else ""
    return f"; known: {', '.join(names)}" if names else ""
