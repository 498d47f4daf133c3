"""`auto` on a GPU: the first step with half of the tokens, the others with all, and the numbers of settings by hand."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from tests.gpu.test_training import FP32_RELATIVE, relative_steps
from tests.training import Run, fit_sft

pytestmark = pytest.mark.deadline(400)
ROWS = 64
LONGEST = 64  # tokens; a micro-batch of the planner's least holds one such sequence


class Budgets(pl.Callback):
    """Keeps what each step trained with, and what the table at start said."""

    def __init__(self) -> None:
        self.found: list[int] = []
        self.row: list[tuple[str, str]] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.found.append(pl_module.train_settings.token_budget)
        self.row = self.row or pl_module.budget.describe()


def rows() -> list[dict[str, str]]:
    return [{"prompt": f"{number} + {number} = ", "completion": str(2 * number)} for number in range(ROWS)]


def fit(model: Path, **train: Any) -> tuple[Run, list[int], list[tuple[str, str]]]:
    from lightning_megatron_rl.data.sft import SFTDataModule

    callback = Budgets()
    data = SFTDataModule(rows, str(model), batch_size=16, max_length=LONGEST, shuffle=False)
    trainer = {"accelerator": "cuda", "max_steps": 3}
    run = fit_sft(model, {}, 1, module=train, trainer=trainer, callbacks=[callback], data=data)
    return run, callback.found, callback.row


@pytest.mark.smoke
def test_auto_measures_the_first_step_and_takes_the_whole(fresh_pool, qwen3_dir):
    options: dict[str, Any] = {"world_size": 1, "init_process_group": False}
    auto = {"max_tokens_per_microbatch": "auto", "recompute": "auto"}
    run, budgets, row = fresh_pool.run(fit, qwen3_dir, **options, **auto)[0]
    by_hand, _, no_row = fresh_pool.run(fit, qwen3_dir, **options, max_tokens_per_microbatch=LONGEST)[0]
    first, *others = budgets
    assert set(others) == {2 * first}  # a tiny model: there is room
    ((name, text),) = row
    assert name == "auto"
    assert f"{2 * first} tokens per micro-batch, not recomputed" in text
    assert no_row == []
    assert relative_steps(run, by_hand) < FP32_RELATIVE
