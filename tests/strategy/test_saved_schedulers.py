"""Resuming with other learning-rate schedulers than those of the checkpoint."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
    StepLR,
)

from lightning_megatron_rl.strategy.saved_schedulers import check_schedulers
from tests.notices import collected
from tests.training import fit_arithmetic


def in_turn(optimizer: Any, total_iters: int = 5, milestone: int = 3) -> SequentialLR:
    return SequentialLR(
        optimizer, [LinearLR(optimizer, total_iters=total_iters), CosineAnnealingLR(optimizer, 9)], [milestone]
    )


def both(optimizer: Any) -> ChainedScheduler:
    return ChainedScheduler([LinearLR(optimizer), ExponentialLR(optimizer, 0.9)])


KINDS: dict[str, Any] = {
    "lambda": partial(LambdaLR, lr_lambda=lambda step: 1 / (step + 1)),
    "step": partial(StepLR, step_size=3),
    "several steps": partial(MultiStepLR, milestones=[2, 4]),
    "constant": ConstantLR,
    "linear": LinearLR,
    "exponential": partial(ExponentialLR, gamma=0.9),
    "polynomial": PolynomialLR,
    "cosine": partial(CosineAnnealingLR, T_max=5),
    "restarts": partial(CosineAnnealingWarmRestarts, T_0=3, T_mult=2),
    "one cycle": partial(OneCycleLR, max_lr=0.1, total_steps=10),
    "cycles": partial(CyclicLR, base_lr=0.1, max_lr=0.2),
    "in turn": in_turn,
    "both": both,
}


def made(kind: Any, steps: int = 0) -> Any:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    scheduler = kind(optimizer)
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
    return scheduler


@pytest.mark.filterwarnings("ignore")  # of torch, about SequentialLR's own call
@pytest.mark.parametrize("name", KINDS)
def test_each_kind_goes_on_from_its_own_state_and_no_other(name):
    with collected() as messages:
        check_schedulers([made(KINDS[name])], [made(KINDS[name], steps=7).state_dict()])
    assert messages == []
    for other in KINDS.keys() - {name}:
        with pytest.raises(ValueError, match="another kind of lr_scheduler"):
            check_schedulers([made(KINDS[name])], [made(KINDS[other], steps=7).state_dict()])


@pytest.mark.parametrize(
    ("saved", "own", "told"),
    [
        (KINDS["linear"], partial(LinearLR, total_iters=50), "total_iters of LinearLR 5, not 50"),
        (KINDS["cosine"], partial(CosineAnnealingLR, T_max=90), "T_max of CosineAnnealingLR 5, not 90"),
        (KINDS["cycles"], partial(CyclicLR, base_lr=0.1, max_lr=0.3), "max_lrs of CyclicLR [0.2], not [0.3]"),
        (in_turn, partial(in_turn, milestone=8), "milestones of SequentialLR [3], not [8]"),
        (in_turn, partial(in_turn, total_iters=8), "total_iters of LinearLR 5, not 8"),
    ],
)
def test_other_settings_are_told(saved, own, told):
    with collected() as messages:
        check_schedulers([made(own)], [made(saved, steps=2).state_dict()])
    assert told in messages[0]


def resume(model: Any, directory: Any) -> dict[str, str]:
    """Go on with a warm-up where there was none, without the one there was, and with a longer one."""

    def fit(lr_scheduler: Any, **where: Any) -> None:
        fit_arithmetic(model, {}, 1, module={"lr_scheduler": lr_scheduler}, **where)

    warm_up = partial(LinearLR, start_factor=0.2, total_iters=8)
    fit(warm_up, max_steps=1, checkpoints=directory / "with")
    fit(None, max_steps=1, checkpoints=directory / "without")
    found = {}
    for name, lr_scheduler in {"with": None, "without": warm_up}.items():
        with pytest.raises(ValueError) as error:
            fit(lr_scheduler, max_steps=2, ckpt_path=str(directory / name / "step=1.ckpt"))
        found[name] = str(error.value)
    with collected() as messages:
        longer = partial(LinearLR, start_factor=0.2, total_iters=80)
        fit(longer, max_steps=2, ckpt_path=str(directory / "with" / "step=1.ckpt"))
    return {**found, "longer": " ".join(messages)}


def test_a_fit_does_not_go_on_with_another_schedule(worker_pool, qwen3_dir, tmp_path):
    """Added at step 1 of 8, a warm-up from a fifth of the learning rate would end at five times of it."""
    found = worker_pool.run(resume, qwen3_dir, tmp_path, world_size=1, init_process_group=False)[0]
    assert "saved with an lr_scheduler, and this run has no lr_scheduler" in found["with"]
    assert "saved with no lr_scheduler, and this run has an lr_scheduler" in found["without"]
    assert "goes on as the checkpoint has it: total_iters of LinearLR 8, not 80" in found["longer"]
