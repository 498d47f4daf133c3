"""Reward models: one number in every layout, Transformers' number, and an export that Transformers scores with."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification

from lightning_megatron_rl.callbacks.hf_export import HFExport
from lightning_megatron_rl.models.layers.lora import LoRASettings
from lightning_megatron_rl.models.layers.value_head import new_weight
from lightning_megatron_rl.modules.reward_model import RewardModule, scored_at_end
from lightning_megatron_rl.modules.training import TrainingSettings
from tests.distributed import WorkerError
from tests.modules.preference_runs import fit_pairs, frozen_pairs
from tests.selection import by_default
from tests.strategy.test_megatron import LAYOUTS, RELATIVE
from tests.training import Run, fit_sft


def job(pool: Any, model: Any, layout: str = "single", **kwargs: Any) -> list[Run]:
    world_size, strategy = {**LAYOUTS, "single": (1, {})}[layout]
    arguments = ("reward", model, strategy, world_size)
    return pool.run(fit_pairs, *arguments, world_size=world_size, init_process_group=False, **kwargs)


def assert_same(runs: list[Run], reference: Run) -> None:
    """Everything that is logged, and the final weights."""
    for run in runs:
        assert run.steps == runs[0].steps, "a rank logged something else"
    for mine, theirs in zip(runs[0].steps, reference.steps, strict=True):
        for name, value in theirs.items():
            if name.startswith(("reward_model/", "preference/")):
                # scores are of the size of 1, their differences and means may be near 0
                assert mine[name] == pytest.approx(value, rel=RELATIVE, abs=RELATIVE * name.startswith("pref")), name
    assert runs[0].weights.keys() == reference.weights.keys()
    for name, weight in reference.weights.items():
        error = (runs[0].weights[name] - weight).norm() / weight.norm()
        assert error <= RELATIVE, f"{name}: {error:.1e}"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reward") / "model"


@pytest.fixture(scope="module")
def reference(worker_pool, qwen3_dir, exported) -> Run:
    callbacks = [HFExport(str(exported.parent / "hf"))]  # verifies what it wrote
    return job(worker_pool, qwen3_dir, callbacks=callbacks, save_to=exported, validate=True)[0]


@pytest.mark.parametrize(
    "layout",
    by_default(["tp2_sp", "pp2"], ["tp2", "tp2_sp", "pp2", "dp2", "cp2", "pp2_vpp2", "tp2_cp2_sp"]),
)
def test_layout_gives_the_numbers_of_one_process(worker_pool, qwen3_dir, reference, layout):
    assert_same(job(worker_pool, qwen3_dir, layout), reference)


@pytest.mark.parametrize("module", [{"max_tokens_per_microbatch": 32}, {"packing": False}])
def test_sides_of_a_pair_may_lie_in_different_micro_batches(worker_pool, qwen3_dir, reference, module):
    assert_same(job(worker_pool, qwen3_dir, module=module), reference)


def test_tied_embeddings_on_two_stages(worker_pool, tied_dir):
    """There is no output layer any more whose weight would be that of the first stage."""
    alone = job(worker_pool, tied_dir)[0]
    assert_same(job(worker_pool, tied_dir, "pp2"), alone)


def classifier(directory: Path, head: torch.Tensor | None = None) -> Any:
    model = AutoModelForSequenceClassification.from_pretrained(directory, num_labels=1, dtype=torch.float32)
    if head is not None:
        model.score.weight.data.copy_(head)
    return model


def test_one_process_equals_transformers(qwen3_dir, reference):
    """Loss, gradient norm and scores of a first step from Transformers in fp32 and a plain backward."""
    model = classifier(qwen3_dir, new_weight(64))
    pairs = frozen_pairs(8)[:4]
    chosen, rejected = (
        torch.stack([model(getattr(pair, side).token_ids[None]).logits[0, 0] for pair in pairs])
        for side in ("chosen", "rejected")
    )
    loss = -logsigmoid(chosen - rejected).mean()
    loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    step = reference.steps[0]
    assert step["reward_model/loss"] == pytest.approx(loss.item(), rel=RELATIVE)
    assert step["reward_model/grad_norm"] == pytest.approx(norm.item(), rel=RELATIVE)
    assert step["preference/chosen"] == pytest.approx(chosen.mean().item(), rel=RELATIVE)
    assert step["preference/margin"] == pytest.approx((chosen - rejected).mean().item(), rel=RELATIVE)
    assert step["preference/accuracy"] == (chosen > rejected).double().mean().item()


def test_export_scores_in_transformers_as_validation_did(exported, reference):
    model = classifier(exported)
    assert json.loads((exported / "config.json").read_text())["architectures"] == ["Qwen3ForSequenceClassification"]
    pairs = frozen_pairs(8)
    with torch.no_grad():
        chosen, rejected = (
            torch.stack([model(getattr(pair, side).token_ids[None]).logits[0, 0] for pair in pairs])
            for side in ("chosen", "rejected")
        )
    assert reference.extra["val"]["val/chosen"] == pytest.approx(chosen.mean().item(), rel=RELATIVE)
    assert reference.extra["val"]["val/loss"] == pytest.approx(
        -logsigmoid(chosen - rejected).mean().item(), rel=RELATIVE
    )
    assert reference.extra["val"]["val/accuracy"] == (chosen > rejected).double().mean().item()


def test_training_goes_on_from_an_export(worker_pool, exported, reference):
    """The head is the export's, not a new one: the first step starts where validation ended."""
    run = job(worker_pool, exported, "tp2_sp", steps=1, batch_size=8)[0]
    assert run.steps[0]["reward_model/loss"] == pytest.approx(reference.extra["val"]["val/loss"], rel=RELATIVE)


def test_checkpoint_resumes_in_another_layout(worker_pool, qwen3_dir, reference, tmp_path):
    keeper = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    saving = {"callbacks": [keeper], "trainer": {"enable_checkpointing": True, "max_steps": 1}}
    pairs = frozen_pairs(8)
    job(worker_pool, qwen3_dir, "tp2_sp", pairs=pairs, **saving)
    run = job(worker_pool, qwen3_dir, "pp2", pairs=pairs, ckpt_path=str(tmp_path / "step=1.ckpt"))[0]
    assert len(run.steps) == 1
    for name, weight in reference.weights.items():
        assert (run.weights[name] - weight).norm() / weight.norm() <= RELATIVE, name


def test_checkpoint_of_a_language_model_is_refused(worker_pool, qwen3_dir, tmp_path):
    """Its output layer has the head's name, and Megatron would take the head's shape out of it without a word."""
    keeper = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    saving = {"callbacks": [keeper], "trainer": {"enable_checkpointing": True}, "steps": 1}
    worker_pool.run(fit_sft, qwen3_dir, {}, 1, world_size=1, init_process_group=False, **saving)
    with pytest.raises(
        WorkerError,
        match=r"1 have another shape .*output_layer.weight \(128, 64\) != \(1, 64\).* Only one of them has a value",
    ):
        job(worker_pool, qwen3_dir, ckpt_path=str(tmp_path / "step=1.ckpt"))


@pytest.mark.slow
def test_adapters_train_with_a_whole_head(worker_pool, qwen3_dir):
    module = {"lora": LoRASettings(rank=4, alpha=8), "center_coef": 0.01}
    alone = job(worker_pool, qwen3_dir, module=module)[0]
    assert_same(job(worker_pool, qwen3_dir, "tp2_sp", module=module), alone)
    assert (alone.weights["score.weight"] - new_weight(64)).norm() > 0


def test_adapters_without_the_head_are_not_exported(worker_pool, broken_model, tmp_path):
    """Before weights are loaded: it was refused when training had ended."""
    options = {"module": {"lora": LoRASettings(rank=4)}, "callbacks": [HFExport(str(tmp_path / "hf"), adapter="both")]}
    with pytest.raises(WorkerError, match=r"HFExport\(adapter='both'\) with RewardModule: .* Set adapter='merged'"):
        job(worker_pool, broken_model, **options)


def test_it_learns_what_separates_the_pairs(worker_pool, qwen3_dir):
    run = job(worker_pool, qwen3_dir, steps=12, pairs=frozen_pairs(4) * 12, optimizer={"adam_eps": 1e-8})[0]
    assert run.steps[-1]["preference/accuracy"] == 1.0
    assert run.steps[-1]["reward_model/loss"] < 0.2 < run.steps[0]["reward_model/loss"]


@pytest.mark.parametrize(
    ("tokens", "pad", "expected"),
    [
        ([5, 9, 7], 0, [5, 9, 7, 7]),
        ([5, 9, 0, 0], 0, [5, 9, 9]),  # Transformers skips padding at the end, also where it ends the text
        ([5, 0, 7], 0, [5, 0, 7, 7]),
        ([0, 0], 0, [0, 0]),
        ([5, 0], None, [5, 0, 0]),
    ],
)
def test_the_scored_token_is_the_one_of_transformers(tokens, pad, expected):
    sequence = scored_at_end(torch.tensor(tokens), pad)
    assert sequence.token_ids.tolist() == expected
    assert sequence.loss_mask.nonzero().flatten().tolist() == [len(expected) - 1]


def test_settings_that_cannot_train_are_refused():
    with pytest.raises(ValueError, match=r"center_coef=-1\.0"):
        RewardModule("nothing", center_coef=-1.0)
    with pytest.raises(ValueError, match="max_tokens_per_microbatch=0"):
        RewardModule("nothing", train=TrainingSettings(max_tokens_per_microbatch=0))
