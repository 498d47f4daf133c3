"""A step is taken with the gradients of its own batch or not at all, and hooks see them where stock Lightning's do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import grad_norm

from lightning_megatron_rl.modules.sft import token_nll
from tests.lightning_runs import OurModule, Sequences, StockModule, fit_both
from tests.strategy.test_megatron import RELATIVE
from tests.training import SequenceDataModule, frozen_sequences, make_trainer

# ---- steps without gradients of their own ----------------------------------------------------------------------------


class NoneBefore(OurModule):
    """Skips the second batch before its gradients are computed."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


class NoneAfter(OurModule):
    """Skips the second batch when its gradients are there already."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


class ZeroedAfter(OurModule):
    """Zeroes the second batch's gradients itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            self.optimizers().zero_grad()
        return loss


class ZeroesByItself(OurModule):
    """The usual override for speed in stock Lightning."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=True)


class StockNone(StockModule):
    """As `NoneBefore` and `NoneAfter`."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


def skipping_runs(model: Path) -> dict[str, Any]:
    """Final weights and counters of runs that skip the second of three batches, and of one that skips none."""
    found: dict[str, Any] = {}
    for kind in (NoneBefore, NoneAfter, ZeroedAfter, ZeroesByItself, OurModule):
        module = kind(model)
        norms: list[float] = []

        class Norms(pl.Callback):
            def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
                norms.append(trainer.strategy.optimizers[0].grad_norm)  # noqa: B023

        trainer = make_trainer({"use_distributed_optimizer": False}, 1, max_steps=3, callbacks=[Norms()])
        trainer.fit(module, Sequences())
        found[kind.__name__] = {"weights": module.weights(), "norms": norms, "step": trainer.global_step}
        found[kind.__name__]["rate"] = trainer.strategy.optimizers[0].param_groups[0]["lr"]
    from tests.lightning_runs import StockSequences, stock_trainer

    stock = StockNone(model)
    trainer = stock_trainer(max_steps=3)
    trainer.fit(stock, StockSequences())
    found["stock"] = {"weights": stock.weights(), "step": trainer.global_step}
    found["stock"]["rate"] = trainer.optimizers[0].param_groups[0]["lr"]
    return found


@pytest.fixture(scope="module")
def skipping(worker_pool, qwen3_dir) -> dict[str, Any]:
    return worker_pool.run(skipping_runs, qwen3_dir, world_size=1, init_process_group=False)[0]


@pytest.mark.parametrize("kind", ["NoneBefore", "NoneAfter", "ZeroedAfter"])
def test_skipped_step_leaves_weights_as_stock_lightning_does(skipping, kind):
    """Weights, `global_step` and the schedule are those of stock Lightning on the same batches.

    Fails when the step is taken with the previous batch's gradients, or with those that are there.
    """
    mine, stock = skipping[kind], skipping["stock"]
    assert mine["step"] == stock["step"] == 3
    assert mine["rate"] == pytest.approx(stock["rate"])
    assert mine["norms"][1] == 0
    assert min(mine["norms"][0], mine["norms"][2]) > 1
    for name, weight in mine["weights"].items():  # fp32 sums in another order; a step moves weights by up to 1e-1
        torch.testing.assert_close(weight, stock["weights"][name], rtol=0, atol=2e-6)
    moved = max(
        (weight - skipping["OurModule"]["weights"][name]).abs().max() for name, weight in mine["weights"].items()
    )
    assert moved > 1e-3, "a skipped step is nothing like one that is taken"


def test_zeroing_by_lightning_changes_nothing(skipping):
    """Lightning zeroes between `training_step` and `backward`, when Megatron's gradients are there already."""
    mine, plain = skipping["ZeroesByItself"], skipping["OurModule"]
    assert mine["norms"] == plain["norms"]
    for name, weight in mine["weights"].items():
        assert torch.equal(weight, plain["weights"][name])


class StepsTwice(OurModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.optimizers().step()
        return loss


class StepsTwiceItself(OurModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        self.optimizers().step()
        self.optimizers().step()


class ComputesNothing(OurModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if batch_idx == 0 else torch.tensor(1.0)


class CatchesFailure(OurModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 0:
            return super().training_step(batch, batch_idx)
        count = 0

        def fails(*args: Any) -> Any:
            nonlocal count
            count += 1
            if count == 2:  # of several micro-batches: the first one's gradients are in the buffers
                raise ArithmeticError
            return -args[1]

        try:
            self.update(batch, fails)
        except ArithmeticError:
            assert count == 2
        return torch.tensor(1.0)


class ReturnsGraph(OurModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss + 0 * sum(parameter.sum() for parameter in self.model.parameters())


class ScalesLoss(OurModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (0.5 if batch_idx else 1.0)


class AddsToLoss(OurModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss + 1e-3}


class ReturnsLossOfUpdates(OurModule):
    """In another format, rounded as a mean over ranks is, and that of a second update."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx < 2:
            return {"loss": loss.double() * (1 + 1e-7)} if batch_idx else loss[None]
        self.optimizers().step()
        return torch.tensor(self.update(batch, token_nll)["policy/loss"])


class AveragesLoss(OurModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.tensor(self.update(batch, lambda part, logprobs, *_: -logprobs[part.mask].mean())["policy/loss"])


class FreezesLater(OurModule):
    def on_train_start(self) -> None:
        next(self.model.parameters()).requires_grad_(False)


class AccumulatesLater(OurModule):
    def on_train_epoch_start(self) -> None:
        self.trainer.accumulate_grad_batches = 2


class ManualLater(OurModule):
    def on_train_start(self) -> None:
        self.automatic_optimization = False


class OwnBackward(OurModule):
    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        loss.backward(retain_graph=True)


class RemovesOneGradient(OurModule):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        next(self.model.parameters()).grad = None


class StepsForeignChunks(OurModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.tensor(self.update(batch, lambda *a: a, list(self.build_chunks()))["policy/loss"])


REFUSED = {
    StepsTwice: ["RuntimeError", "an optimizer step without new gradients", "self.update("],
    StepsTwiceItself: ["RuntimeError", "an optimizer step without new gradients"],
    ComputesNothing: ["RuntimeError", "an optimizer step without new gradients", "return None from training_step"],
    CatchesFailure: ["RuntimeError", "an optimizer step without new gradients"],
    ReturnsGraph: ["ValueError", "autograd graph", "loss.detach()"],
    ScalesLoss: ["ValueError", "training_step returned a loss of", "the update's is", "loss per token"],
    AddsToLoss: ["ValueError", "training_step returned a loss of", "on_before_optimizer_step"],
    ReturnsLossOfUpdates: ["not refused"],
    AveragesLoss: ["ValueError", "returned losses of shape [] for tokens of shape [", "averaged later"],
    FreezesLater: ["RuntimeError", "requires_grad", "configure_model"],
    AccumulatesLater: ["ValueError", "accumulate_grad_batches=2", "Raise the data module's batch_size"],
    ManualLater: ["ValueError", "ManualLater.automatic_optimization=False"],
    OwnBackward: ["ValueError", "OwnBackward.backward would never be called", "on_before_optimizer_step"],
    RemovesOneGradient: ["RuntimeError", "removed the gradients of 1 of", "grad.zero_()"],
    StepsForeignChunks: ["ValueError", "chunks that no optimizer steps", "strategy.build_optimizer"],
}


def refusals(model: Path) -> list[str]:
    messages = []
    for kind in REFUSED:
        trainer = make_trainer({"use_distributed_optimizer": False}, 1, max_steps=3)
        try:
            trainer.fit(kind(model), Sequences())
            messages.append("not refused")
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def test_steps_without_new_gradients_are_refused(worker_pool, qwen3_dir):
    """Each by name; none takes a step on what an earlier batch, or half a pass, left in Megatron's buffers."""
    (messages,) = worker_pool.run(refusals, qwen3_dir, world_size=1, init_process_group=False)
    for message, parts in zip(messages, REFUSED.values(), strict=True):
        for part in parts:
            assert part in message


# ---- gradients that hooks see ----------------------------------------------------------------------------------------


class SeesNorms(pl.Callback):
    """Lightning's own recipe for gradient norms."""

    def __init__(self) -> None:
        self.seen: dict[str, list[float]] = {"on_after_backward": [], "on_before_optimizer_step": []}

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.seen["on_after_backward"].append(float(grad_norm(pl_module, 2)["grad_2.0_norm_total"]))

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self.seen["on_before_optimizer_step"].append(float(grad_norm(pl_module, 2)["grad_2.0_norm_total"]))


def test_grad_norm_is_that_of_stock_lightning(worker_pool, qwen3_dir):
    """`lightning.pytorch.utilities.grad_norm` in both hooks; fails where gradients are in `main_grad` only."""
    stock, mine = worker_pool.run(fit_both, qwen3_dir, SeesNorms, world_size=1, init_process_group=False)[0]
    for hook, norms in stock.seen.items():
        assert len(norms) == 3
        # fp32 sums in another order over three steps
        assert mine.seen[hook] == pytest.approx(norms, rel=1e-4)


def change(how: str) -> Callable[[pl.LightningModule], None]:
    def halve(module: pl.LightningModule) -> None:
        for parameter in module.parameters():
            parameter.grad.mul_(0.5)

    def replace(module: pl.LightningModule) -> None:
        for parameter in module.parameters():
            parameter.grad = parameter.grad * 0.5

    def remove(module: pl.LightningModule) -> None:
        module.zero_grad()

    def clip(module: pl.LightningModule) -> None:
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)

    return {"halve": halve, "replace": replace, "remove": remove, "clip": clip}[how]


class ChangesGradients(pl.Callback):
    def __init__(self, how: str) -> None:
        self.how = how

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        change(self.how)(pl_module)


@pytest.mark.parametrize("how", ["halve", "replace", "remove", "clip"])
def test_changes_of_hooks_are_stepped(worker_pool, qwen3_dir, how):
    """In place, by another tensor, by removing all, by torch's own clipping: weights are those of stock Lightning."""
    stock, mine = worker_pool.run(fit_both, qwen3_dir, ChangesGradients, how, world_size=1, init_process_group=False)[0]
    for name, weight in mine.weights.items():
        torch.testing.assert_close(weight, stock.weights[name], rtol=0, atol=2e-6)


class ClipsItself:
    """`configure_gradient_clipping` of a user's: a threshold in the first and the third step, none in the second."""

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        if self.trainer.global_step != 1:
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


class ClipsNothing:
    """Leaves the Trainer's threshold aside."""

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        """Nothing."""


@pytest.mark.parametrize(("mixin", "threshold"), [(ClipsItself, None), (ClipsNothing, 0.02)])
def test_configure_gradient_clipping_is_the_users(worker_pool, qwen3_dir, mixin, threshold):
    """Fails when Megatron clips by the Trainer's value although the hook does not, or keeps an earlier threshold."""
    options = {"world_size": 1, "init_process_group": False, "mixin": mixin, "gradient_clip_val": threshold}
    stock, mine = worker_pool.run(fit_both, qwen3_dir, **options)[0]
    for name, weight in mine.weights.items():
        torch.testing.assert_close(weight, stock.weights[name], rtol=0, atol=2e-6)


class WholeGradients(pl.Callback):
    """Norm of `.grad`, the norm that Megatron computes, and dtypes."""

    def __init__(self) -> None:
        self.norms: list[tuple[float, float]] = []
        self.found: list[torch.Tensor] = []
        self.dtypes: set[str] = set()

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        self.found.append(torch.cat([parameter.grad.flatten().float() for parameter in pl_module.parameters()]))
        self.dtypes |= {str(parameter.grad.dtype) for parameter in pl_module.parameters()}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self.norms.append((float(self.found[-1].norm()), trainer.strategy.optimizers[0].grad_norm))
        assert all(parameter.grad is None for parameter in pl_module.parameters())


def fit_whole(model: Path, strategy: dict[str, Any], world_size: int, **options: Any) -> dict[str, Any]:
    from megatron.core.optimizer import OptimizerConfig

    from lightning_megatron_rl.modules.sft import SFTModule
    from lightning_megatron_rl.modules.training import TrainingSettings

    seen = WholeGradients()
    module = SFTModule(
        str(model),
        train=TrainingSettings(
            optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.0, adam_eps=1e-3), max_tokens_per_microbatch=64
        ),
    )
    trainer = make_trainer(strategy, world_size, max_steps=2, callbacks=[seen], **options)
    trainer.fit(module, SequenceDataModule(frozen_sequences(8), 4))
    return {"norms": seen.norms, "grads": seen.found, "dtypes": seen.dtypes}


def test_distributed_optimizer_shows_whole_gradients(worker_pool, qwen3_dir):
    """With two replicas each has the reduced gradients of its shard only: hooks see all, the same on both.

    Fails when the rest of the buffer, this replica's own part of the sum, is taken for the gradient.
    """
    runs = worker_pool.run(fit_whole, qwen3_dir, {}, 2, world_size=2, init_process_group=False)
    (single,) = worker_pool.run(fit_whole, qwen3_dir, {}, 1, world_size=1, init_process_group=False)
    for run in runs:
        for shown, computed in run["norms"]:
            assert shown == pytest.approx(computed, rel=RELATIVE)
        for mine, theirs in zip(run["grads"], single["grads"], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)  # fp32 sums of another order


def test_bf16_parameters_show_fp32_gradients(worker_pool, qwen3_dir):
    """The norm of what hooks see is the one that Megatron clips by."""
    (run,) = worker_pool.run(
        fit_whole, qwen3_dir, {}, 1, world_size=1, init_process_group=False, precision="bf16-mixed"
    )
    assert run["dtypes"] == {"torch.float32"}
    for shown, computed in run["norms"]:
        assert shown == pytest.approx(computed, rel=RELATIVE)
