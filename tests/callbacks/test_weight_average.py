"""Averages of the weights: the closed form on every layout, Lightning's own callbacks, checkpoints, exports, GRPO."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.callbacks import WeightAveraging as StockAveraging
from torch import Tensor

from lightning_megatron_rl.callbacks.hf_export import HFExport
from lightning_megatron_rl.callbacks.weight_average import WeightAverage
from lightning_megatron_rl.callbacks.weight_sync import WeightSync
from lightning_megatron_rl.modules.reference import ReferenceSettings
from tests.checkpoints.test_keeping import shards
from tests.lightning_runs import StockModule, trainers
from tests.modules.runs import fit_grpo, prompts
from tests.selection import by_default
from tests.strategy.test_megatron import LAYOUTS, RELATIVE
from tests.training import Run, SequenceDataModule, fit_arithmetic, fit_sft

DECAY = 0.6
STEPS = 4


def closed_form(weights: list[Tensor], decay: float | None = DECAY) -> Tensor:
    """The average after the last of `weights`, in fp64: the first one, then decay and what is new."""
    average = weights[0].double()
    for count, new in enumerate(weights[1:], 1):
        share = 1 / (count + 1) if decay is None else 1 - decay
        average = average + share * (new.double() - average)
    return average


# ---- Lightning's own -------------------------------------------------------------------------------------------------


class EqualAveraging(StockAveraging):
    """Lightning's default: the equal average."""


CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {  # Lightning's class, its arguments, ours
    "ema": (EMAWeightAveraging, {"decay": DECAY}, {"decay": DECAY}),
    "late": (
        EMAWeightAveraging,
        {"decay": 0.9, "update_every_n_steps": 2, "update_starting_at_step": 1},
        {"decay": 0.9, "update_every_n_steps": 2, "update_starting_at_step": 1},
    ),
    "equal": (EqualAveraging, {}, {"decay": None}),
}


def averaged_both(model: Path) -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Weights after the fit, under stock Lightning and under MegatronStrategy."""
    found = {}
    for name, (stock, stock_options, options) in CASES.items():
        weights = []
        for make, kind, data in trainers():
            callback = stock(**stock_options) if kind is StockModule else WeightAverage(**options)
            module = kind(model)
            make(max_steps=STEPS, callbacks=[callback], limit_val_batches=0).fit(module, data())
            weights.append(module.weights())
        found[name] = (weights[0], weights[1])
    return found


@pytest.fixture(scope="module")
def beside_stock(worker_pool, qwen3_dir) -> dict[str, Any]:
    return worker_pool.run(averaged_both, qwen3_dir, world_size=1, init_process_group=False)[0]


@pytest.mark.parametrize("case", CASES)
def test_average_is_that_of_lightnings_callback(beside_stock, case):
    """The same steps, the same first copy, the same weights in the module after the fit."""
    stock, mine = beside_stock[case]
    for name, weight in mine.items():  # fp32 sums in another order; steps move weights by up to 1e-1
        torch.testing.assert_close(weight, stock[name], rtol=0, atol=2e-6)


# ---- layouts ---------------------------------------------------------------------------------------------------------


class Weights(pl.Callback):
    """Weights after each step under Hugging Face names, and what the average's tensors should be on this rank."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []
        self.main: list[list[Tensor]] = []
        self.wrong = 0.0
        self.parts: list[Any] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        from lightning_megatron_rl.checkpoints.main_parameters import MAIN
        from lightning_megatron_rl.checkpoints.optimizer_state import slices

        self.weights.append({name: tensor.clone() for name, tensor in pl_module.export_weights()})
        self.parts = [part for part in trainer.strategy.optimizers[0].parts() if not part.is_stub_optimizer]
        self.main.append([own.tensors[MAIN].clone() for part in self.parts for own in slices(part)])
        average = trainer.strategy.averages["average"]
        for place, tensor in enumerate(average.tensors):
            expected = closed_form([step[place] for step in self.main])
            self.wrong = max(self.wrong, float((tensor.double() - expected).abs().max()))


def fit_averaged(model: Path, strategy: dict[str, Any], world_size: int, **options: Any) -> Run:
    seen = Weights()
    callbacks = [WeightAverage(DECAY), seen]
    run = fit_sft(model, strategy, world_size, steps=STEPS, callbacks=callbacks, **options)
    run.extra = {"weights": seen.weights, "wrong": seen.wrong}
    return run


@pytest.mark.parametrize(
    ("layout", "precision"),
    by_default(
        [("pp2_vpp2", "32-true"), ("dp2", "bf16-mixed")],
        [
            ("tp2_sp", "32-true"),
            ("pp2_vpp2", "32-true"),
            ("dp2", "32-true"),
            ("dp2", "bf16-mixed"),
            ("dp2_plain", "bf16-mixed"),
        ],
        several=True,
    ),
)
def test_closed_form_on_every_layout(worker_pool, qwen3_dir, layout, precision):
    """The average of the fp32 main parameters, whatever holds them, and the module has it after the fit.

    Fails when bf16 parameters are averaged in place of their main parameters (errors of 1e-3), when a replica keeps the
    weights of its own shard only, and when the module keeps the last step's.
    """
    world_size, strategy = LAYOUTS[layout]
    options = {"trainer": {"precision": precision}, "optimizer": {"lr": 1e-2}}
    runs = worker_pool.run(
        fit_averaged, qwen3_dir, strategy, world_size, world_size=world_size, init_process_group=False, **options
    )
    for run in runs:
        assert run.extra["wrong"] < 2e-7  # fp32: half a unit in the last place per update, of weights of size 1
        tolerance = 1e-6 if precision == "32-true" else 2.0**-8  # rounded to bf16
        last = run.extra["weights"][-1]
        moved = 0.0
        for name, weight in run.weights.items():
            expected = closed_form([step[name] for step in run.extra["weights"]])
            torch.testing.assert_close(weight.double(), expected, rtol=tolerance, atol=tolerance)
            moved = max(moved, float((weight - last[name]).abs().max()))
        assert moved > 4e-3, "the average is not the last step's weights"


def test_closed_form_with_experts(worker_pool, qwen3_moe_dir):
    """Experts on two ranks have an optimizer of their own."""
    strategy = {"expert_model_parallel_size": 2}
    runs = worker_pool.run(
        fit_averaged, qwen3_moe_dir, strategy, 2, world_size=2, init_process_group=False, optimizer={"lr": 1e-2}
    )
    for run in runs:
        assert run.extra["wrong"] < 2e-7
        for name, weight in run.weights.items():
            expected = closed_form([step[name] for step in run.extra["weights"]])
            torch.testing.assert_close(weight.double(), expected, rtol=1e-6, atol=1e-6)


# ---- validation, export, checkpoints ---------------------------------------------------------------------------------


class Validations(pl.Callback):
    """What each validation found, and the weights around it."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.during: list[dict[str, Tensor]] = []
        self.after: list[dict[str, Tensor]] = []

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.during.append({name: tensor.clone() for name, tensor in pl_module.export_weights()})

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self.after.append({name: tensor.clone() for name, tensor in pl_module.export_weights()})

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["val/loss"]))


def fit_validated(model: Path, directory: Path, strategy: dict[str, Any], world_size: int) -> dict[str, Any]:
    """A run with the average and a run without; an export of the average at the end."""
    found: dict[str, Any] = {}
    for averages in (True, False):
        seen, weights = Validations(), Weights()
        export = HFExport(str(directory / "hf"), average=True)
        callbacks = [WeightAverage(DECAY), weights, export, seen] if averages else [seen]
        trainer = {"val_check_interval": 1, "check_val_every_n_epoch": None, "num_sanity_val_steps": 1}
        run = fit_sft(model, strategy, world_size, steps=3, callbacks=callbacks, trainer=trainer)
        found["with" if averages else "without"] = {
            "losses": [step["policy/loss"] for step in run.steps],
            "val": seen.losses,
            "during": seen.during,
            "after": seen.after,
            "steps": weights.weights,
            "end": run.weights,
        }
    return found


def test_validation_and_export_use_the_average(worker_pool, qwen3_dir, tmp_path):
    """In a validation the model has the average, and training goes on bitwise as without one.

    Fails when the weights are not given back, or not on every replica.
    """
    from safetensors.torch import load_file

    runs = worker_pool.run(fit_validated, qwen3_dir, tmp_path, {}, 2, world_size=2, init_process_group=False)
    for run in runs:
        mine, plain = run["with"], run["without"]
        assert mine["losses"] == plain["losses"]
        for step in range(3):
            for name, weight in mine["during"][step + 1].items():  # the first is the sanity check's
                expected = closed_form([taken[name] for taken in mine["steps"][: step + 1]])
                torch.testing.assert_close(weight.double(), expected, rtol=1e-6, atol=1e-6)
            for name, weight in mine["after"][step].items():
                assert torch.equal(weight, plain["after"][step][name])
        assert mine["val"][1] == pytest.approx(plain["val"][1])  # after one step the average is the weights
        assert abs(mine["val"][3] - plain["val"][3]) > 1e-4
    exported = load_file(tmp_path / "hf" / "last" / "model.safetensors")
    for name, weight in runs[0]["with"]["end"].items():
        assert torch.equal(exported[name], weight)


class SavesInValidation(pl.Callback):
    """Saves after the second step and within the validation that follows, and looks at the weights around that."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.goes_on = False

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.directory / "before.ckpt")

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.global_step == 2:
            before = [parameter.detach().clone() for parameter in pl_module.parameters()]
            trainer.save_checkpoint(self.directory / "during.ckpt")
            pairs = zip(before, pl_module.parameters(), strict=True)
            self.goes_on = all(torch.equal(was, parameter) for was, parameter in pairs)


def save_in_a_validation(model: Path, directory: Path, world_size: int) -> tuple[bool, bool]:
    """Whether the validation went on with the average, and whether both checkpoints have the same tensors."""
    saves = SavesInValidation(directory)
    trainer = {"val_check_interval": 2, "check_val_every_n_epoch": None}
    fit_sft(model, {}, world_size, callbacks=[WeightAverage(DECAY), saves], trainer=trainer)
    return saves.goes_on, shards(directory / "before.ckpt") == shards(directory / "during.ckpt")


def test_checkpoint_of_a_validation_has_the_weights_themselves(worker_pool, qwen3_dir, tmp_path):
    """A callback of the user's may save there: a run that was resumed from the average would go on from it."""
    arguments = (save_in_a_validation, qwen3_dir, tmp_path, 2)
    for goes_on, same in worker_pool.run(*arguments, world_size=2, init_process_group=False):
        assert goes_on
        assert same


class FailsAlone(pl.Callback):
    """An error in the second step's validation, on the second rank first, which the first learns in a barrier."""

    def on_validation_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            if trainer.global_rank == 0:
                trainer.strategy.barrier()
            raise ValueError("alone")

    def on_exception(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank == 1:
            trainer.strategy.barrier()


def fail_in_a_validation(model: Path, world_size: int) -> list[bool]:
    """Whether each slice of this rank has its own weights after the error."""
    from lightning_megatron_rl.checkpoints.main_parameters import MAIN
    from lightning_megatron_rl.checkpoints.optimizer_state import slices

    weights = Weights()
    callbacks = [WeightAverage(DECAY), weights, FailsAlone()]
    trainer = {"val_check_interval": 1, "check_val_every_n_epoch": None}
    # a deadline for two replicas that wait for each other
    strategy = {"timeout_s": 10.0}
    with pytest.raises(ValueError, match="alone"):
        fit_sft(model, strategy, world_size, steps=3, callbacks=callbacks, trainer=trainer)
    found = [own for part in weights.parts for own in slices(part)]
    return [
        torch.equal(own.parameter.detach().view(-1)[own.start : own.stop], own.tensors[MAIN].view(-1)) for own in found
    ]


def test_an_error_of_one_rank_in_a_validation_waits_for_no_other(worker_pool, qwen3_dir):
    """Fails when the average is given back by a collective: the other rank is elsewhere, and both hang or abort."""
    for same in worker_pool.run(fail_in_a_validation, qwen3_dir, 2, world_size=2, init_process_group=False):
        assert same
        assert all(same)


def fit_saved(model: Path, strategy: dict[str, Any], world_size: int, *, average: bool = True, **options: Any) -> Run:
    callbacks = [WeightAverage(DECAY, update_starting_at_step=1)] if average else []
    return fit_arithmetic(model, strategy, world_size, callbacks=callbacks, **options)


@pytest.mark.slow
def test_resumed_average_is_the_uninterrupted_one(worker_pool, qwen3_dir, tmp_path):
    """Bitwise in the same layout, within rounding in another; anew, with a warning, from a checkpoint without one."""

    def run(layout: str, **options: Any) -> Run:
        world_size, strategy = LAYOUTS[layout]
        return worker_pool.run(
            fit_saved, qwen3_dir, strategy, world_size, world_size=world_size, init_process_group=False, **options
        )[0]

    whole = run("dp2", max_steps=4, checkpoints=tmp_path / "whole", every_n_steps=2)
    saved = str(tmp_path / "whole" / "step=2.ckpt")
    again = run("dp2", max_steps=4, ckpt_path=saved)
    for name, weight in again.weights.items():
        assert torch.equal(weight, whole.weights[name])
    other = run("tp2_sp", max_steps=4, ckpt_path=saved)
    for name, weight in other.weights.items():
        assert (weight - whole.weights[name]).norm() <= RELATIVE * weight.norm()
    run("dp2", max_steps=2, checkpoints=tmp_path / "plain", average=False)
    anew = run("dp2", max_steps=4, ckpt_path=str(tmp_path / "plain" / "step=2.ckpt"))
    differs = max(float((weight - whole.weights[name]).abs().max()) for name, weight in anew.weights.items())
    assert 1e-5 < differs < 1e-1, "steps 3 and 4 alone are averaged"


# ---- GRPO ------------------------------------------------------------------------------------------------------------


class Scored(pl.Callback):
    """The policy's weights at the beginning of each step, and the reference's log-probs of its rollout."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []
        self.rollouts: list[list[tuple[Tensor, Tensor]]] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self.weights.append({name: tensor.clone() for name, tensor in pl_module.export_weights()})

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        sequences = pl_module.last_rollout.sequences
        self.rollouts.append([(sequence.token_ids, sequence.fields["ref_logprobs"]) for sequence in sequences])


def fit_reference(model: Path, strategy: dict[str, Any], world_size: int, every: int | None, **options: Any) -> Run:
    seen = Scored()
    settings = ReferenceSettings(kind="average", average_decay=DECAY, refresh_every_n_steps=every)
    run = fit_grpo(
        model,
        strategy,
        world_size,
        module={"reference": settings, "updates_per_rollout": 1},
        callbacks=[seen, *options.pop("callbacks", [])],
        data=SequenceDataModule(prompts(2) * 4, 2),
        **options,
    )
    run.extra = {"weights": seen.weights, "rollouts": seen.rollouts}
    return run


@torch.no_grad()
def reference_error(model: Path, weights: dict[str, Tensor], rollout: list[tuple[Tensor, Tensor]]) -> float:
    """Largest difference to Transformers' log-probs under `weights`, at the runs' temperature."""
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    hf.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=False)
    errors = []
    for tokens, logprobs in rollout:
        expected = (hf(tokens[None]).logits[0, :-1] / 0.8).log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        errors.append(float((logprobs[1:] - expected).abs().max()))
    return max(errors)


@pytest.mark.parametrize(("layout", "every"), [("one", None), ("dp2", 2)])
def test_average_as_reference(worker_pool, qwen3_dir, layout, every):
    """The reference's log-probs are Transformers' under the closed form, which starts with the policy of the start.

    Fails when the policy's own weights score, or the average starts with the first step's.
    """
    world_size, strategy = (1, {}) if layout == "one" else LAYOUTS[layout]
    options = {"world_size": world_size, "init_process_group": False, "steps": 4}
    run = worker_pool.run(fit_reference, qwen3_dir, strategy, world_size, every, **options)[0]
    policies, rollouts = run.extra["weights"], run.extra["rollouts"]
    for step, rollout in enumerate(rollouts):
        taken = [policies[0], *policies[(every or 1) : step + 1 : (every or 1)]]
        average = {name: closed_form([weights[name] for weights in taken]) for name in policies[0]}
        assert reference_error(qwen3_dir, average, rollout) < 1e-5  # fp32 log-probs of size 5
    assert reference_error(qwen3_dir, policies[-1], rollouts[-1]) > 1e-3
    assert [step["policy/kl_ref"] > 1e-9 for step in run.steps[1:]] == [True] * 3


def test_resumed_run_has_the_average_as_reference(worker_pool, qwen3_dir, tmp_path):
    saving = ModelCheckpoint(dirpath=tmp_path, filename="saved", every_n_train_steps=2, save_top_k=1)
    whole, again = (
        worker_pool.run(
            fit_reference, qwen3_dir, {}, 1, None, steps=4, world_size=1, init_process_group=False, **options
        )[0]
        for options in (
            {"callbacks": [saving], "trainer": {"enable_checkpointing": True, "max_steps": 3}},
            {"ckpt_path": tmp_path / "saved.ckpt", "trainer": {"max_steps": 3}},
        )
    )
    assert again.steps[-1]["policy/kl_ref"] == whole.steps[-1]["policy/kl_ref"]
    assert again.steps[-1]["policy/loss"] == whole.steps[-1]["policy/loss"]


def validate_sampler(model: Path, world_size: int) -> list[int]:
    """Versions that the sampler got in a run with a validation after each of two steps."""
    trainer = {"val_check_interval": 1, "check_val_every_n_epoch": None}
    run = fit_grpo(model, {}, world_size, steps=2, callbacks=[WeightAverage(DECAY)], trainer=trainer)
    return run.extra["versions"]


def test_sampler_gets_the_average_for_a_validation(worker_pool, qwen3_dir):
    """Before each validation the average is pushed, and before the next rollout the policy."""
    (versions,) = worker_pool.run(validate_sampler, qwen3_dir, 1, world_size=1, init_process_group=False)
    assert versions == [0, 1, 1, 2]  # rollout, validation, rollout, validation


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": 1.0}, r"decay=1.0 must be in \(0, 1\)"),
        ({"decay": 0.0}, "decay=0.0"),
        ({"update_every_n_steps": 0}, "update_every_n_steps=0"),
        ({"update_starting_at_step": -1}, "update_starting_at_step=-1"),
    ],
)
def test_settings_that_average_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        WeightAverage(**options)


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        ([WeightAverage(), WeightAverage()], "two WeightAverage callbacks"),
        ([WeightSync(), WeightAverage()], "WeightSync comes before WeightAverage"),
    ],
)
def test_callbacks_in_an_order_that_cannot_work_are_refused(callbacks, message):
    own = callbacks[-1]
    trainer = pl.Trainer(
        strategy="megatron", accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, callbacks=callbacks
    )
    with pytest.raises(ValueError, match=message):
        own.setup(trainer, None, "fit")


@pytest.mark.parametrize(
    ("others", "message"),
    [([], r"the run keeps no average.*WeightAverage"), ([WeightAverage()], "updates its average after this callback")],
)
def test_export_of_an_average_that_is_not_there_is_refused(tmp_path, others, message):
    export = HFExport(str(tmp_path), average=True)
    callbacks = [export, *others]
    trainer = pl.Trainer(
        strategy="megatron", accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, callbacks=callbacks
    )
    with pytest.raises(ValueError, match=message):
        export.setup(trainer, None, "fit")


def export_early(model: Path, directory: Path) -> Run:
    callbacks = [WeightAverage(DECAY, update_starting_at_step=9), HFExport(str(directory), average=True)]
    return fit_sft(model, {}, 1, callbacks=callbacks)


def test_export_before_the_first_update_has_the_weights(worker_pool, qwen3_dir, tmp_path):
    """Fails when it has what the average begins with: the model that was not trained."""
    from safetensors.torch import load_file

    run = worker_pool.run(export_early, qwen3_dir, tmp_path, world_size=1, init_process_group=False)[0]
    exported, start = (load_file(path / "model.safetensors") for path in (tmp_path / "last", qwen3_dir))
    for name, weight in run.weights.items():
        assert torch.equal(exported[name], weight)
    assert any(not torch.equal(exported[name], weight) for name, weight in start.items())
