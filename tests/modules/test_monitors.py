"""What a run would only notice at its first save is refused before the engine starts and before weights are read."""

import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lightning_megatron_rl.data.arithmetic import ArithmeticRows
from lightning_megatron_rl.data.prompts import PromptDataModule
from lightning_megatron_rl.modules.monitors import TRAINING, check_monitors
from lightning_megatron_rl.modules.sft import SFTModule
from lightning_megatron_rl.modules.training import TrainingSettings
from lightning_megatron_rl.rollout.protocol import SamplingParams
from tests.modules.runs import ReplayEngine, fit_grpo, prompts
from tests.test_readme import documented
from tests.tiny_models import save_tiny_model
from tests.training import SequenceDataModule, fit_arithmetic, fit_sft, frozen_sequences, make_trainer


class NeverStarted(ReplayEngine):
    """An engine that no refused run may start."""

    def start(self, model_path: str | Path) -> None:
        raise AssertionError("the engine was started")


class UsersCallback(pl.Callback):
    """May log whatever it likes."""


def data_module(model: str, sets: bool = True, **kwargs: Any) -> PromptDataModule:
    rows = ArithmeticRows("train", size=8)
    return PromptDataModule(rows, model, {"easy": rows} if sets else None, batch_size=4, **kwargs)


def refusal(model: str, *, steps: int = 1, sets: bool = True, **case: Any) -> str:
    """The error of a GRPO run, as its type and message."""
    monitor, callbacks = case.get("monitor"), list(case.get("callbacks", []))
    if monitor is not None:
        callbacks.append(EarlyStopping(monitor))
    if "dirpath" in case:
        callbacks.append(ModelCheckpoint(case["dirpath"]))
    data = (
        SequenceDataModule(prompts(4), 4) if case.get("own_data") else data_module(model, sets, **case.get("data", {}))
    )
    module = {"engine": NeverStarted(), **case.get("module", {})}
    trainer = {"enable_checkpointing": True, "logger": False, **case.get("trainer", {})}
    try:
        fit_grpo(
            Path(model), {}, 1, steps=steps, module=module, callbacks=callbacks, trainer=trainer, data=data,
            ckpt_path=case.get("ckpt_path"),
        )  # fmt: skip
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("the run was not refused")


def refusals(model: str, cases: list[dict[str, Any]]) -> list[str]:
    return [refusal(model, **case) for case in cases]


def test_refused_before_anything_is_loaded(worker_pool, broken_model, qwen3_dir, tmp_path):
    (tmp_path / "file").write_text("not a directory")
    weights, full, narrow = tmp_path / "weights", tmp_path / "full", tmp_path / "narrow"
    options = {"max_steps": 1, "world_size": 1, "init_process_group": False}
    worker_pool.run(fit_arithmetic, qwen3_dir, {}, 1, checkpoints=weights, save_weights_only=True, **options)
    worker_pool.run(fit_arithmetic, qwen3_dir, {}, 1, checkpoints=full, **options)
    shutil.copytree(full / "step=1.ckpt", narrow)
    file = next((narrow / "sharded").iterdir())
    file.write_bytes(file.read_bytes()[:-1])
    grpo: dict[str, tuple[dict[str, Any], list[str]]] = {
        "typo in a set": ({"monitor": "val/esy/mean_at_1"}, ["ValueError", "did you mean val/easy/mean_at_1?"]),
        "no such metric": ({"monitor": "val/easy/pass_at_8"}, ["EarlyStopping(monitor='val/easy/pass_at_8')"]),
        "no sets": ({"monitor": "val/easy/mean_at_1", "sets": False}, ["no validation sets"]),
        "training": ({"monitor": "reward/mena"}, ["no such metric is logged; did you mean reward/mean?"]),
        "directory": ({"dirpath": tmp_path / "file" / "checkpoints"}, ["OSError", "ModelCheckpoint(dirpath)=", "file"]),
        "no checkpoint": ({"ckpt_path": tmp_path / "nowhere"}, ["FileNotFoundError", "does not exist"]),
        "weights only": ({"ckpt_path": weights / "step=1.ckpt"}, ["ValueError", "holds weights only"]),
        "damaged": ({"ckpt_path": narrow}, ["DamagedCheckpointError", "bytes where"]),
        "clipping": ({"trainer": {"gradient_clip_val": -1.0}}, ["trainer.gradient_clip_val=-1.0 must be at least 0"]),
        "interval": ({"trainer": {"log_every_n_steps": -1}}, ["trainer.log_every_n_steps=-1 must be at least 0"]),
    }
    messages = worker_pool.run(
        refusals, broken_model, [case for case, _ in grpo.values()], world_size=1, init_process_group=False
    )[0]
    for (name, (_, parts)), message in zip(grpo.items(), messages, strict=True):
        for part in parts:
            assert part in message, f"{name}: {message}"
    wide = save_tiny_model(tmp_path / "wide", "qwen3", hidden_size=128)
    cases = [{"ckpt_path": full / "step=1.ckpt"}, {"module": {"init_from": str(full / "step=1.ckpt")}}]
    for message in worker_pool.run(refusals, str(wide), cases, world_size=1, init_process_group=False)[0]:
        assert "is of another model: hidden_size 64 in the checkpoint, 128 in" in message, message


def test_prompts_are_checked_before_the_engine_starts(worker_pool, broken_model):
    """The replayed engine of `refusal` has no limit of its own: a real one, whose start would be an error."""
    from lightning_megatron_rl.rollout.vllm.engine import VLLMEngine

    limits = {"sampling": SamplingParams(max_tokens=10), "engine": VLLMEngine(max_model_len=14)}
    messages = worker_pool.run(
        refusals,
        broken_model,
        [
            {"module": limits},
            {"module": {**limits, "engine": VLLMEngine(max_model_len=12)}, "data": {"on_long_prompt": "drop"}},
        ],
        world_size=1,
        init_process_group=False,
    )[0]
    assert "ValueError: train row " in messages[0]
    assert "ArithmeticRows has 6 tokens: prompt + response (10 tokens) > engine.max_model_len (14)" in messages[0]
    assert "all 8 prompts of train are too long" in messages[1]


def test_a_metric_that_this_method_does_not_log_is_refused_after_the_first_step(worker_pool, qwen3_dir):
    module = {"engine": ReplayEngine()}
    cases = [{"monitor": "critic/loss", "module": module, "own_data": True, "steps": 3}]
    (message,) = worker_pool.run(refusals, str(qwen3_dir), cases, world_size=1, init_process_group=False)[0]
    assert "ValueError: EarlyStopping(monitor='critic/loss'): the first step did not log it; did you mean" in message


def test_metrics_of_users_own_are_left_to_them(worker_pool, qwen3_dir):
    """Lightning asks for them when it needs them, which is after the last of these steps."""
    callbacks = [UsersCallback(), ModelCheckpoint(monitor="mine", every_n_train_steps=9)]
    trainer = {"enable_checkpointing": True}
    (run,) = worker_pool.run(
        fit_grpo,
        qwen3_dir,
        {},
        1,
        steps=1,
        callbacks=callbacks,
        trainer=trainer,
        world_size=1,
        init_process_group=False,
    )
    assert len(run.steps) == 1


def test_names_of_nobody_are_refused_where_nobody_else_logs():
    trainer = pl.Trainer(accelerator="cpu", logger=False, callbacks=[EarlyStopping("val_loss")])
    module = SFTModule("model")
    with pytest.raises(ValueError, match=r"EarlyStopping\(monitor='val_loss'\): no such metric is logged"):
        check_monitors(trainer, module)
    trainer.callbacks.append(UsersCallback())
    check_monitors(trainer, module)


def test_known_names_are_the_documented_ones():
    listed = {f"{space}/{name}" for space, names in TRAINING.items() for name in names.split()}
    missing = set()
    for name in documented():
        space = name.partition("/")[0]
        if space not in ("val", "test", "time") and name not in listed:
            missing.add(name)
    assert missing == set()
    assert listed - {"time/<phase>_s"} <= documented()


def keep_by(model: Path, directory: Path, monitor: str) -> tuple[dict[str, float], list[float]]:
    """Scores of the checkpoints of an SFT run by their names, and what was logged after each step."""
    keeper = ModelCheckpoint(
        directory, "{step}", monitor=monitor, mode="max", save_top_k=2, every_n_train_steps=1,
        save_on_train_epoch_end=False,
    )  # fmt: skip
    run = fit_sft(model, {}, 1, steps=4, callbacks=[keeper], trainer={"enable_checkpointing": True})
    kept = {Path(path).name: float(score) for path, score in keeper.best_k_models.items()}
    return kept, [step[monitor] for step in run.steps]


def test_checkpoints_are_kept_by_the_gradient_norm_of_their_own_step(worker_pool, qwen3_dir, tmp_path):
    """Callbacks come before the module at a batch's end: what it logged there was that of the step before."""
    arguments = (keep_by, qwen3_dir, tmp_path, "policy/grad_norm")
    ((kept, logged),) = worker_pool.run(*arguments, world_size=1, init_process_group=False)
    best = sorted(enumerate(logged, start=1), key=lambda step: step[1])[-2:]
    assert kept == {f"step={step}.ckpt": norm for step, norm in best}


def keep_newest(model: Path, root: Path) -> list[list[str]]:
    """Names of the checkpoints of runs without a class of the user's own, which might log anything."""
    found = []
    for monitor in ("step", "epoch"):
        keeper = ModelCheckpoint(
            root / monitor, "{step}", monitor=monitor, mode="max", save_top_k=2, every_n_train_steps=1
        )
        trainer = make_trainer({}, 1, max_steps=4, limit_val_batches=0, enable_checkpointing=True, callbacks=[keeper])
        settings = TrainingSettings(max_tokens_per_microbatch=64)
        trainer.fit(SFTModule(str(model), train=settings), SequenceDataModule(frozen_sequences(16), 4))
        found.append(sorted(Path(path).name for path in keeper.best_k_models))
    return found


def test_counters_that_lightning_has_itself_may_be_monitored(worker_pool, qwen3_dir, tmp_path):
    """`ModelCheckpoint(monitor="step", mode="max", save_top_k=2)` is how the newest two are kept."""
    ((by_step, by_epoch),) = worker_pool.run(keep_newest, qwen3_dir, tmp_path, world_size=1, init_process_group=False)
    assert by_step == ["step=3.ckpt", "step=4.ckpt"]
    assert len(by_epoch) == 2
