"""Write configs/recipes: `--new` a file for each model and method that has none, always the header of every file.

The rest of a file that is there is left as it is: people edit it. `tests/recipes/test_recipes.py` compares headers.
"""

import argparse
import re
from pathlib import Path

from lightning_megatron_rl.models.published import hub_name
from lightning_megatron_rl.modules.planning import Lengths
from lightning_megatron_rl.plan.config import FromConfig, describe_model
from lightning_megatron_rl.planner.hardware import HARDWARE
from lightning_megatron_rl.planner.run import Run
from lightning_megatron_rl.recipes.choose import choose
from lightning_megatron_rl.recipes.text import MARK, METHODS, make_header, write_recipe

RECIPES = Path(__file__).resolve().parents[1] / "configs" / "recipes"
# the GPUs that a recipe is for: kind, and how many for all weights (sft and grpo) and for adapters
GPUS = {
    "smollm2-135m": ("h100", 1, 1, 1),
    "qwen2.5-0.5b": ("h100", 1, 1, 1),
    "qwen3-0.6b": ("h100", 1, 1, 1),
    "llama-3.2-1b": ("h100", 1, 1, 1),
    "qwen3-4b": ("h100", 8, 8, 4),
    "qwen2.5-7b": ("h100", 8, 8, 4),
    "llama-3.1-8b": ("h100", 8, 8, 4),
    "qwen3-8b": ("h100", 8, 8, 4),
    "gpt-oss-20b": ("h200", 8, 8, 8),
    "qwen3-30b-a3b": ("h200", 8, 8, 8),
    "qwen3-32b": ("h200", 16, 16, 8),
    "mixtral-8x7b": ("h200", 16, 16, 8),
    "llama-3.1-70b": ("h200", 32, 32, 8),
    "gpt-oss-120b": ("h200", 32, 32, 8),
    "qwen3-235b-a22b": ("h200", 64, 64, 32),
    "llama-3.1-405b": ("h200", 128, 128, 32),
    "deepseek-v3": ("b200", 128, 128, 128),
}


def recipe_files() -> list[Path]:
    """Every recipe."""
    return sorted(RECIPES.glob("*/*.yaml"))


def plan_of(path: Path) -> Run:
    """The plan of a recipe on the GPUs that its header names."""
    found = re.search(rf"{MARK}--device (\S+) --devices (\d+) --nodes (\d+)", path.read_text())
    assert found is not None, f"{path} has no line {MARK}--device"
    built = FromConfig(["--config", str(path)])
    kind, devices, nodes = HARDWARE[found[1]], int(found[2]), int(found[3])
    return built.describe(kind, devices=devices, nodes=nodes, lengths=Lengths())


def with_header(text: str, run: Run) -> str:
    """The recipe's text with the header of its plan, behind its title."""
    lines = [line for line in text.splitlines() if not line.startswith(MARK)]
    return "\n".join([lines[0], *make_header(run), *lines[1:]]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--new", action="store_true", help="write recipes that are not there")
    options = parser.parse_args()
    if options.new:
        for short, (kind, *counts) in GPUS.items():
            model = describe_model(hub_name(short))
            for method, world in zip(METHODS, counts, strict=True):
                path = RECIPES / short / f"{method}.yaml"
                if path.exists():
                    continue
                choices, run = choose(method, model, HARDWARE[kind], world)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(with_header(write_recipe(choices, run), run))
                print(path.relative_to(RECIPES), make_header(run)[1:], flush=True)
    for path in recipe_files():
        path.write_text(with_header(path.read_text(), plan_of(path)))


if __name__ == "__main__":
    main()
