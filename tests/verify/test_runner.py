"""Real processes: right modules give one number in every layout, wrong ones are caught and the parameter is named."""

import sys
from functools import partial
from typing import Any

import pytest
import torch

from lightning_megatron_rl.models.layers.moe import MoESettings
from lightning_megatron_rl.verify.batch import FrozenBatch
from lightning_megatron_rl.verify.report import Report
from lightning_megatron_rl.verify.runner import verify_layouts
from tests.training import frozen_sequences
from tests.verify import subjects
from tests.verify.test_batch import recording

pytestmark = pytest.mark.deadline(600)  # a fixture runs a whole table of layouts, and may have to start the workers
# all layouts are in tests/strategy/test_invariance.py; here it is the tool that is looked at
SFT_LAYOUTS = ["microbatches", "tp2", "pp2_vpp2", "dp2", "dp2_plain"]
GRPO_LAYOUTS = ["microbatches", "tp2_sp", "dp2"]


@pytest.fixture(scope="module")
def sft_report(worker_pool, qwen3_dir) -> Report:
    return verify_layouts(partial(subjects.sft, qwen3_dir), SFT_LAYOUTS, pool=worker_pool)


@pytest.mark.parametrize("layout", SFT_LAYOUTS)
def test_sft_gives_the_numbers_of_one_process(sft_report, layout):
    row = sft_report[layout]
    assert row.verdict == "same", row.reason
    # beyond the verdict: whatever else the module logs about the batch, on the scale of a metric (fp32 sums)
    for mine, theirs in zip(row.metrics, sft_report["single"].metrics, strict=True):
        for name in ("policy/loss", "policy/entropy", "policy/grad_norm"):
            assert mine[name] == pytest.approx(theirs[name], rel=sft_report.tolerance), name


@pytest.fixture(scope="module")
def grpo_report(worker_pool, qwen3_dir) -> Report:
    return verify_layouts(partial(subjects.grpo, qwen3_dir), GRPO_LAYOUTS, pool=worker_pool)


@pytest.mark.slow
@pytest.mark.parametrize("layout", GRPO_LAYOUTS)
def test_grpo_gives_the_numbers_of_one_process(grpo_report, layout):
    row = grpo_report[layout]
    assert row.verdict == "same", row.reason
    reward = [step["reward/mean"] for step in row.metrics]
    assert reward == pytest.approx([step["reward/mean"] for step in grpo_report["single"].metrics])
    assert reward[0] == reward[1], "the same rollout in every step"


def test_a_critic_that_warms_up_does_not_hold_the_actor(worker_pool, qwen3_dir):
    """An actor without gradients was taken for a batch that teaches nothing."""
    report = verify_layouts(partial(subjects.ppo, qwen3_dir, warmup_rollouts=5), ["dp2"], pool=worker_pool)
    assert report["dp2"].verdict == "same", report
    assert all(norm > 0 for norm in report["dp2"].grad_norms)


def test_report_says_what_was_measured(sft_report):
    assert sft_report.ok, sft_report
    assert sft_report.exit_code == 0
    for row in sft_report.rows:
        assert row.step_s is not None
        assert row.step_s > 0
        assert row.peak_memory_gb is not None
        assert 0.05 < row.peak_memory_gb < 8
        assert len(row.checksum) == 8
        assert row.grad_norms[0] > 0
    assert sft_report["single"].losses[0] != sft_report["single"].losses[1]
    # the distributed optimizer does the same arithmetic on other shards
    assert sft_report["dp2"].checksum == sft_report["dp2_plain"].checksum
    assert sft_report["dp2"].checksum != sft_report["tp2"].checksum


def verify(pool: Any, model: Any, layouts: list[str], module: type | None = None, **options: Any) -> Report:
    build = partial(subjects.sft, model) if module is None else partial(subjects.sft, model, module=module)
    return verify_layouts(build, layouts, pool=pool, **{"steps": 1, **options})


def test_loss_normalised_by_local_tokens_is_caught(worker_pool, qwen3_dir):
    report = verify(worker_pool, qwen3_dir, ["microbatches", "dp2"], subjects.LocalMeanSFT)
    assert report.exit_code == 1
    for layout in ("microbatches", "dp2"):
        assert report[layout].verdict == "departs"
        assert "step 1: loss" in report[layout].reason
        assert "model.embed_tokens.weight departs by" in report[layout].reason
        assert report[layout].logprob_error is not None
        assert report[layout].logprob_error < 1e-5


def test_only_the_parameter_with_the_wrong_gradient_is_named(worker_pool, qwen3_dir):
    report = verify(worker_pool, qwen3_dir, ["microbatches", "pp2"], subjects.WrongNormGradientSFT)
    assert report["microbatches"].verdict == "same"
    assert "model.norm.weight departs by" in report["pp2"].reason
    assert "first in model order" not in report["pp2"].reason, "it is the only one"


def test_ranks_that_report_different_losses_are_caught(worker_pool, qwen3_dir):
    report = verify(worker_pool, qwen3_dir, ["tp2"], subjects.SplitPersonalitySFT)
    assert "step 1: rank 1 reports loss" in report["tp2"].reason


@pytest.mark.slow
def test_failure_in_a_step_is_no_refusal_and_the_next_layout_runs(worker_pool, qwen3_dir):
    report = verify(worker_pool, qwen3_dir, ["tp2", "microbatches"], subjects.FailingSFT)
    assert report["tp2"].verdict == "failed"
    assert report["tp2"].reason == "rank 1: ValueError: no good on rank 1"
    assert "Traceback" in report["tp2"].log
    assert report["microbatches"].verdict == "same"
    assert report.exit_code == 1


@pytest.mark.slow
def test_refusals_of_model_module_and_batch_are_listed_with_their_reason(worker_pool, qwen3_dir):
    report = verify(worker_pool, qwen3_dir, ["tp3", "dp2"], subjects.ImpatientSFT)
    assert report["tp3"].verdict == report["dp2"].verdict == "refused"
    assert "num_attention_heads=4 over tensor_model_parallel_size=3" in report["tp3"].reason
    assert report["dp2"].reason == "this module wants one replica"
    assert "dp2: asked for, but refused" in report.conclusion()
    few = FrozenBatch("two", frozen_sequences(2))
    report = verify(worker_pool, qwen3_dir, ["dp3"], batch=few)
    assert report["dp3"].reason == "2 sequences in the batch for 3 model replicas"


@pytest.mark.slow
def test_balance_loss_is_named_as_the_reason(worker_pool, qwen3_moe_dir):
    """It is a function of the micro-batch: without it the same division changes nothing."""
    report = verify(worker_pool, qwen3_moe_dir, ["microbatches"])
    assert report["microbatches"].verdict == "departs"
    assert "moe.aux_loss_coeff=0.01" in report.conclusion()
    build = partial(subjects.sft, qwen3_moe_dir, moe=MoESettings(aux_loss_coeff=0.0))
    report = verify_layouts(build, ["microbatches"], pool=worker_pool, steps=1)
    assert report.ok, report
    assert "note" not in report.conclusion()


@pytest.mark.slow
def test_interleaved_stages(worker_pool, qwen3_dir):
    """Five short sequences make two micro-batches, as many as stages."""
    batch = FrozenBatch("five", frozen_sequences(5))
    report = verify(worker_pool, qwen3_dir, ["pp2_vpp2"], steps=2, batch=batch)
    assert report.ok, report


@pytest.mark.slow
def test_uneven_stages_are_kept_for_pipelines_only(worker_pool, qwen3_dir):
    build = partial(subjects.sft, qwen3_dir, model_config={"num_layers_in_first_pipeline_stage": 1})
    report = verify_layouts(build, ["pp2", "tp2"], pool=worker_pool, steps=1)
    assert report.ok, report


def test_recorded_rollout_is_replayed(worker_pool, qwen3_dir, tmp_path):
    path = recording(tmp_path / "rollouts.jsonl", prompts=3, responses=4)
    build = partial(subjects.grpo, qwen3_dir, updates_per_rollout=1)
    report = verify_layouts(build, ["dp3", "dp2"], pool=worker_pool, steps=1, batch=path)
    assert report["dp3"].verdict == "same", report["dp3"].reason
    assert report["dp3"].metrics[0]["reward/mean"] == pytest.approx(1.5)  # rewards 0, 1, 2, 3 for every prompt
    assert report["dp2"].reason == (
        "3 prompts in the batch / (2 model replicas x 1 updates per rollout) = 1.5 is not whole"
    )


def test_batch_that_teaches_nothing_is_refused(worker_pool, qwen3_dir):
    with pytest.raises(ValueError, match=r"gradient norm in step 1 is 0: a batch that teaches nothing proves nothing"):
        verify(worker_pool, qwen3_dir, ["dp2"], subjects.BlindSFT)


def test_single_process_that_cannot_train_is_refused(worker_pool, qwen3_dir):
    build = partial(subjects.sft, qwen3_dir, model_config={"no_such_field": 1})
    with pytest.raises(ValueError, match=r"a single process cannot train: .*no_such_field"):
        verify_layouts(build, ["dp2"], pool=worker_pool)


def test_a_function_of_the_running_script_is_refused(monkeypatch):
    def build(layout):
        return subjects.sft("model", layout)

    build.__module__, build.__qualname__ = "__main__", "build"
    monkeypatch.setattr(sys.modules["__main__"], "build", build, raising=False)
    with pytest.raises(ValueError, match=r"of the script that is running.*at the top of an importable module"):
        verify_layouts(partial(build))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layouts": ["tp2", "tp8"]}, r"layout tp8: 8 processes > processes=4: raise processes or leave it out"),
        ({"layouts": ["tpp2"]}, r"unknown layout 'tpp2'"),
        ({"processes": 0}, r"processes=0 and steps=2 must be at least 1"),
        ({"steps": 0}, r"steps=0 must be at least 1"),
        ({"tolerance": 0.0}, r"tolerance=0 must be between 0 and 1"),
        ({"device": "tpu"}, r"device='tpu' must be 'cpu' or 'cuda'"),
        ({"batch": "nowhere.jsonl"}, r"nowhere.jsonl: no such file"),
        ({"build": lambda layout: None}, r"<lambda>.* cannot be sent to the worker processes"),
    ],
)
def test_arguments_that_cannot_be_are_refused_before_anything_starts(qwen3_dir, options, message):
    with pytest.raises(ValueError, match=message):
        verify_layouts(**{"build": partial(subjects.sft, qwen3_dir), **options})


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what must be absent")
def test_absent_cuda_is_refused_with_the_remedy(qwen3_dir):
    with pytest.raises(ValueError, match=r"device=cuda with processes=4: torch .* finds 0 CUDA devices.*device=cpu"):
        verify_layouts(partial(subjects.sft, qwen3_dir), device="cuda")
