"""Optimizer state of experts: one optimizer has all parameters, or under expert parallelism two share them."""

from functools import partial
from typing import Any

import pytest
from torch.optim.lr_scheduler import LambdaLR

from lightning_megatron_rl.models.moe import MoESettings
from tests.distributed import WorkerError
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


@pytest.mark.parametrize(("before", "after"), [("ep2", "single"), ("single", "ep2")])
def test_resume_with_other_expert_parallelism(worker_pool, model, tmp_path, before, after):
    """A whole model with a schedule that counts parameter groups, of which there are more under expert parallelism."""
    whole = job(worker_pool, model, before, **{**resuming(tmp_path), **saving(tmp_path), "ckpt_path": None})
    resumed = job(worker_pool, model, after, **resuming(tmp_path / "step=1.ckpt"))
    assert_same_run(resumed, Run(whole.steps[1:], whole.weights))


def test_state_that_is_not_sharded_stays_with_its_expert_parallelism(worker_pool, model, tmp_path):
    plain = {"use_distributed_optimizer": False}
    whole = job(worker_pool, model, "ep2", plain, **{**resuming(tmp_path), **saving(tmp_path), "ckpt_path": None})
    resumed = job(worker_pool, model, "ep2", plain, **resuming(tmp_path / "step=1.ckpt"))
    assert_same_run(resumed, Run(whole.steps[1:], whole.weights))
    with pytest.raises(WorkerError, match="the state cannot go from one to the other"):
        job(worker_pool, model, "single", plain, **resuming(tmp_path / "step=1.ckpt"))
