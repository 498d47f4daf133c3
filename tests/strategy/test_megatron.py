"""The layout cannot change the numbers: every layout against a single process, and that against Transformers."""

from contextlib import closing
from typing import Any

import pytest
import torch

from lightning_megatron_rl.verify.layouts import parse_layout
from tests.distributed import WorkerPool
from tests.training import Run, fit_sft, frozen_sequences

# Reassociated fp32 sums differ by some 1e-7 relative; two optimizer steps through 4 layers leave room for 1e-5.
RELATIVE = 1e-5

NAMES = (
    "tp2 tp2_sp pp2 dp2 dp2_plain tp2_pp2_sp tp2_dp2_sp pp2_dp2 cp2 tp2_cp2_sp pp2_cp2 cp2_dp2 cp4 pp2_vpp2"
    " pp2_vpp2_cp2 tp2_pp2_cp2_sp tp2_pp2_vpp2_dp2_sp"
)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # processes, arguments of the strategy
    name: (parse_layout(name).world_size, parse_layout(name).strategy) for name in NAMES.split()
}


def assert_same_run(run: Run, reference: Run, relative: float = RELATIVE) -> None:
    """Loss and gradient norm of each step and the final weights agree."""
    assert len(run.steps) == len(reference.steps)
    for mine, theirs in zip(run.steps, reference.steps, strict=True):
        for name in ("policy/loss", "policy/grad_norm", "policy/entropy"):
            assert mine[name] == pytest.approx(theirs[name], rel=relative), name
    assert run.weights.keys() == reference.weights.keys()
    for name, weight in reference.weights.items():
        error = (run.weights[name] - weight).norm() / weight.norm()
        assert error <= relative, f"{name}: {error:.1e}"


@pytest.fixture(scope="module")
def reference(worker_pool, qwen3_dir) -> Run:
    return worker_pool.run(fit_sft, qwen3_dir, {}, 1, world_size=1, init_process_group=False)[0]


@pytest.mark.parametrize("module", [{"max_tokens_per_microbatch": 40}, {"packing": False}])
def test_microbatches_and_padding_do_not_change_the_numbers(worker_pool, qwen3_dir, reference, module):
    run = worker_pool.run(fit_sft, qwen3_dir, {}, 1, module=module, world_size=1, init_process_group=False)[0]
    assert_same_run(run, reference)


def test_one_process_equals_transformers(qwen3_dir, reference):
    """Loss and gradient norm of the first step from Transformers in fp32 and a plain backward."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(qwen3_dir, dtype=torch.float32)
    total, count = torch.zeros(()), 0
    for sequence in frozen_sequences(8)[:4]:
        logprobs = model(sequence.token_ids[None]).logits[0, :-1].log_softmax(-1)
        target = sequence.token_ids[1:]
        mask = sequence.loss_mask[1:]
        total = total - logprobs.gather(-1, target[:, None])[mask].sum()
        count += int(mask.sum())
    loss = total / count
    loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    assert reference.steps[0]["policy/loss"] == pytest.approx(loss.item(), rel=RELATIVE)
    assert reference.steps[0]["policy/grad_norm"] == pytest.approx(norm.item(), rel=RELATIVE)


def test_tied_embeddings_under_pipeline_parallelism(worker_pool, tied_dir):
    """Two copies of one weight on two stages get one gradient."""
    single = worker_pool.run(fit_sft, tied_dir, {}, 1, world_size=1, init_process_group=False)[0]
    for layout in ("pp2", "pp2_vpp2"):
        split = worker_pool.run(
            fit_sft, tied_dir, *reversed(LAYOUTS[layout]), world_size=LAYOUTS[layout][0], init_process_group=False
        )[0]
        assert_same_run(split, single)


def test_clipping_and_schedule(worker_pool, qwen3_dir):
    """`gradient_clip_val` clips by the global norm, and the norm before clipping is logged, in every layout."""
    trainer = {"gradient_clip_val": 0.1}
    single = worker_pool.run(fit_sft, qwen3_dir, {}, 1, trainer=trainer, world_size=1, init_process_group=False)[0]
    split = worker_pool.run(
        fit_sft, qwen3_dir, *reversed(LAYOUTS["tp2_sp"]), trainer=trainer, world_size=2, init_process_group=False
    )[0]
    assert_same_run(split, single)
    assert single.steps[0]["policy/grad_norm"] > 0.1


def test_bf16_mixed_follows_fp32(worker_pool, qwen3_dir, reference):
    """bf16 keeps 8 bits: a loss of some 5 agrees to better than 2 %, and not to the digits of fp32.

    Fails when the Trainer's `precision` does not reach the strategy.
    """
    run = worker_pool.run(
        fit_sft, qwen3_dir, {}, 1, trainer={"precision": "bf16-mixed"}, world_size=1, init_process_group=False
    )[0]
    for mine, theirs in zip(run.steps, reference.steps, strict=True):
        assert mine["policy/loss"] == pytest.approx(theirs["policy/loss"], rel=2e-2)
        assert mine["policy/loss"] != pytest.approx(theirs["policy/loss"], rel=RELATIVE)


@pytest.mark.slow
def test_two_nodes_give_the_numbers_of_one(worker_pool, qwen3_dir):
    """The same sums in the same order, bit by bit; local ranks differ from global ones."""
    layout = {"world_size": 2, "init_process_group": False}
    one = worker_pool.run(fit_sft, qwen3_dir, *reversed(LAYOUTS["tp2_sp"]), **layout)[0]
    with closing(WorkerPool(2, nodes=2)) as nodes:
        two = nodes.run(fit_sft, qwen3_dir, *reversed(LAYOUTS["tp2_sp"]), **layout)[0]
    assert_same_run(two, one, relative=0.0)
