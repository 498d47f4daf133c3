"""Write the tables of docs/scaling.md: recipes on 8 to 1,024 GPUs, by the planner's formulas.

python scripts/scaling_table.py            # writes
python scripts/scaling_table.py --check    # exit code 1 if the document would change
"""

import sys

from results import ROOT, put_between, table

from lightning_megatron_rl.modules.planning import Lengths
from lightning_megatron_rl.plan.config import FromConfig
from lightning_megatron_rl.planner.hardware import find_hardware
from lightning_megatron_rl.planner.report import scaled_cells
from lightning_megatron_rl.planner.scaling import scale

PAGE = ROOT / "docs" / "scaling.md"
DEVICE = "h200"
RECIPES = {"qwen3-8b": (8, 64, 256, 1024), "qwen3-30b-a3b": (8, 64, 256, 1024), "qwen3-235b-a22b": (64, 256, 1024)}


def recipe_table(name: str, gpus: tuple[int, ...]) -> str:
    """Return a recipe's table."""
    built = FromConfig(["--config", str(ROOT / "configs" / "recipes" / name / "grpo.yaml")])
    run = built.describe(find_hardware(DEVICE), devices=None, nodes=None, lengths=Lengths(None, None))
    header, *rows = (f"| {' | '.join(cells)} |" for cells in scaled_cells(scale(run, gpus)))
    return table(header, rows)


def main() -> int:
    """Write or compare."""
    before = text = PAGE.read_text()
    for name, gpus in RECIPES.items():
        text = put_between(text, name, recipe_table(name, gpus))
    if "--check" in sys.argv:
        return int(text != before)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
