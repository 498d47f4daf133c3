"""docs/lightning.md: every public callback, flag, plugin and hook of Lightning has a row, and each row a test.

Most of these tests are here: the same run under stock Lightning and under `MegatronStrategy`, compared call by call.
"""

import ast
import inspect
import math
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks, plugins
from lightning.pytorch.callbacks import ModelCheckpoint, Timer

from lightning_megatron_rl.data.sft import SFTDataModule
from lightning_megatron_rl.strategy.megatron import MegatronStrategy
from lightning_megatron_rl.strategy.precision import MegatronPrecision
from tests.command_line import ROOT
from tests.lightning_cases import CALLBACKS, FLAGS, Outcome, PromptSequences, grpo_module, run_cases
from tests.lightning_runs import (
    CALLBACK_HOOKS,
    DATA_HOOKS,
    MODULE_HOOKS,
    STEP_HOOKS,
    OurModule,
    Sequences,
    StockModule,
    public_methods,
    recorder,
    trainers,
)
from tests.training import make_trainer

PAGE = (ROOT / "docs" / "lightning.md").read_text()
TOLERANCE = 2e-6  # fp32 sums in another order; the runs' steps move weights by up to 1e-1


def one(pool: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of a function in one process of the pool."""
    return pool.run(function, *args, world_size=1, init_process_group=False, timeout=1200, **kwargs)[0]


# ---- the page --------------------------------------------------------------------------------------------------------


def rows(section: str) -> dict[str, tuple[str, str]]:
    """What the tables of a section say of each name: the kind of its row, and the cell with its tests."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    found: dict[str, tuple[str, str]] = {}
    for line in re.findall(r"^\| (`.*) \|$", text, re.MULTILINE):
        names, kind, _, tests = (cell.strip() for cell in line.split("|"))
        for name in re.findall(r"`([^`]+)`", names):
            assert name not in found, f"{name} has two rows"
            found[name] = (kind, tests)
    return found


PUBLIC = {
    "Callbacks": set(callbacks.__all__),
    "Trainer flags": set(inspect.signature(pl.Trainer.__init__).parameters) - {"self"},
    "Plugins": set(plugins.__all__) | {"ClusterEnvironment"},
    "Hooks of a callback": {*CALLBACK_HOOKS, "state_key"},
    "Hooks and methods of a module": {*MODULE_HOOKS, *public_methods(pl.LightningModule), "load_from_checkpoint"},
    "Hooks of a data module": {*DATA_HOOKS, "load_from_checkpoint"},
}


@pytest.mark.parametrize("section", PUBLIC)
def test_everything_public_has_a_row(section):
    """A new version of Lightning that brings another one fails here, and so does a row for what is gone."""
    assert set(rows(section)) == PUBLIC[section]


@cache
def defined_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


@pytest.mark.parametrize("section", PUBLIC)
def test_every_row_has_a_kind_and_a_test(section):
    """The tests that a row names are there; a case of this file is one of its table."""
    for name, (kind, tests) in rows(section).items():
        assert kind in ("as stock", "difference", "refused"), name
        named = re.findall(r"`([^`]+)`", tests)
        assert named, name
        for test in named:
            file, function, case = re.fullmatch(r"(?:([\w/]+\.py)::)?(test_\w+)(?:\[([\w-]+)\])?", test).groups()  # type: ignore[union-attr]
            path = f"tests/{file}" if file else "tests/test_lightning.py"
            assert function in defined_in(path), f"{name}: no {function} in {path}"
            if case is not None:
                assert case in {**CALLBACKS, **FLAGS}, f"{name}: no case {case}"


# ---- callbacks and flags ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def callback_runs(worker_pool, qwen3_dir, tmp_path_factory) -> dict[str, dict[str, Outcome]]:
    return one(worker_pool, run_cases, "callbacks", qwen3_dir, tmp_path_factory.mktemp("callbacks"))


@pytest.fixture(scope="module")
def flag_runs(worker_pool, qwen3_dir, tmp_path_factory) -> dict[str, dict[str, Outcome]]:
    return one(worker_pool, run_cases, "flags", qwen3_dir, tmp_path_factory.mktemp("flags"))


def assert_as_stock(outcome: dict[str, Outcome], *, facts: bool = True) -> None:
    """Hooks with their arguments and counters, weights, metrics and facts are those of stock Lightning."""
    stock, sft = outcome["stock"], outcome["sft"]
    for kind, mine in outcome.items():
        assert mine.calls == stock.calls, kind
        assert (mine.step, mine.epoch) == (stock.step, stock.epoch), kind
    for name, weight in sft.weights.items():
        torch.testing.assert_close(weight, stock.weights[name], rtol=0, atol=TOLERANCE)
    for name in ("policy/loss", "val/loss", "test/loss"):
        assert same(sft.metrics.get(name), stock.metrics.get(name)), name
    if facts:
        assert same(sft.facts, stock.facts), (sft.facts, stock.facts)


def same(mine: Any, theirs: Any) -> bool:
    """Whether nested facts are equal, numbers within fp32 rounding."""
    if isinstance(mine, list | tuple) and isinstance(theirs, list | tuple):
        return len(mine) == len(theirs) and all(map(same, mine, theirs))
    if isinstance(mine, float) and isinstance(theirs, float):
        return math.isclose(mine, theirs, rel_tol=1e-5)
    return bool(mine == theirs)


@pytest.mark.deadline(1300)
@pytest.mark.parametrize("name", CALLBACKS)
def test_callback(callback_runs, name):
    assert_as_stock(callback_runs[name], facts=name != "LearningRateMonitor")


@pytest.mark.deadline(1300)
def test_learning_rates_are_logged_per_parameter_group(callback_runs):
    """Megatron has groups with weight decay and without; the name is the optimizer's."""
    found = callback_runs["LearningRateMonitor"]
    assert found["stock"].facts == ["lr-SGD"]
    assert found["sft"].facts == ["lr-MegatronOptimizer/pg1", "lr-MegatronOptimizer/pg2"]


@pytest.mark.deadline(1300)
@pytest.mark.parametrize("name", FLAGS)
def test_flag(flag_runs, name):
    """Loggers get the number of steps done, where stock Lightning gives the index of the last batch: one less."""
    outcome = flag_runs[name]
    if FLAGS[name].logs:
        outcome["stock"].facts = [(str(int(step) + 1), *rest) for step, *rest in outcome["stock"].facts]
    assert_as_stock(outcome)


def run_barebones(model: Path) -> list[Any]:
    """Steps and weights; without an injected sampler, which would shuffle under a distributed strategy."""
    found = []
    for kind, strategy in ((StockModule, "auto"), (OurModule, MegatronStrategy(use_distributed_optimizer=False))):
        options: dict[str, Any] = {"barebones": True, "max_steps": 2, "use_distributed_sampler": False}
        trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, **options)
        module = kind(model)
        dataset: Any = Sequences().sequences
        trainer.fit(module, torch.utils.data.DataLoader(dataset, batch_size=4, collate_fn=list))
        found.append((trainer.global_step, module.weights()))
    return found


def test_barebones(worker_pool, qwen3_dir):
    (stock_step, stock), (step, mine) = one(worker_pool, run_barebones, qwen3_dir)
    assert step == stock_step == 2
    for name, weight in mine.items():
        torch.testing.assert_close(weight, stock[name], rtol=0, atol=TOLERANCE)


# ---- hooks -----------------------------------------------------------------------------------------------------------


def record_hooks(owner: str, model: Path, root: Path) -> list[list[Any]]:
    """The calls of the hooks of one kind of owner: fit with checkpoints, validate, test, predict, a resumed fit."""
    found = []
    for make, module_class, data_class in trainers():
        calls: list[Any] = []
        shutil.rmtree(root, ignore_errors=True)
        watching = recorder(pl.Callback, CALLBACK_HOOKS, calls if owner == "callback" else [])
        names = [*MODULE_HOOKS, *STEP_HOOKS]
        names.remove("configure_sharded_model")  # deprecated: Lightning refuses it beside `configure_model`
        kind = recorder(module_class, names, calls if owner == "module" else [])
        data = recorder(data_class, DATA_HOOKS, calls if owner == "data" else [])()
        options = {"num_sanity_val_steps": 1, "val_check_interval": 2, "enable_checkpointing": True}
        options["default_root_dir"] = str(root)
        saving = ModelCheckpoint(root, filename="x", every_n_train_steps=4, save_top_k=1)
        module, trainer = kind(model), make(max_epochs=2, callbacks=[watching(), saving], **options)
        trainer.fit(module, data)
        trainer.validate(module, data, verbose=False)
        trainer.test(module, data, verbose=False)
        trainer.predict(module, data)
        calls.append(("resumed",))
        resumed = make(max_epochs=3, callbacks=[watching()], **options)
        resumed.fit(kind(model), data, ckpt_path=str(root / "x.ckpt"))
        found.append(calls)
    return found


@pytest.mark.deadline(1300)
@pytest.mark.parametrize("owner", ["callback", "module", "data"])
def test_hooks_are_called_as_in_stock_lightning(worker_pool, qwen3_dir, tmp_path, owner):
    """All hooks in their order, with counters, stages and indices, over fit, validate, test, predict and a resume.

    The one difference: a checkpoint is loaded into the model that `setup` has made, so `on_load_checkpoint` comes after
    `on_fit_start` (as under Lightning's own strategies that split models), not before it and `configure_optimizers`.
    """
    stock, mine = one(worker_pool, record_hooks, owner, qwen3_dir, tmp_path / "run")
    # stock has a `test_step` that calls `validation_step` without, ours with a data loader's index
    stock, own = [call[:6] for call in stock], [call[:6] for call in mine]
    moved = [call for call in own if call[0] == "on_load_checkpoint"]
    assert [call for call in stock if call[0] == "on_load_checkpoint"] == moved
    assert [call for call in own if call not in moved] == [call for call in stock if call not in moved]
    assert len(own) > 50
    if owner != "data":
        order = [call[0] for call in own[own.index(("resumed",)) :]]
        assert order.index("on_load_checkpoint") == order.index("on_fit_start") + 1


def record_grpo(model: Path) -> list[list[str]]:
    """Names of the callback hooks of a GRPO fit with one and with two updates per rollout, and of stock Lightning's."""
    (stock, *of_stock), _ = trainers()

    def ours(**options: Any) -> pl.Trainer:
        return make_trainer({}, 1, **options)

    def twice(path: Path) -> Any:
        module = grpo_module(path)
        module.updates_per_rollout = 2
        return module

    found = []
    for make, kind, data in (
        (stock, *of_stock),
        (ours, grpo_module, PromptSequences),
        (ours, twice, PromptSequences),
    ):
        calls: list[Any] = []
        trainer = make(max_steps=3, callbacks=[recorder(pl.Callback, CALLBACK_HOOKS, calls)()])
        trainer.fit(kind(model), data())
        found.append([call[0] for call in calls])
    return found


def test_hooks_of_grpo(worker_pool, qwen3_dir):
    """One update per rollout is as stock; each further one is an optimizer step with its `on_before_optimizer_step`."""
    stock, single, double = one(worker_pool, record_grpo, qwen3_dir)
    assert single == stock
    step = "on_before_optimizer_step"
    assert double.count(step) == 2 * stock.count(step) == 6
    assert [name for name in double if name != step] == [name for name in stock if name != step]


class Methods(OurModule):
    """Calls what a module offers its users inside a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        with self.toggled_optimizer(optimizer):
            loss = super().training_step(batch, batch_idx)
        rank = float(self.global_rank)
        self.found = {
            "gathered": self.all_gather(torch.tensor([rank])).flatten().tolist(),
            "rate": self.lr_schedulers().get_last_lr()[0],
            "automatic": self.automatic_optimization,
            "step": (self.global_step, self.current_epoch),
            "trainable": all(parameter.requires_grad for parameter in self.parameters()),
        }
        self.log("mean", rank, sync_dist=True)
        for name in ("sum", "max", "min"):
            self.log_dict({name: rank + 1}, sync_dist=True, reduce_fx=name)
        self.print("once", end="")
        return loss


def call_methods(model: Path, world_size: int) -> dict[str, Any]:
    module = Methods(model)
    trainer = make_trainer({"use_distributed_optimizer": False}, world_size, max_steps=1)
    trainer.fit(module, Sequences())
    metrics = {name: float(trainer.callback_metrics[name]) for name in ("mean", "sum", "max", "min")}
    module.freeze()
    frozen = [parameter.requires_grad for parameter in module.parameters()]
    module.unfreeze()
    refused = []
    for name in ("to_onnx", "to_torchscript", "to_tensorrt", "manual_backward"):
        try:
            getattr(module, name)(torch.zeros(()))
        except Exception as error:
            refused.append(f"{type(error).__name__}: {error}")
    return {**module.found, **metrics, "frozen": not any(frozen), "refused": refused}


def test_methods_that_a_module_offers(worker_pool, qwen3_dir):
    """Collectives are over all ranks, as in stock Lightning; what would need a whole model is refused."""
    ranks = worker_pool.run(call_methods, qwen3_dir, 2, world_size=2, init_process_group=False)
    for found in ranks:
        assert found["gathered"] == [0.0, 1.0]
        assert (found["mean"], found["sum"], found["max"], found["min"]) == (0.5, 3.0, 2.0, 1.0)
        assert found["rate"] == pytest.approx(0.05)
        assert found["step"] == (0, 0)
        assert found["automatic"]
        assert found["trainable"]
        assert found["frozen"]
        *exports, manual = found["refused"]
        assert all("HFExport" in message for message in exports)
        assert "please disable automatic optimization" in manual  # Lightning's own


# ---- Timer after a resume --------------------------------------------------------------------------------------------


def resume_late(model: Path, root: Path) -> list[tuple[int, int]]:
    """Steps before and after a resume of a run whose time is up."""
    found = []
    for number, (make, kind, data) in enumerate(trainers()):
        directory = root / str(number)
        saving = ModelCheckpoint(directory, filename="x", every_n_train_steps=2)
        options = {"enable_checkpointing": True, "limit_val_batches": 0}
        first = make(max_steps=2, callbacks=[Timer("00:10:00:00"), saving], **options)
        first.fit(kind(model), data())
        second = make(max_steps=4, callbacks=[Timer({"microseconds": 1})], **options)
        second.fit(kind(model), data(), ckpt_path=str(directory / "x.ckpt"))
        found.append((first.global_step, second.global_step))
    return found


def test_timer_that_is_up_lets_a_resumed_run_take_no_step(worker_pool, qwen3_dir, tmp_path):
    """Fails when the timer only knows the time since the resume before the first batch: one step more."""
    stock, mine = one(worker_pool, resume_late, qwen3_dir, tmp_path)
    assert mine == stock == (2, 2)


# ---- refusals --------------------------------------------------------------------------------------------------------


class Finetuning(callbacks.BaseFinetuning):
    """The least that the base class asks for."""

    def freeze_before_training(self, pl_module: Any) -> None:
        """Nothing."""

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        """Nothing."""


class Subclass(callbacks.EMAWeightAveraging):
    """A user's own."""


REFUSED: dict[str, tuple[Any, list[str]]] = {  # what makes the callback, parts of the message
    "BackboneFinetuning": (lambda: callbacks.BackboneFinetuning(1), ["lora", "configure_model"]),
    "BaseFinetuning": (Finetuning, ["Finetuning does not work", "lora"]),
    "BatchSizeFinder": (callbacks.BatchSizeFinder, ["not supported with distributed strategies"]),
    "EMAWeightAveraging": (callbacks.EMAWeightAveraging, ["EMAWeightAveraging", "WeightAverage(decay=0.999)"]),
    "EMAWeightAveraging, a subclass": (Subclass, ["Subclass", "WeightAverage(decay=0.999)"]),
    "GradientAccumulationScheduler": (
        lambda: callbacks.GradientAccumulationScheduler({0: 2}),
        ["scheduling={0: 2}", "batch_size"],
    ),
    "GradientAccumulationScheduler, later": (
        lambda: callbacks.GradientAccumulationScheduler({3: 4}),
        ["scheduling={3: 4", "max_tokens_per_microbatch"],
    ),
    "LearningRateFinder": (callbacks.LearningRateFinder, ["OptimizerConfig(lr=...)"]),
    "ModelPruning": (lambda: callbacks.ModelPruning("l1_unstructured"), ["ModelPruning", "HFExport"]),
    "OnExceptionCheckpoint": (
        lambda: callbacks.OnExceptionCheckpoint("nowhere"),
        ["OnExceptionCheckpoint would save", "every_n_train_steps"],
    ),
    "StochasticWeightAveraging": (
        lambda: callbacks.StochasticWeightAveraging(1e-2),
        ["StochasticWeightAveraging", "WeightAverage(decay=None)"],
    ),
    "WeightAveraging": (callbacks.WeightAveraging, ["WeightAveraging", "WeightAverage"]),
}


class TwoOptimizers(OurModule):
    """As for an adversarial pair."""

    def configure_optimizers(self) -> Any:
        other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        return [super().configure_optimizers()["optimizer"], other]


def messages_of_refusals(model: Path) -> dict[str, str]:
    """The errors of fits as a user sees them, for SFT and GRPO modules."""
    found = {}
    make = trainers()[1][0]

    def attempt(name: str, run: Any) -> None:
        try:
            run()
            found[name] = "not refused"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"

    for kind, module, data in (("sft", OurModule, Sequences), ("grpo", grpo_module, PromptSequences)):
        for name, (callback, _) in REFUSED.items():
            options = {"max_steps": 1, "enable_checkpointing": name == "OnExceptionCheckpoint"}
            attempt(f"{kind} {name}", lambda: make(callbacks=[callback()], **options).fit(module(model), data()))  # noqa: B023
        loader = torch.utils.data.DataLoader([1])  # type: ignore[arg-type]
        for catches in (False, True):
            options = {"max_steps": 1, "enable_checkpointing": catches}
            options["callbacks"] = [callbacks.OnExceptionCheckpoint("nowhere")] if catches else []
            for entry in ("fit", "validate", "test", "predict"):
                attempt(
                    f"{kind} two sources of data, {entry}, {catches}",
                    lambda: getattr(make(**options), entry)(module(model), loader, datamodule=data()),  # noqa: B023
                )
    attempt("sync_batchnorm", lambda: make(sync_batchnorm=True).fit(OurModule(model), Sequences()))
    layers = [plugins.TorchSyncBatchNorm()]
    attempt("TorchSyncBatchNorm", lambda: make(plugins=layers).fit(OurModule(model), Sequences()))
    attempt("two optimizers", lambda: make(max_steps=1).fit(TwoOptimizers(model), Sequences()))
    attempt("plain module", lambda: make(max_steps=1).fit(StockModule(model), Sequences()))
    return found


@pytest.fixture(scope="module")
def refused(worker_pool, qwen3_dir) -> dict[str, str]:
    return one(worker_pool, messages_of_refusals, qwen3_dir)


@pytest.mark.deadline(1300)
@pytest.mark.parametrize("kind", ["sft", "grpo"])
@pytest.mark.parametrize("name", REFUSED)
def test_callback_is_refused_by_name(refused, kind, name):
    """The message has the callback's name and what to do, whatever callbacks do when an exception comes up."""
    for part in REFUSED[name][1]:
        assert part in refused[f"{kind} {name}"]


@pytest.mark.deadline(1300)
@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_error_of_the_start_is_the_one_that_is_seen(refused, kind):
    """Before the module is attached to a Trainer, and with a callback that saves on exceptions."""
    for entry in ("fit", "validate", "test", "predict"):
        for catches in (False, True):
            message = refused[f"{kind} two sources of data, {entry}, {catches}"]
            assert message.startswith("MisconfigurationException: You cannot pass"), message


@pytest.mark.deadline(1300)
def test_modules_and_plugins_are_refused_with_a_way_out(refused):
    for name in ("sync_batchnorm", "TorchSyncBatchNorm"):
        assert "no batch normalisation" in refused[name]
    assert "several optimizers" in refused["two optimizers"]
    assert "automatic_optimization" not in refused["two optimizers"]
    assert "PPOModule" in refused["two optimizers"]
    assert "Use SFTModule, GRPOModule" in refused["plain module"]


def test_data_modules_are_not_loaded_from_checkpoints(tmp_path):
    with pytest.raises(ValueError, match=r"SFTDataModule\.load_from_checkpoint.*position in the data.*ckpt_path="):
        SFTDataModule.load_from_checkpoint(tmp_path)


def test_precision_plugins():
    """Lightning's for 32 and 16 bits are translated; those of other strategies and libraries are refused."""
    translated = {
        plugins.Precision: "32-true",
        plugins.HalfPrecision: "bf16-true",
        plugins.MixedPrecision: "bf16-mixed",
    }
    for kind, precision in translated.items():
        options = {plugins.HalfPrecision: ("bf16-true",), plugins.MixedPrecision: ("bf16-mixed", "cpu")}.get(kind, ())
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, logger=False, strategy=MegatronStrategy(), plugins=[kind(*options)]
        )
        assert trainer.precision_plugin.precision == precision
    others = [name for name in plugins.__all__ if name.endswith("Precision")]
    for kind in {getattr(plugins, name) for name in others} - translated.keys():
        plugin = object.__new__(kind)  # some need libraries that are not installed
        with pytest.raises(ValueError, match=f"{kind.__name__}.*is not supported by MegatronStrategy"):
            MegatronPrecision.from_lightning(plugin)
