"""The table at start: rows that do not depend on a model; the times of steps."""

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_megatron_rl.modules.reporting import StepReport, print_table
from lightning_megatron_rl.modules.sft import SFTModule
from lightning_megatron_rl.modules.training import TrainingSettings
from lightning_megatron_rl.utilities import cpus
from tests.training import SequenceDataModule, fit_sft, frozen_sequences, make_trainer


class Load:
    """Others that keep so many CPUs busy."""

    def __init__(self, busy: float) -> None:
        self.busy = busy

    def cpus(self) -> float:
        return self.busy


def test_cpus_are_in_the_table_and_a_busy_machine_with_its_price():
    count = cpus.usable_cpus().count
    module = StepReport(SFTModule("nothing"))
    assert isinstance(module._others, cpus.OthersLoad)
    module._others = Load(0.0)
    (row,) = module._describe_cpus()
    assert row[0] == "CPUs"
    assert row[1].startswith(f"{count} by ")
    module._others = Load(float(count))
    rows = dict(module._describe_cpus())
    assert f"keep {count:.1f} of {count} CPUs busy: a step may take 2.0 times as long" in rows["load"]


PAUSE_S = 3.0  # more than a step of a tiny model takes on a busy machine


class ExportsOnce(pl.Callback):
    """Takes its time at the end of the second batch, as an export does."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            with pl_module.phase("hf_export"):
                time.sleep(PAUSE_S)


def test_times_are_of_their_own_step_and_without_callbacks(worker_pool, qwen3_dir):
    """Lightning's logs repeat a value that is left out; callbacks are at work before the module's own hook."""
    (run,) = worker_pool.run(
        fit_sft, qwen3_dir, {}, 1, steps=3, callbacks=[ExportsOnce()], world_size=1, init_process_group=False
    )
    first, second, third = run.steps
    assert "time/hf_export_s" not in first
    assert second["time/hf_export_s"] >= PAUSE_S
    assert third["time/hf_export_s"] == 0
    assert all(step["time/update_s"] <= step["time/step_s"] < PAUSE_S for step in run.steps)


def fit_twice(model: Path) -> list[str]:
    """The row of a fit on batches of four, and that of a second one on batches of two."""
    module, found = SFTModule(str(model), train=TrainingSettings(max_tokens_per_microbatch=64)), []
    for batch_size in (4, 2):
        make_trainer({}, 1, max_steps=1).fit(module, SequenceDataModule(frozen_sequences(4), batch_size))
        found.append(dict(module.start_facts()["table"])["sequences per update"])
    return found


def test_a_second_fit_has_a_table_of_its_own(worker_pool, qwen3_dir):
    """Which is in its report, too."""
    (found,) = worker_pool.run(fit_twice, qwen3_dir, world_size=1, init_process_group=False)
    assert found == [f"{size} per replica x 1 replicas = {size}" for size in (4, 2)]


def test_the_table_at_start_shows_paths_as_they_are(capsys, monkeypatch):
    """Brackets and colons are no markup, and a long path is folded, not cut."""
    monkeypatch.setenv("COLUMNS", "40")
    print_table("run", [("model", "models/[v2]/[/b]"), ("critic", "a" * 60), ("mode", ":smile:")])
    shown = capsys.readouterr().out
    assert "models/[v2]/[/b]" in shown
    assert "…" not in shown
    assert ":smile:" in shown
