"""Optimizer state of experts: one optimizer has all parameters, or under expert parallelism two share them."""

from functools import partial
from typing import Any

import pytest
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from lightning_megatron_rl.models.layers.moe import MoESettings
from tests.modules.test_lora import resuming, saving
from tests.modules.test_moe import LAYOUTS
from tests.notices import collected
from tests.strategy.test_megatron import assert_same_run
from tests.tiny_models import save_tiny_model
from tests.training import Run, fit_sft


def halve(step: int) -> float:
    return 0.5**step


def job(pool: Any, model: Any, layout: str, strategy: dict[str, Any] | None = None, run: Any = fit_sft, **options: Any):
    world_size, sizes = LAYOUTS[layout]
    scheduler = options.pop("lr_scheduler", partial(LambdaLR, lr_lambda=halve))
    module = {"moe": MoESettings(aux_loss_coeff=0.0), "lr_scheduler": scheduler}
    arguments = (run, model, {**sizes, **(strategy or {})}, world_size)
    return pool.run(*arguments, world_size=world_size, init_process_group=False, module=module, **options)[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("qwen3_moe"), "qwen3_moe")


@pytest.mark.parametrize(
    ("before", "after"), [pytest.param("ep2", "single", marks=pytest.mark.slow), ("single", "ep2")]
)
def test_resume_with_other_expert_parallelism(worker_pool, model, tmp_path, before, after):
    """A whole model with a schedule that counts parameter groups, of which there are more under expert parallelism."""
    whole = job(worker_pool, model, before, **{**resuming(tmp_path), **saving(tmp_path), "ckpt_path": None})
    resumed = job(worker_pool, model, after, **resuming(tmp_path / "step=1.ckpt"))
    assert_same_run(resumed, Run(whole.steps[1:], whole.weights))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(("ep2", False), ("single", False), marks=pytest.mark.slow),
        (("single", True), ("ep2", False)),
        (("ep2", False), ("ep2", True)),
    ],
    ids=["plain", "to_plain", "from_plain"],
)
def test_resume_with_and_without_the_distributed_optimizer(worker_pool, model, tmp_path, before, after):
    """In any layout of the experts too: a state belongs to a parameter, not to an optimizer's number for it."""
    first, second = ({"use_distributed_optimizer": sharded} for _, sharded in (before, after))
    whole = job(worker_pool, model, before[0], first, **{**resuming(tmp_path), **saving(tmp_path), "ckpt_path": None})
    resumed = job(worker_pool, model, after[0], second, **resuming(tmp_path / "step=1.ckpt"))
    assert_same_run(resumed, Run(whole.steps[1:], whole.weights))


def fit_noting(model: Any, sizes: dict[str, Any], world_size: int, **options: Any) -> tuple[Run, list[str]]:
    """A run, and what it told its user."""
    with collected() as told:
        return fit_sft(model, sizes, world_size, **options), told


@pytest.mark.parametrize(("before", "after"), [("ep2", "ep2"), pytest.param("single", "ep2", marks=pytest.mark.slow)])
def test_resume_with_a_schedule_that_writes_what_groups_are_told_by(worker_pool, model, tmp_path, before, after):
    """`OneCycleLR` has a `max_lr` of its own, and betas that move: no setting of the resumed run is ignored."""
    schedule = {"lr_scheduler": partial(OneCycleLR, max_lr=2e-3, total_steps=10)}
    whole, _ = job(
        worker_pool,
        model,
        before,
        run=fit_noting,
        **saving(tmp_path),
        **resuming(tmp_path) | {"ckpt_path": None},
        **schedule,
    )
    resumed, told = job(worker_pool, model, after, run=fit_noting, **resuming(tmp_path / "step=1.ckpt"), **schedule)
    assert_same_run(resumed, Run(whole.steps[1:], whole.weights))
    assert not [message for message in told if "goes on as the checkpoint has it" in message]
