"""Write docs/settings.md and docs/cli.md: every setting from signatures and docstrings, every command from its --help.

``python scripts/reference_pages.py`` writes them; a test holds them to what this returns.
"""

import contextlib
import dataclasses
import importlib
import inspect
import io
import os
import re
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from docstring_parser import parse

DOCS = Path(__file__).resolve().parents[1] / "docs"
# what a YAML file names: where it stands, and the class whose arguments it has; nested settings follow by themselves
SECTIONS: dict[str, dict[str, str]] = {
    "Strategy": {"trainer.strategy": "strategy.megatron.MegatronStrategy"},
    "Modules": {
        "model": "modules.grpo.GRPOModule",
        "model (PPO)": "modules.ppo.PPOModule",
        "model (SFT)": "modules.sft.SFTModule",
        "model (DPO)": "modules.dpo.DPOModule",
        "model (reward model)": "modules.reward_model.RewardModule",
    },
    "Engines": {
        "model.engine": "rollout.vllm.engine.VLLMEngine",
        "model.engine (in the trainer's process)": "rollout.vllm.colocated.ColocatedVLLMEngine",
        "model.engine (servers)": "rollout.servers.engine.VLLMServers",
        "model.engine (servers that Ray places)": "rollout.servers.ray_engines.RayEngines",
        "model.engine (recorded)": "rollout.replay.ReplayEngine",
    },
    "Data": {
        "data": "data.prompts.PromptDataModule",
        "data (SFT)": "data.sft.SFTDataModule",
        "data (pairs)": "data.preference.PreferenceDataModule",
    },
    "Callbacks": {
        f"trainer.callbacks ({name.rsplit('.', 1)[1]})": name
        for name in (
            "callbacks.hf_export.HFExport",
            "callbacks.rollout_samples.RolloutSamples",
            "callbacks.run_report.RunReport",
            "callbacks.run_progress.RunProgress",
            "callbacks.timeline.Timeline",
            "callbacks.memory_snapshot.MemorySnapshot",
            "callbacks.weight_average.WeightAverage",
            "callbacks.weight_sync.WeightSync",
        )
    },
}
SETTINGS_INTRO = """# Settings

Every setting of the YAML files, from the classes' signatures and docstrings; `python scripts/reference_pages.py`
writes this page. `lightning-megatron-rl fit --model.help GRPOModule` says the same on the command line, and
`lightning-megatron-rl schema` writes it for editors. `--print_config` prints a config with all defaults. Settings of
Lightning's own `Trainer` are in [lightning.md](lightning.md#trainer-flags), those of Megatron's `OptimizerConfig` and
`TransformerConfig` in Megatron-core.
"""
CLI_INTRO = """# Command line

What each command prints with `--help`; `python scripts/reference_pages.py` writes this page. `fit`, `validate`, `test`
and `predict` take `--config FILE` and every setting of [settings.md](settings.md) by its path, such as
`--trainer.max_steps 20`.
"""


def load(name: str) -> type:
    """Return a class of the package."""
    module, _, cls = name.rpartition(".")
    return getattr(importlib.import_module(f"lightning_megatron_rl.{module}"), cls)  # type: ignore[no-any-return]


def arguments(cls: type) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, type, default and meaning of each argument that a class takes."""
    described = {}
    for base in (*reversed(cls.__mro__[1:]), cls):
        if base.__doc__ and base.__module__.startswith("lightning_megatron_rl"):
            described |= {found.arg_name: found.description or "" for found in parse(base.__doc__).params}
    for parameter in inspect.signature(cls).parameters.values():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        given = parameter.default
        default = "required" if given is parameter.empty else f"`{shown(given)}`"
        yield parameter.name, f"`{annotation(parameter.annotation)}`", default, described.get(parameter.name, "")


def shown(value: Any) -> str:
    """Return a default as YAML has it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if type(value).__module__.startswith("lightning_megatron_rl"):
        return f"{type(value).__name__}()"
    return repr(value) if not callable(value) else getattr(value, "__name__", "a function")


def annotation(kind: Any) -> str:
    """Return a type without the modules of its names."""
    text = (
        kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind)) if kind.__class__ is type else str(kind)
    )
    return re.sub(r"ForwardRef\('(\w+)'\)", r"\1", re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", text))


def nested(cls: type) -> Iterator[tuple[str, type]]:
    """Yield the arguments that are settings of this package themselves, and their classes."""
    names = vars(importlib.import_module(cls.__module__)) | _later()
    hints = typing.get_type_hints(cls.__init__, names)  # type: ignore[misc]
    for name in inspect.signature(cls).parameters:
        for kind in (hints.get(name), *typing.get_args(hints.get(name))):
            if dataclasses.is_dataclass(kind) and kind.__module__.startswith("lightning_megatron_rl"):
                yield name, typing.cast("type", kind)


def _later() -> dict[str, Any]:
    """Names that signatures have for type checkers alone."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

    return {"OptimizerConfig": OptimizerConfig, "DistributedDataParallelConfig": DistributedDataParallelConfig}


def settings_page() -> str:
    """Return docs/settings.md."""
    lines, written = [SETTINGS_INTRO], set()

    def write(place: str, cls: type) -> None:
        if cls in written:
            return
        written.add(cls)
        summary = (parse(cls.__doc__ or "").short_description or "").replace("\n", " ")
        lines.append(f"\n### `{cls.__name__}`: {place}\n\n{summary}\n\n")
        lines.append("| setting | type | default | meaning |\n|---|---|---|---|\n")
        for name, kind, default, meaning in arguments(cls):
            text = " ".join(meaning.split())
            cells = (cell.replace("|", "\\|") for cell in (kind, default, text))
            lines.append(f"| `{name}` | {' | '.join(cells)} |\n")
        for name, inner in nested(cls):
            write(f"{place.partition(' ')[0]}.{name}", inner)

    for title, classes in SECTIONS.items():
        lines.append(f"\n## {title}\n")
        for place, name in classes.items():
            write(place, load(name))
    return "".join(lines)


def helps() -> dict[str, Callable[[list[str]], Any]]:
    """Return the command's tools."""
    from lightning_megatron_rl.__main__ import TOOLS

    return {name: importlib.import_module(module).main for name, module in TOOLS.items()}


def cli_page() -> str:
    """Return docs/cli.md."""
    from lightning_megatron_rl.__main__ import main

    def printed(call: Callable[[list[str]], Any]) -> str:
        out = io.StringIO()
        width, end = patch.dict(os.environ, {"COLUMNS": "100"}), contextlib.suppress(SystemExit)
        with width, contextlib.redirect_stdout(out), end:
            call(["--help"])
        return re.sub(r"[ \t]+$", "", out.getvalue(), flags=re.MULTILINE).strip("\n")

    parts = [CLI_INTRO, f"\n```text\n{printed(main)}\n```\n"]
    for name, tool in helps().items():
        parts.append(f"\n## {name}\n\n```text\n{printed(tool)}\n```\n")
    return "".join(parts)


PAGES = {"settings.md": settings_page, "cli.md": cli_page}


def write_pages() -> None:
    """Write both."""
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())


if __name__ == "__main__":
    write_pages()
