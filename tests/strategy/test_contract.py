"""What a Lightning user may rely on holds under this strategy; what cannot hold is refused with a way out."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lightning_megatron_rl.data.loader import EvaluationLoader, GlobalBatches
from lightning_megatron_rl.modules.sft import SFTModule
from lightning_megatron_rl.modules.training import TrainingSettings
from tests.strategy.test_megatron import LAYOUTS, RELATIVE
from tests.training import Recorder, Run, SequenceDataModule, fit_sft, frozen_sequences, make_trainer

LR = 0.5
SGD = {"optimizer": "sgd", "lr": LR, "sgd_momentum": 0.0, "weight_decay": 0.0}


def fit_each(model: Path, strategy: dict[str, Any], world_size: int, variants: list[dict[str, Any]]) -> list[Run]:
    """Several fits in one job."""
    return [fit_sft(model, strategy, world_size, **variant) for variant in variants]


SGD_STRATEGY = {"use_distributed_optimizer": False}  # Megatron does not shard SGD


def on(pool: Any, function: Any, *args: Any, layout: str = "dp2", **kwargs: Any) -> list[Any]:
    """Run `function(*args)` on the ranks of `layout`; it gets the strategy's arguments and the world size as well."""
    world_size, strategy = LAYOUTS[layout] if layout != "one" else (1, {})
    strategy = {**strategy, **kwargs.pop("strategy", {})}
    return pool.run(function, *args, strategy, world_size, world_size=world_size, init_process_group=False, **kwargs)


def test_schedule_and_clipping_are_lightnings(worker_pool, qwen3_dir):
    """The learning rate of each step is the closed form of `LinearLR`; clipped SGD moves by exactly c/norm as far.

    Fails when the scheduler writes into other parameter groups than Megatron reads, and when the threshold does not
    reach Megatron's optimizer.
    """
    from safetensors.torch import load_file

    clip, factor, iterations = 0.1, 0.25, 3
    scheduled = {
        "lr_scheduler": partial(torch.optim.lr_scheduler.LinearLR, start_factor=factor, total_iters=iterations)
    }
    schedules = on(worker_pool, fit_each, qwen3_dir, variants=[{"steps": 5, "module": scheduled}])
    variants = [{"optimizer": SGD}, {"optimizer": SGD, "trainer": {"gradient_clip_val": clip}}]
    steps = on(
        worker_pool,
        fit_each,
        qwen3_dir,
        variants=[{"steps": 1, **variant} for variant in variants],
        strategy=SGD_STRATEGY,
    )
    for ranks in (schedules, steps):
        assert [run.steps for run in ranks[1]] == [run.steps for run in ranks[0]], "ranks logged different values"
    (schedule,), (free, clipped) = schedules[0], steps[0]
    expected = [1e-3 * (factor + (1 - factor) * min(step, iterations) / iterations) for step in range(5)]
    assert [step["policy/lr"] for step in schedule.steps] == pytest.approx(expected)

    norm = free.steps[0]["policy/grad_norm"]
    assert clipped.steps[0]["policy/grad_norm"] == pytest.approx(norm), "the logged norm is the one before clipping"
    before = load_file(qwen3_dir / "model.safetensors")
    gradients = {name: (before[name] - weight) / LR for name, weight in free.weights.items()}
    total = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    # differences of fp32 weights of size 1: relative rounding error of some 1e-7 over steps of some 1e-2
    assert total == pytest.approx(norm, rel=1e-4)
    for name, gradient in gradients.items():
        expected_weight = before[name] - LR * gradient * clip / norm
        torch.testing.assert_close(clipped.weights[name], expected_weight, rtol=0, atol=1e-6)


class HookOrder(pl.Callback):
    """Notes the hooks of the first step, and the norm of the gradients that a callback sees before the step."""

    def __init__(self) -> None:
        self.hooks: list[str] = []
        self.norm = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self.hooks.append("train_batch_start")

    def on_before_zero_grad(self, *_: Any) -> None:
        self.hooks.append("before_zero_grad")

    def on_before_backward(self, *_: Any) -> None:
        self.hooks.append("before_backward")

    def on_after_backward(self, *_: Any) -> None:
        self.hooks.append("after_backward")

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self.hooks.append("before_optimizer_step")
        self.norm = torch.stack([parameter.main_grad.norm() for parameter in module.parameters()]).norm().item()

    def on_train_batch_end(self, *_: Any) -> None:
        self.hooks.append("train_batch_end")


def fit_observed(model: Path, strategy: dict[str, Any], world_size: int) -> dict[str, Any]:
    """One step under a profiler and a callback that watches the hooks."""
    order, recorder = HookOrder(), Recorder()
    trainer = make_trainer(strategy, world_size, max_steps=1, profiler="simple", callbacks=[order, recorder])
    trainer.fit(SFTModule(str(model)), SequenceDataModule(frozen_sequences(4), 4))
    regions = set(trainer.profiler.recorded_durations)
    return {"hooks": order.hooks, "norm": order.norm, "step": recorder.steps[0], "regions": regions}


def test_hooks_come_in_lightnings_order_and_see_gradients(worker_pool, qwen3_dir):
    """Fails when gradients are zeroed after `training_step`, as Lightning does on its own."""
    (seen,) = on(worker_pool, fit_observed, qwen3_dir, layout="one")
    assert seen["hooks"] == [
        "train_batch_start",
        "before_zero_grad",
        "before_backward",
        "after_backward",
        "before_optimizer_step",
        "train_batch_end",
    ]
    assert seen["norm"] == pytest.approx(seen["step"]["policy/grad_norm"], rel=RELATIVE)
    assert "[SFTModule]update" in seen["regions"]
    assert seen["step"]["time/update_s"] > 0


class UnevenDataModule(SequenceDataModule):
    """Five sequences in batches of four: with two replicas the last batch of the second one is empty."""

    def val_dataloader(self) -> Any:
        sequences = frozen_sequences(5, seed=1)
        return EvaluationLoader(sequences, GlobalBatches(5, 4, **self.trainer.distributed_sampler_kwargs))

    def test_dataloader(self) -> Any:
        return self.val_dataloader()

    def predict_dataloader(self) -> Any:
        return self.val_dataloader()


def evaluate_and_fit_twice(model: Path, strategy: dict[str, Any], world_size: int) -> dict[str, Any]:
    """Use one module in every entry point of the Trainer, each with a Trainer of its own."""
    from megatron.core.optimizer import OptimizerConfig

    policy = SFTModule(
        str(model), train=TrainingSettings(optimizer=OptimizerConfig(**SGD), max_tokens_per_microbatch=64)
    )
    sequences = frozen_sequences(8)

    def trainer() -> pl.Trainer:
        return make_trainer(strategy, world_size)

    found: dict[str, Any] = {}
    found["fresh"] = trainer().validate(policy, UnevenDataModule(sequences, 4), verbose=False)[0]
    found["test"] = trainer().test(policy, UnevenDataModule(sequences, 4), verbose=False)[0]
    scores = trainer().predict(policy, UnevenDataModule(sequences, 4))
    found["logprobs"] = [logprobs for batch in scores for logprobs in batch.logprobs]
    for part in (sequences[:4], sequences[4:]):
        runner = make_trainer(strategy, world_size, max_steps=1, limit_val_batches=0)
        runner.fit(policy, SequenceDataModule(part, 4))
    found["weights"] = {name: tensor.clone() for name, tensor in policy.export_weights()}
    found["trained"] = trainer().validate(policy, UnevenDataModule(sequences, 4), verbose=False)[0]
    return found


@pytest.mark.parametrize("layout", ["dp2", pytest.param("pp2", marks=pytest.mark.slow)])
def test_every_entry_point_with_one_module(worker_pool, qwen3_dir, layout):
    """`validate`, `test`, `predict`, two fits and `validate` again give what one process gives.

    Fails when a replica without sequences stays out of the collectives, and when sums are not those of all replicas.
    """
    (single,) = on(worker_pool, evaluate_and_fit_twice, qwen3_dir, layout="one", strategy=SGD_STRATEGY)
    (whole,) = on(
        worker_pool, fit_each, qwen3_dir, layout="one", strategy=SGD_STRATEGY, variants=[{"steps": 2, "optimizer": SGD}]
    )
    split = on(worker_pool, evaluate_and_fit_twice, qwen3_dir, layout=layout, strategy=SGD_STRATEGY)
    assert single["fresh"]["val/loss"] == single["test"]["test/loss"]
    assert single["trained"]["val/loss"] != pytest.approx(single["fresh"]["val/loss"], rel=RELATIVE)
    for name, weight in whole[0].weights.items():
        torch.testing.assert_close(single["weights"][name], weight, rtol=RELATIVE, atol=1e-6)
    for mine in split:
        for stage in ("fresh", "test", "trained"):
            assert mine[stage] == pytest.approx(single[stage], rel=RELATIVE)
        assert [mine[stage] for stage in ("fresh", "trained")] == [split[0][stage] for stage in ("fresh", "trained")]
    if layout == "dp2":  # rank 0 has sequences 0, 2 and 4, rank 1 has 1 and 3
        together = [split[index % 2]["logprobs"][index // 2] for index in range(5)]
        assert [len(mine["logprobs"]) for mine in split] == [3, 2]
    else:
        together = split[0]["logprobs"]
    for mine, theirs in zip(together, single["logprobs"], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)  # fp32 log-probs of size 5, other summation order


def fit_monitored(model: Path, directory: Path, save_last: Any, strategy: dict[str, Any], world_size: int) -> Any:
    """Validate after each step, keep the two best checkpoints, stop when the loss no longer grows."""
    stopping = EarlyStopping(monitor="val/loss", mode="max", patience=3)
    keeper = ModelCheckpoint(
        directory,
        "{step}",
        monitor="val/loss",
        mode="max",
        save_top_k=2,
        save_last=save_last,
        save_on_train_epoch_end=False,
    )
    trainer = make_trainer(
        strategy,
        world_size,
        max_steps=8,
        val_check_interval=1,
        check_val_every_n_epoch=None,
        enable_checkpointing=True,
        callbacks=[stopping, keeper],
    )
    policy = SFTModule(str(model), train=TrainingSettings(_adam(), max_tokens_per_microbatch=64))
    trainer.fit(policy, UnevenDataModule(frozen_sequences(32), 4))
    best = trainer.validate(policy, UnevenDataModule(frozen_sequences(4), 4), ckpt_path="best", verbose=False)[0]
    return {
        "step": trainer.global_step,
        "best": keeper.best_model_path,
        "best_score": float(keeper.best_model_score),
        "kept": {path: float(score) for path, score in keeper.best_k_models.items()},
        "best_again": best["val/loss"],
        "directory": sorted(path.name for path in directory.iterdir()),
        "last_is_link": (directory / "last.ckpt").is_symlink(),
    }


def _adam() -> Any:
    from megatron.core.optimizer import OptimizerConfig

    return OptimizerConfig(lr=1e-3, weight_decay=0.0, adam_eps=1e-3)


@pytest.mark.parametrize(("layout", "save_last"), [("dp2", True), ("pp2", "link")])
def test_early_stopping_and_checkpoints_by_a_metric(worker_pool, qwen3_dir, tmp_path, layout, save_last):
    """All ranks stop at the same step and keep the same directories; older ones are deleted.

    Fails when ranks log different values of the monitored metric.
    """
    facts = on(worker_pool, fit_monitored, qwen3_dir, tmp_path, save_last, layout=layout)
    assert facts[0] == facts[1]
    mine = facts[0]
    # the loss only falls: the first validation is the best of "max", and three more end the patience
    assert mine["step"] == 4
    assert mine["directory"] == ["last.ckpt", "step=1.ckpt", "step=2.ckpt"]
    assert mine["last_is_link"] is (save_last == "link")
    assert Path(mine["best"]).name == "step=1.ckpt"
    assert mine["best_score"] == max(mine["kept"].values())
    assert mine["best_again"] == pytest.approx(mine["best_score"], rel=1e-6)  # the same weights, fp32


def evaluation_modes(model: Path, world_size: int) -> list[bool]:
    """Whether each loop that evaluates does so in inference mode, under the Trainer's defaults."""
    trainer = make_trainer({}, world_size, max_steps=1)
    trainer.fit(
        SFTModule(str(model), train=TrainingSettings(max_tokens_per_microbatch=64)),
        SequenceDataModule(frozen_sequences(4), 4),
    )
    loops = (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    return [loop.inference_mode for loop in loops]


def test_evaluation_leaves_no_inference_tensors(worker_pool, qwen3_dir):
    """Lightning's default is inference mode, which under NCCL it uses (under gloo it never does)."""
    (modes,) = worker_pool.run(evaluation_modes, qwen3_dir, 1, world_size=1, init_process_group=False)
    assert modes == [False] * 4
