"""Optimizer state of experts: one optimizer has all parameters, or under expert parallelism two share them."""

from functools import partial
from typing import Any

import pytest
from torch.optim.lr_scheduler import LambdaLR

from lightning_megatron_rl.models.layers.moe import MoESettings
from tests.modules.test_lora import resuming, saving
from tests.modules.test_moe import LAYOUTS
from tests.strategy.test_megatron import assert_same_run
from tests.tiny_models import save_tiny_model
from tests.training import Run, fit_sft


def halve(step: int) -> float:
    return 0.5**step


def job(pool: Any, model: Any, layout: str, strategy: dict[str, Any] | None = None, **options: Any) -> Run:
    world_size, sizes = LAYOUTS[layout]
    module = {"moe": MoESettings(aux_loss_coeff=0.0), "lr_scheduler": partial(LambdaLR, lr_lambda=halve)}
    arguments = (fit_sft, model, {**sizes, **(strategy or {})}, world_size)
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
