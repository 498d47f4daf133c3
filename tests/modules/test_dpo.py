"""DPO: the plain formula's number, in every layout, with a frozen copy or the policy without adapters as reference."""

from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from lightning_megatron_rl.models.layers.lora import LoRASettings
from lightning_megatron_rl.modules.dpo import DPOModule
from tests.distributed import WorkerError
from tests.module_options import nested
from tests.modules.preference_runs import fit_pairs, frozen_pairs
from tests.selection import by_default
from tests.strategy.test_megatron import LAYOUTS, RELATIVE
from tests.training import Run

LOSSES = [{"beta": 0.3, "label_smoothing": 0.1}, {"loss": "ipo", "beta": 0.3}]


def job(pool: Any, model: Any, layout: str = "single", **kwargs: Any) -> list[Run]:
    world_size, strategy = {**LAYOUTS, "single": (1, {})}[layout]
    arguments = ("dpo", model, strategy, world_size)
    return pool.run(fit_pairs, *arguments, world_size=world_size, init_process_group=False, **kwargs)


def assert_same(runs: list[Run], reference: Run) -> None:
    """Everything that is logged, and the final weights."""
    for run in runs:
        assert run.steps == runs[0].steps, "a rank logged something else"
    for mine, theirs in zip(runs[0].steps, reference.steps, strict=True):
        for name, value in theirs.items():
            if name.startswith(("policy/", "preference/")):
                # margins of a second step are differences of sums of some 20 log-probs of the size of 5
                floor = 20 * 5 * 1e-6 * name.startswith("pref")
                assert mine[name] == pytest.approx(value, rel=RELATIVE, abs=floor), name
    for name, weight in reference.weights.items():
        error = (runs[0].weights[name] - weight).norm() / weight.norm()
        assert error <= RELATIVE, f"{name}: {error:.1e}"


@pytest.fixture(scope="module", params=LOSSES, ids=["sigmoid", "ipo"])
def method(request) -> dict[str, Any]:
    return request.param


@pytest.fixture(scope="module")
def reference(worker_pool, qwen3_dir, method) -> Run:
    return job(worker_pool, qwen3_dir, module=method, validate=True)[0]


@pytest.mark.parametrize("layout", by_default(["tp2_sp", "dp2"], ["tp2_sp", "pp2", "dp2", "cp2"]))
def test_layout_gives_the_numbers_of_one_process(worker_pool, qwen3_dir, method, reference, layout):
    assert_same(job(worker_pool, qwen3_dir, layout, module=method), reference)


def plain_values(model: Any, frozen: Any, pairs: list[Any], averaged: bool) -> tuple[torch.Tensor, torch.Tensor]:
    def value(sequence: Any) -> torch.Tensor:
        def logprobs(of: Any) -> torch.Tensor:
            table = of(sequence.token_ids[None]).logits[0, :-1].log_softmax(-1)
            return table.gather(-1, sequence.token_ids[1:, None])[:, 0][sequence.loss_mask[1:]]

        with torch.no_grad():
            fixed = logprobs(frozen)
        ratios = logprobs(model) - fixed
        return ratios.mean() if averaged else ratios.sum()

    return (
        torch.stack([value(pair.chosen) for pair in pairs]),
        torch.stack([value(pair.rejected) for pair in pairs]),
    )


def plain_loss(method: dict[str, Any], chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    if "loss" in method:
        return (chosen - rejected - 1 / (2 * method["beta"])).square().mean()
    margin, smoothing = method["beta"] * (chosen - rejected), method["label_smoothing"]
    return (-(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)).mean()


def test_two_steps_equal_transformers_and_autograd(qwen3_dir, method, reference):
    """Both steps written down again: in the second one the policy is no longer its reference."""
    model, frozen = (AutoModelForCausalLM.from_pretrained(qwen3_dir, dtype=torch.float32) for _ in range(2))
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.999), eps=1e-3)
    pairs = frozen_pairs(8)
    for step, batch in zip(reference.steps, (pairs[:4], pairs[4:]), strict=True):
        chosen, rejected = plain_values(model, frozen, batch, averaged="loss" in method)
        loss = plain_loss(method, chosen, rejected)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
        assert step["policy/loss"] == pytest.approx(loss.item(), rel=RELATIVE)
        assert step["policy/grad_norm"] == pytest.approx(norm.item(), rel=RELATIVE)
        margin = method["beta"] * (chosen - rejected).mean().item()
        # a first margin is exactly 0: both sides are the reference's
        assert step["preference/margin"] == pytest.approx(margin, rel=1e-4, abs=1e-6)
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert (reference.weights[name] - parameter).norm() / parameter.norm() <= RELATIVE, name


def test_the_first_step_starts_at_the_reference(reference, method):
    step = reference.steps[0]
    assert step["preference/chosen"] == step["preference/rejected"] == 0.0
    assert reference.extra["val"]["val/margin"] != 0.0


@pytest.mark.slow
def test_adapters_off_are_the_reference(worker_pool, qwen3_dir):
    """With B = 0 the first step starts at the reference; in the second one the adapters are away from it."""
    module = {"lora": LoRASettings(rank=4, alpha=8)}
    alone = job(worker_pool, qwen3_dir, module=module, optimizer={"lr": 1e-2})[0]
    assert alone.steps[0]["preference/chosen"] == 0.0
    assert alone.steps[1]["preference/chosen"] != 0.0
    assert_same(job(worker_pool, qwen3_dir, "tp2_sp", module=module, optimizer={"lr": 1e-2}), alone)


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_pair_without_a_response_is_refused(worker_pool, qwen3_dir, loss):
    """Of a loader of one's own: its log-ratio was taken for 0, and the mean over its tokens was a division by zero."""
    pairs = frozen_pairs(4)
    pairs[2].rejected.loss_mask[:] = False
    pairs[2].rejected.origin = "pair 2"
    with pytest.raises(WorkerError, match=r"pair 2 has no target among its \d+ tokens: .* Leave such pairs out"):
        job(worker_pool, qwen3_dir, pairs=pairs, steps=1, module={"loss": loss})


def test_frozen_copy_counts_in_the_plan_of_a_gpus_memory():
    assert DPOModule("nothing").frozen_copies == 1
    assert DPOModule("nothing", **nested({"lora": LoRASettings()})).frozen_copies == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 0.0}, r"beta=0\.0"),
        ({"beta": float("nan")}, r"beta=nan"),
        (
            {"loss": "aot"},
            r"unknown loss 'aot': choose one of apo_down, .*, hinge, ipo, .*, sigmoid, sigmoid_norm, sppo",
        ),
        ({"loss": "hinge", "label_smoothing": 0.1}, r"loss='hinge', which has none: .* exo_pair, robust, sigmoid"),
        ({"loss": "exo_pair"}, r"label_smoothing=0 with loss='exo_pair', which takes its logarithm: .* 1e-3 is usual"),
        ({"loss": "discopop", "discopop_tau": 0.0}, r"discopop_tau=0\.0 must be in \(0, 1\]"),
        ({"loss": "discopop", "discopop_tau": 1.5}, r"discopop_tau=1\.5"),
        ({"label_smoothing": 0.5}, r"label_smoothing=0\.5"),
        ({"loss": "ipo", "label_smoothing": 0.1}, r"label_smoothing=0\.1 with loss='ipo'"),
        ({"logprob_chunk_size": 0}, "logprob_chunk_size=0"),
    ],
)
def test_settings_that_cannot_train_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DPOModule("nothing", **nested(options))
