"""A loss or gradient that is no number reaches no weight: the step is skipped or the run stops, with a name for it."""

import math
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_megatron_rl.checkpoints.manifest import read_manifest
from lightning_megatron_rl.modules.steps import WEIGHT_FIELD
from lightning_megatron_rl.strategy.nonfinite import NonFiniteError, UpdateTrace
from tests.modules.ppo_runs import fit_ppo
from tests.selection import by_default
from tests.strategy.test_megatron import LAYOUTS
from tests.training import Run, fit_sft, frozen_sequences

POISONED_STEP = 1


class PoisonsSample(pl.Callback):
    """Gives one sample of the second batch a token weight that is no number, on the last replica."""

    def __init__(self, weight: float = math.nan) -> None:
        self.weight = weight

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, index: int) -> None:
        for sequence in batch:
            sequence.fields[WEIGHT_FIELD] = torch.ones(len(sequence))
        shard = trainer.distributed_sampler_kwargs
        if index == POISONED_STEP and shard["rank"] == shard["num_replicas"] - 1:
            batch[1].origin = "the poisoned one"
            batch[1].fields[WEIGHT_FIELD][-2] = self.weight


class PoisonsGradient(pl.Callback):
    """Makes the last rank's gradients infinite before the second step."""

    def __init__(self) -> None:
        self.steps = 0

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
        if self.steps == POISONED_STEP and trainer.global_rank == trainer.world_size - 1:
            for parameter in module.model.parameters():
                parameter.main_grad.fill_(math.inf)
        self.steps += 1


class PoisonsLoss(pl.Callback):
    """Tells the second step that its loss is infinite, with gradients that are not: as of a term that is constant."""

    def __init__(self) -> None:
        self.steps = 0

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
        if self.steps == POISONED_STEP:
            optimizer.trace.loss = math.inf
        self.steps += 1


class KeepsWeights(pl.Callback):
    """Keeps this rank's weights after every step."""

    def __init__(self) -> None:
        self.weights: list[list[torch.Tensor]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        self.weights.append([parameter.detach().clone() for parameter in module.model.parameters()])


def fit_poisoned(
    model: Path,
    strategy: dict[str, Any],
    world_size: int,
    kind: str,
    root: Path,
    also: Sequence[pl.Callback] = (),
    **kwargs: Any,
) -> Run:
    """Three steps, the second of which is poisoned; `extra` says which steps moved the weights, or how it ended."""
    poison = {"gradient": PoisonsGradient, "sample": PoisonsSample, "loss": PoisonsLoss}[kind]()
    keeper = KeepsWeights()
    try:
        run = fit_sft(
            model,
            strategy,
            world_size,
            steps=3,
            callbacks=[poison, keeper, *also],
            trainer={"default_root_dir": root, **kwargs},
        )
    except NonFiniteError as error:
        run = Run([], {}, {"error": str(error)})
    pairs = zip(keeper.weights, keeper.weights[1:], strict=False)
    run.extra["moved"] = [not all(map(torch.equal, before, after)) for before, after in pairs]
    return run


def on(pool: Any, layout: str, model: Path, kind: str, root: Path, mode: str, **kwargs: Any) -> list[Run]:
    world_size, strategy = LAYOUTS[layout]
    return pool.run(
        fit_poisoned,
        model,
        {**strategy, "on_nonfinite": mode},
        world_size,
        kind,
        root,
        world_size=world_size,
        init_process_group=False,
        **kwargs,
    )


LAYOUT_NAMES = ("dp2", "dp2_plain", "tp2_sp", "pp2", "cp2", "pp2_vpp2")


@pytest.mark.parametrize("layout", by_default(["dp2", "pp2"], LAYOUT_NAMES))
@pytest.mark.parametrize("kind", ["sample", "gradient"])
def test_a_step_is_skipped_on_every_rank(worker_pool, qwen3_dir, tmp_path, layout, kind):
    """Weights stay as they are, the step is counted, the next one is taken.

    Fails with Megatron's own step: its clipping lets a norm that is no number pass, and every weight is lost.
    """
    runs = on(worker_pool, layout, qwen3_dir, kind, tmp_path, "skip", gradient_clip_val=1.0)
    for run in runs:
        assert [step["policy/step_skipped"] for step in run.steps] == [0.0, 1.0, 0.0]
        assert math.isfinite(run.steps[1]["policy/grad_norm"]) is False
        assert math.isfinite(run.steps[1]["policy/loss"]) is (kind == "gradient")
        assert math.isfinite(run.steps[2]["policy/loss"])
        assert run.extra["moved"] == [False, True], "steps 2 and 3"
        assert all(weight.isfinite().all() for weight in run.weights.values())


@pytest.mark.parametrize("layout", by_default(["dp2", "pp2"], LAYOUT_NAMES))
def test_the_run_stops_on_every_rank_and_names_the_sample(worker_pool, qwen3_dir, tmp_path, layout):
    """The same error everywhere; the batch and the weights before the step are kept, and nothing hangs."""
    runs = on(worker_pool, layout, qwen3_dir, "sample", tmp_path, "stop")
    (message,) = {run.extra["error"] for run in runs}
    assert "policy/loss=nan at global_step 1: the optimizer step was not taken" in message
    found = message.partition("Samples whose loss is not finite: ")[2].partition(".")[0]
    ranks = {text.partition(":")[0] for text in found.split("; ")}
    assert "the poisoned one" in found
    assert all(text.endswith(": the poisoned one") for text in found.split("; "))
    if layout == "pp2":
        assert ranks == {"rank 1"}, "the last stage has the loss"
    assert "decoder.layers.0" in message or "embedding" in message
    directory = tmp_path / "nonfinite-step=1"
    assert str(directory) in message
    assert read_manifest(directory / "weights.ckpt")["has_optimizer"] is False
    kept = [torch.load(directory / "batch" / f"{rank}.pt") for rank in range(2)]
    bad = [sample for part in kept for sample in part["samples"] if sample["origin"] == "the poisoned one"]
    sequence = frozen_sequences(12)[7]  # of the second batch of four, the last replica's second
    assert bad
    if layout == "dp2":
        assert torch.equal(bad[0]["token_ids"], sequence.token_ids)
    assert all(part["bad_parameters"] for part in kept)


def test_a_loss_alone_is_enough(worker_pool, qwen3_dir, tmp_path):
    for run in on(worker_pool, "dp2", qwen3_dir, "loss", tmp_path, "skip"):
        assert [step["policy/step_skipped"] for step in run.steps] == [0.0, 1.0, 0.0]
        assert math.isfinite(run.steps[1]["policy/grad_norm"])
        assert run.extra["moved"] == [False, True]


class LeavesRoomForTheBatch(pl.Callback):
    """Lets this process write no large file from the poisoned step on: the batch is small, the weights are not."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, index: int) -> None:
        if index == POISONED_STEP:
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))


def fit_without_room(*arguments: Any) -> Run:
    """Two steps, the second poisoned, on a disk that is full from there on."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        return fit_poisoned(*arguments, also=[LeavesRoomForTheBatch()])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_the_report_does_not_need_what_it_keeps(worker_pool, qwen3_dir, tmp_path):
    """It is raised also where nothing can be written, or the weights cannot; nothing half stays."""
    file = tmp_path / "file"
    file.write_text("not a directory")
    (message,) = {run.extra["error"] for run in on(worker_pool, "dp2", qwen3_dir, "sample", file, "stop")}
    assert ": the poisoned one." in message
    assert f"The batch was not kept: [Errno 20] Not a directory: '{file}/nonfinite-step=1" in message
    assert f"The weights were not kept: rank 0 cannot write the checkpoint {file}/nonfinite-step=1" in message
    assert file.read_text() == "not a directory"


def test_what_can_be_kept_of_the_report_is_kept(worker_pool, qwen3_dir, tmp_path):
    """The batch without the weights, or no batch of one rank only."""
    world_size, strategy = LAYOUTS["dp2"]
    arguments = (qwen3_dir, {**strategy, "on_nonfinite": "stop"}, world_size, "sample", tmp_path / "full")
    runs = worker_pool.run(fit_without_room, *arguments, world_size=world_size, init_process_group=False)
    (message,) = {run.extra["error"] for run in runs}
    assert f"The batch is in {tmp_path / 'full' / 'nonfinite-step=1' / 'batch'}. The weights were not kept: " in message
    assert "cannot write the checkpoint" in message
    left = tmp_path / "full" / "nonfinite-step=1"
    assert sorted(str(path.relative_to(left)) for path in left.rglob("*")) == ["batch", "batch/0.pt", "batch/1.pt"]
    half = tmp_path / "half" / "nonfinite-step=1"
    (half / "batch" / "1.pt").mkdir(parents=True)  # in the way of the second rank
    (message,) = {run.extra["error"] for run in on(worker_pool, "dp2", qwen3_dir, "sample", tmp_path / "half", "stop")}
    assert ": the poisoned one." in message
    assert "The batch was not kept: " in message
    assert f"The weights are in {half / 'weights.ckpt'} (init_from reads them)." in message
    assert [path.name for path in half.iterdir()] == ["weights.ckpt"]


def test_gradients_alone_stop_the_run_too(worker_pool, qwen3_dir, tmp_path):
    runs = on(worker_pool, "dp2", qwen3_dir, "gradient", tmp_path, "stop")
    (message,) = {run.extra["error"] for run in runs}
    assert "gradient norm inf and policy/loss=" in message
    assert "none, it came up in the backward pass" in message
    assert "rank 1: " in message
    assert "rank 0: " not in message


class PoisonsCritic(pl.Callback):
    """Gives the critic a value head of infinite weights for the second rollout."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, index: int) -> None:
        module.value_loss.value_clip = math.nan if index == POISONED_STEP else None


def fit_poisoned_critic(model: Path, world_size: int) -> Run:
    """Two rollouts of PPO, in the second of which the critic's loss is no number."""
    return fit_ppo(model, {"on_nonfinite": "skip"}, world_size, callbacks=[PoisonsCritic()])


def test_the_critics_step_is_guarded_too(worker_pool, qwen3_dir):
    run = worker_pool.run(fit_poisoned_critic, qwen3_dir, 1, world_size=1, init_process_group=False)[0]
    assert [step["critic/step_skipped"] for step in run.steps] == [0.0, 2.0]
    assert [step["policy/step_skipped"] for step in run.steps] == [0.0, 0.0]
    assert run.extra["moved"] == [True, True], "the actor goes on"
    assert all(weight.isfinite().all() for weight in run.extra["critic"].values())


def test_samples_are_found_by_their_tokens():
    losses = torch.tensor([[0.1, math.nan, 0.3, math.inf], [0.0, 0.0, 0.0, 0.0]])
    index = torch.tensor([[0, 1, 1, 2], [3, 3, -1, -1]])
    samples = [{"origin": f"row {number}"} for number in range(4)]
    trace = UpdateTrace([], "policy/loss", math.nan, samples, [(losses, index)])
    assert trace.bad_samples() == ["row 1", "row 2"]
    assert not trace.loss_is_finite
