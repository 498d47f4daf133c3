"""A stream behind the end of a fit: a checkpoint that is saved then, and a fit of the same Trainer, go on with it.

And what a user logs while batches of prompts are read ahead.
"""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_megatron_rl.data.prompts import PromptDataModule
from lightning_megatron_rl.modules.grpo import GRPOModule
from lightning_megatron_rl.modules.streaming import StreamingSettings
from lightning_megatron_rl.rollout import SamplingParams
from tests.module_options import nested
from tests.modules.kept_engine import kept_engine
from tests.modules.runs import length
from tests.modules.test_rows import UsersCallback
from tests.modules.test_streaming import ALONE, BATCH, ROWS, Used, write_rows
from tests.training import make_trainer

BOUND, FIRST = 2, 2  # versions, and steps of the first fit
ALL = ROWS // BATCH  # steps of an epoch


def run_of(model: Path, rows: Path, bound: int, steps: int) -> tuple[pl.Trainer, GRPOModule, PromptDataModule, Used]:
    from megatron.core.optimizer import OptimizerConfig

    options: dict[str, Any] = {
        "model": str(model),
        "rewards": [length],
        "engine": kept_engine(max_model_len=64, kv_cache_memory_gb=0.25, num_threads=1),
        "num_generations": 4,
        "sampling": SamplingParams(max_tokens=40),
        "streaming": StreamingSettings(max_staleness=bound),
        "optimizer": OptimizerConfig(lr=1e-3),
        "max_tokens_per_microbatch": 96,
    }
    used = Used()
    trainer = make_trainer({}, 1, max_steps=steps, callbacks=[used], enable_checkpointing=False, logger=False)
    return trainer, GRPOModule(**nested(options)), PromptDataModule(str(rows), str(model), batch_size=BATCH), used


Fits = dict[str, tuple[list[list[int]], list[int]]]  # rows and ages of each step, by what goes on


def fits(model: Path, rows: Path, checkpoint: Path) -> Fits:
    """Fit two steps, save, fit the rest; go on from the checkpoint twice, with a stream and in two fits without one."""
    trainer, module, data, used = run_of(model, rows, BOUND, FIRST)
    trainer.fit(module, data)
    trainer.save_checkpoint(checkpoint)
    begun = list(used.rows)
    trainer.fit_loop.epoch_loop.max_steps = ALL
    trainer.fit(module, data)
    found = {"same Trainer": (used.rows, used.ages)}
    trainer, module, data, used = run_of(model, rows, BOUND, ALL)
    trainer.fit(module, data, ckpt_path=checkpoint)
    found["checkpoint"] = (begun + used.rows, used.ages)
    trainer, module, data, used = run_of(model, rows, 0, ALL - 1)
    trainer.fit(module, data, ckpt_path=checkpoint)
    trainer.fit_loop.epoch_loop.max_steps = ALL
    trainer.fit(module, data)
    found["without a stream"] = (begun + used.rows, used.ages)
    return found


def fits_with_others(model: Path, rows: Path) -> Fits:
    """Begin again behind two steps: with another Trainer, and on its data with a third one that streams nothing.

    And with another module of the same Trainer.
    """
    found = {}
    trainer, module, data, _ = run_of(model, rows, BOUND, FIRST)
    trainer.fit(module, data)
    trainer, _, data, used = run_of(model, rows, BOUND, ALL)
    trainer.fit(module, data)
    found["another Trainer"] = (used.rows, used.ages)
    trainer, module, _, used = run_of(model, rows, 0, ALL)
    trainer.fit(module, data)
    found["another Trainer, without a stream"] = (used.rows, used.ages)
    for name, bound in {"another module": BOUND, "another module, without a stream": 0}.items():
        trainer, module, data, used = run_of(model, rows, BOUND, FIRST)
        trainer.fit(module, data)
        begun = len(used.rows)
        _, module, _, _ = run_of(model, rows, bound, ALL)
        trainer.fit_loop.epoch_loop.max_steps = FIRST + ALL
        trainer.fit(module, data)
        found[name] = (used.rows[begun:], used.ages[begun:])
    return found


@pytest.fixture(scope="module")
def found(worker_pool, qwen3_dir, tmp_path_factory) -> Fits:
    directory = tmp_path_factory.mktemp("again")
    rows = write_rows(directory / "rows.jsonl")
    return worker_pool.run(fits, qwen3_dir, rows, directory / "after.ckpt", world_size=1, **ALONE)[0]


@pytest.fixture(scope="module")
def found_with_others(worker_pool, qwen3_dir, tmp_path_factory) -> Fits:
    rows = write_rows(tmp_path_factory.mktemp("others") / "rows.jsonl")
    return worker_pool.run(fits_with_others, qwen3_dir, rows, world_size=1, **ALONE)[0]


def check(used: list[list[int]], ages: list[int]) -> None:
    assert len(used) == ALL
    assert sorted(row for step in used for row in step) == list(range(ROWS))
    assert max(ages) <= BOUND


@pytest.mark.parametrize("how", ["same Trainer", "checkpoint", "without a stream"])
def test_no_prompt_is_lost_and_none_comes_again(found, how):
    check(*found[how])


@pytest.mark.slow  # eight fits
@pytest.mark.parametrize(
    "how",
    [
        "another Trainer",
        "another Trainer, without a stream",
        "another module",
        "another module, without a stream",
    ],
)
def test_another_trainer_or_module_begins_with_all_prompts(found_with_others, how):
    check(*found_with_others[how])


def logged_mean(model: Path, rows: Path) -> float:
    trainer, module, data, _ = run_of(model, rows, BOUND, ALL)
    trainer.callbacks.append(UsersCallback())
    trainer.fit(module, data)
    return float(trainer.callback_metrics["mine"])


def test_means_of_an_epoch_are_over_the_prompts_of_each_step(worker_pool, qwen3_dir, tmp_path):
    """The first batch of a stream brings those of later ones, and the last ones bring none."""
    rows = write_rows(tmp_path / "rows.jsonl")
    (mean,) = worker_pool.run(logged_mean, qwen3_dir, rows, world_size=1, **ALONE)
    assert mean == pytest.approx(sum(range(ALL)) / ALL)
