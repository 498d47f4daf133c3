"""The reference policy: which one is in force, when it gets new weights, and that a resumed run has the same one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron_rl.modules.reference import ReferenceSettings
from lightning_megatron_rl.modules.rollout_batch import to_sequence
from tests.distributed import WorkerError
from tests.modules.runs import NUM_GENERATIONS, fit_grpo, prompts, recorded_samples
from tests.notices import collected
from tests.strategy.test_megatron import LAYOUTS, RELATIVE
from tests.training import SequenceDataModule


@pytest.mark.parametrize(
    ("settings", "kl_coef", "has_adapters", "kind"),
    [
        ({}, 0.0, False, "none"),
        ({}, 0.1, False, "frozen_copy"),
        ({}, 0.1, True, "adapters_off"),
        ({"kind": "frozen_copy"}, 0.0, False, "frozen_copy"),  # to log the KL without a penalty
        ({"kind": "adapters_off"}, 0.0, True, "adapters_off"),
        ({"kind": "average", "average_decay": 0.9}, 0.1, False, "average"),
        ({"kind": "average", "average_decay": 0.9}, 0.0, True, "average"),  # of the adapters, to log the KL
        ({"model": "teacher"}, 0.1, False, "frozen_copy"),
        ({"model": "teacher"}, 0.0, False, "frozen_copy"),
        ({"model": "teacher"}, 0.1, True, "frozen_copy"),  # the adapters learn from it
    ],
)
def test_kind_in_force(settings: dict[str, Any], kl_coef: float, has_adapters: bool, kind: str):
    assert ReferenceSettings(**settings).resolve(kl_coef=kl_coef, has_adapters=has_adapters) == kind


@pytest.mark.parametrize(
    ("settings", "kl_coef", "has_adapters", "message"),
    [
        ({"kind": "none"}, 0.1, False, "loss.kl_coef=0.1 with reference.kind=none"),
        ({"kind": "adapters_off"}, 0.1, False, "adapters_off without lora"),
        ({"kind": "frozen_copy"}, 0.1, True, "kind=frozen_copy.*with lora"),
        ({"refresh_every_n_steps": 5}, 0.1, True, "refresh_every_n_steps=5 with lora"),
        ({"refresh_every_n_steps": 5}, 0.0, False, "refresh_every_n_steps=5 with loss.kl_coef=0"),
    ],
)
def test_contradictions_are_refused(settings: dict[str, Any], kl_coef: float, has_adapters: bool, message: str):
    with pytest.raises(ValueError, match=message):
        ReferenceSettings(**settings).resolve(kl_coef=kl_coef, has_adapters=has_adapters)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"refresh_every_n_steps": 0}, "refresh_every_n_steps=0"),
        ({"kind": "none", "refresh_every_n_steps": 1}, "kind=none"),
        ({"kind": "average"}, "reference.kind=average with average_decay=None"),
        ({"average_decay": 0.9}, "reference.kind=auto with average_decay=0.9"),
        ({"kind": "average", "average_decay": 1.0}, "average_decay=1.0"),
        ({"model": "teacher", "kind": "average", "average_decay": 0.9}, "reference.model='teacher' with kind=average"),
        ({"model": "teacher", "kind": "none"}, "reference.model='teacher' with kind=none"),
        ({"model": "teacher", "kind": "adapters_off"}, "kind=adapters_off"),
        ({"model": "teacher", "refresh_every_n_steps": 1}, "refresh_every_n_steps=1"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        ReferenceSettings(**settings)


def fit(
    model: Path, strategy: dict[str, Any], world_size: int, refresh: int | None, max_steps: int, **options: Any
) -> list[dict[str, float]]:
    """Steps on the same two prompts, one update per rollout; returns what was logged.

    The same prompts in every batch: this loader starts anew when a run is resumed.
    """
    data = SequenceDataModule(prompts(2) * 4, 2)
    module = {"reference": ReferenceSettings(refresh_every_n_steps=refresh), "updates_per_rollout": 1}
    trainer = {"max_steps": max_steps, **options.pop("trainer", {})}
    return fit_grpo(model, strategy, world_size, module=module, trainer=trainer, data=data, **options).steps


def run(pool: Any, world: int, *args: Any, **kwargs: Any) -> list[dict[str, float]]:
    layout = {} if world == 1 else {"tensor_model_parallel_size": 2}
    return pool.run(fit, args[0], layout, world, *args[1:], world_size=world, init_process_group=False, **kwargs)[0]


@pytest.fixture(scope="module")
def refreshed(worker_pool, qwen3_dir) -> list[dict[str, float]]:
    return run(worker_pool, 1, qwen3_dir, 2, 4)


def test_refresh_makes_the_reference_the_policy_of_that_step(worker_pool, qwen3_dir, refreshed):
    """KL is exactly 0 where the reference has just become the policy, and grows again; without refresh it only grows.

    With one update per rollout the policy that is updated is still the one that the copy was taken of.
    """
    kept = [step["policy/kl_ref"] for step in run(worker_pool, 1, qwen3_dir, None, 4)]
    assert kept[0] == 0
    assert all(kl > 1e-9 for kl in kept[1:])
    fresh = [step["policy/kl_ref"] for step in refreshed]
    assert fresh[:2] == kept[:2]
    assert fresh[2] == 0
    assert 1e-9 < fresh[3] != kept[3]


def test_resumed_run_has_the_refreshed_reference(worker_pool, qwen3_dir, refreshed, tmp_path):
    """Saved by two tensor-parallel ranks after step 3, whose reference is the policy of step 2.

    Fails if checkpoints leave the reference out: the resumed run would measure KL to the model it began with.
    """
    from lightning.pytorch.callbacks import ModelCheckpoint

    saving = ModelCheckpoint(dirpath=tmp_path, filename="saved", every_n_train_steps=3)
    run(worker_pool, 2, qwen3_dir, 2, 3, callbacks=[saving], trainer={"enable_checkpointing": True})
    resumed = run(worker_pool, 1, qwen3_dir, 2, 4, ckpt_path=tmp_path / "saved.ckpt")
    # the step after the resume; the layouts' weights agree to 1e-5 after three steps, a KL is quadratic in them
    assert resumed[-1]["policy/kl_ref"] == pytest.approx(refreshed[3]["policy/kl_ref"], rel=1e-3)
    assert resumed[-1]["policy/loss"] == pytest.approx(refreshed[3]["policy/loss"], rel=1e-4, abs=1e-6)


def test_checkpoint_without_the_reference_is_refused(worker_pool, qwen3_dir, tmp_path):
    from lightning.pytorch.callbacks import ModelCheckpoint

    saving = ModelCheckpoint(dirpath=tmp_path, filename="saved", every_n_train_steps=1)
    run(worker_pool, 1, qwen3_dir, None, 1, callbacks=[saving], trainer={"enable_checkpointing": True})
    with pytest.raises(WorkerError, match=r"(?s)parameters are missing \(reference\..* had no reference to save"):
        run(worker_pool, 1, qwen3_dir, 2, 2, ckpt_path=tmp_path / "saved.ckpt")


def told(model: Path, refresh: int | None, checkpoint: Path) -> list[str]:
    with collected() as messages:
        fit(model, {}, 1, refresh, 2, ckpt_path=checkpoint)
    return [message for message in messages if "has a reference that was refreshed" in message]


def test_a_refreshed_reference_that_is_left_is_told(worker_pool, qwen3_dir, tmp_path):
    """KL would be measured to the model of the start again, without a word."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    saving = ModelCheckpoint(dirpath=tmp_path, filename="saved", every_n_train_steps=1)
    run(worker_pool, 1, qwen3_dir, 1, 1, callbacks=[saving], trainer={"enable_checkpointing": True})
    for refresh, count in ((None, 1), (1, 0)):
        options = {"world_size": 1, "init_process_group": False}
        (messages,) = worker_pool.run(told, qwen3_dir, refresh, tmp_path / "saved.ckpt", **options)
        assert len(messages) == count


def resumed_with(model: Path, checkpoint: Path, init_from: Path | None) -> tuple[float, int]:
    """The KL to the reference in the step after a resume, and how often it was told that this is another one."""
    module = {"reference": ReferenceSettings(), "init_from": None if init_from is None else str(init_from)}
    with collected() as messages:
        data = SequenceDataModule(prompts(2) * 4, 2)
        steps = fit_grpo(model, {}, 1, module=module, steps=2, data=data, ckpt_path=checkpoint).steps
    return steps[-1]["policy/kl_ref"], sum("reference is another one" in message for message in messages)


def test_a_reference_that_is_made_of_other_weights_is_told(worker_pool, qwen3_dir, tmp_path):
    """The policy's weights come from the checkpoint, the reference's from `model` or `init_from` again."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    from tests.tiny_models import save_tiny_model

    other = save_tiny_model(tmp_path / "other", "qwen3", seed=1)
    saving = ModelCheckpoint(dirpath=tmp_path, filename="saved", every_n_train_steps=1)
    run(worker_pool, 1, qwen3_dir, None, 1, callbacks=[saving], trainer={"enable_checkpointing": True})
    saved, options = tmp_path / "saved.ckpt", {"world_size": 1, "init_process_group": False}
    ((kept, same),) = worker_pool.run(resumed_with, qwen3_dir, saved, None, **options)
    ((of_other, told_of_model),) = worker_pool.run(resumed_with, other, saved, None, **options)
    ((of_start, told_of_start),) = worker_pool.run(resumed_with, qwen3_dir, saved, saved, **options)
    assert (same, told_of_model, told_of_start) == (0, 1, 1)
    assert len({kept, of_other, of_start}) == 3


def test_copies_hold_every_parameter_and_buffer(worker_pool, qwen3_dir):
    assert all(worker_pool.run(copies, qwen3_dir, world_size=1, init_process_group=False))


def copies(model: Path) -> bool:
    """Whether a copy equals its source, which has moved on in its parameters and its buffers."""
    from lightning_megatron_rl.modules.reference import copy_weights

    source, target = (torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)) for _ in range(2))
    source(torch.randn(5, 3))  # moves the buffers
    copy_weights([source], [target])
    return all(
        torch.equal(a, b) for a, b in zip(source.state_dict().values(), target.state_dict().values(), strict=True)
    )


def distil(
    model: Path, strategy: dict[str, Any], world_size: int, teacher: Path, max_steps: int, **options: Any
) -> list[dict[str, float]]:
    """Steps on the same two prompts with KL to the teacher for the only objective."""
    data = SequenceDataModule(prompts(2) * max_steps, 2)
    module = {"reference": ReferenceSettings(model=str(teacher)), "updates_per_rollout": 1, "reward_weights": [0.0] * 2}
    loss = {"kl_coef": 1.0, "kl_estimator": "k2", "entropy_coef": 0.0}
    trainer = {"max_steps": max_steps}
    return fit_grpo(
        model, strategy, world_size, module={**module, **options}, trainer=trainer, data=data, loss=loss
    ).steps


def distil_job(pool: Any, layout: str, *args: Any, **kwargs: Any) -> list[dict[str, float]]:
    world, strategy = {**LAYOUTS, "single": (1, {})}[layout]
    return pool.run(distil, args[0], strategy, world, *args[1:], world_size=world, init_process_group=False, **kwargs)[
        0
    ]


@pytest.mark.slow
def test_policy_is_drawn_to_a_teacher_of_another_family(worker_pool, qwen3_dir, tied_dir):
    """The first distance is that of both models in Transformers; then it falls, alike in every layout."""
    from transformers import AutoModelForCausalLM

    steps = distil_job(worker_pool, "single", qwen3_dir, tied_dir, 6)
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (qwen3_dir, tied_dir)]
    k2, k3 = [], []
    for sample in recorded_samples(2):
        sequence = to_sequence(sample)
        ids, mask = sequence.token_ids, sequence.loss_mask
        policy, teacher = (
            (model(ids[None]).logits[0] / 0.8).log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0][mask[1:]].detach()
            for model in models
        )
        difference = teacher - policy
        k2.append(difference.square() / 2)
        k3.append((difference.exp() - difference - 1).clamp(max=10))
    assert len(k2) == 2 * NUM_GENERATIONS
    assert steps[0]["policy/kl_ref"] == pytest.approx(torch.cat(k3).mean().item(), rel=RELATIVE)
    assert steps[0]["policy/loss"] == pytest.approx(torch.cat(k2).mean().item(), rel=RELATIVE)
    distances = [step["policy/kl_ref"] for step in steps]
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 0.8 * distances[0]
    for mine, theirs in zip(distil_job(worker_pool, "pp2", qwen3_dir, tied_dir, 2), steps[:2], strict=True):
        assert mine["policy/kl_ref"] == pytest.approx(theirs["policy/kl_ref"], rel=RELATIVE)
        assert mine["policy/grad_norm"] == pytest.approx(theirs["policy/grad_norm"], rel=RELATIVE)


def test_teacher_with_another_tokenizer_is_refused(worker_pool, qwen3_dir, tmp_path):
    from tests.tiny_models import make_tokenizer, save_tiny_model

    teacher = save_tiny_model(tmp_path, "llama")
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(teacher)
    with pytest.raises(WorkerError, match="it must have the same tokenizer"):
        distil_job(worker_pool, "single", qwen3_dir, teacher, 1)


def test_teacher_that_the_layout_cannot_hold_is_named(worker_pool, qwen3_dir, qwen3_moe_dir):
    strategy = {"tensor_model_parallel_size": 2}
    with pytest.raises(WorkerError, match=rf"reference.model='{qwen3_moe_dir}': tensor_model_parallel_size=2 without"):
        worker_pool.run(distil, qwen3_dir, strategy, 2, qwen3_moe_dir, 1, world_size=2, init_process_group=False)
