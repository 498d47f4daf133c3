"""One frozen batch, every layout, every number of micro-batches: one loss, one gradient norm, one set of weights.

Everything here is `verify_layouts`, which users run: the tool and the tests cannot disagree.
"""

from functools import partial
from typing import Any

import pytest
import torch

from lightning_megatron_rl.data.packing import TokenSequence
from lightning_megatron_rl.data.planning import plan_microbatches
from lightning_megatron_rl.modules.grpo_config import GRPOLossConfig
from lightning_megatron_rl.modules.shaping import OverlongSettings
from lightning_megatron_rl.verify.batch import FrozenBatch, make_batch
from lightning_megatron_rl.verify.report import Report
from lightning_megatron_rl.verify.runner import verify_layouts
from tests.selection import by_default
from tests.strategy.test_megatron import LAYOUTS, RELATIVE
from tests.tiny_models import SPECIAL_TOKENS, VOCAB_SIZE
from tests.verify import subjects


def assert_same(report: Report) -> None:
    """All rows are there, and none departs."""
    assert report.ok, report
    assert {row.verdict for row in report.rows} == {"reference", "same"}, report


# ---- SFT -----------------------------------------------------------------------------------------------------------

LENGTHS = (40, 38, 2, 17, 29, 5, 37, 11)
BUDGETS = {184: 1, 96: 2, 72: 3, 40: 5}  # max_tokens_per_microbatch: micro-batches of one process


def ragged_batch() -> FrozenBatch:
    """Random masks; the first of two replicas has no target at all, one of the other's sequences a single one."""
    generator = torch.Generator().manual_seed(11)
    sequences = []
    for index, length in enumerate(LENGTHS):
        tokens = torch.randint(len(SPECIAL_TOKENS), VOCAB_SIZE, (length,), generator=generator)
        mask = torch.rand(length, generator=generator) < 0.7
        mask[0] = False
        if index % 2 == 0:
            mask[:] = False
        if index == 1:
            mask = torch.arange(length) == length - 1
        sequences.append(TokenSequence(tokens, mask, {}))
    return FrozenBatch("ragged", sequences)


def verify_sft(pool: Any, model: Any, layouts: list[str], **options: Any) -> Report:
    """Two steps; one process takes the batch whole."""
    build = partial(subjects.sft, model, max_tokens_per_microbatch=max(BUDGETS), **options)
    world = max(LAYOUTS.get(name.partition("@")[0], (1, {}))[0] for name in layouts)
    return verify_layouts(build, layouts, batch=ragged_batch(), pool=pool, processes=world, tolerance=RELATIVE)


def test_the_budgets_split_the_batch():
    for budget, parts in BUDGETS.items():
        assert len(plan_microbatches(LENGTHS, budget)) == parts


def test_no_split_changes_a_number(worker_pool, qwen3_dir):
    assert_same(verify_sft(worker_pool, qwen3_dir, [f"single@{budget}" for budget in BUDGETS]))


@pytest.mark.parametrize(
    "layout", by_default(["tp2_sp", "cp2", "pp2_vpp2"], [name for name in LAYOUTS if LAYOUTS[name][0] == 2])
)
def test_no_layout_changes_a_number(worker_pool, qwen3_dir, layout):
    """As many micro-batches as there can be; all budgets are minutes on two cores."""
    assert_same(verify_sft(worker_pool, qwen3_dir, [f"{layout}@40"]))


@pytest.mark.parametrize("layout", by_default(["tp2_pp2_sp"], ["tp2_pp2_sp", "pp2_cp2", "cp2_dp2"]))
def test_no_product_of_layouts_changes_a_number(worker_pool, qwen3_dir, layout):
    """Three micro-batches; all products, budgets and eight processes take minutes on two cores."""
    assert_same(verify_sft(worker_pool, qwen3_dir, [f"{layout}@72"]))


@pytest.mark.slow
def test_padded_rows_change_no_number(worker_pool, qwen3_dir):
    """Rows of one sequence each instead of packed ones: short ones end in padding, and so do whole micro-batches."""
    packed = verify_sft(worker_pool, qwen3_dir, ["single@80"])
    padded = verify_sft(worker_pool, qwen3_dir, ["single@80", "tp2_sp@80", "cp2@80", "pp2_vpp2@80"], packing=False)
    for report in (packed, padded):
        assert_same(report)
    for name in ("losses", "grad_norms"):  # all others were compared with these two
        mine, theirs = (getattr(report["single"], name) for report in (padded, packed))
        assert mine == pytest.approx(theirs, rel=RELATIVE)


@pytest.mark.slow
@pytest.mark.deadline(600)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if LAYOUTS[name][0] >= 2])
def test_no_layout_changes_a_number_whatever_the_split(worker_pool, qwen3_dir, layout):
    assert_same(verify_sft(worker_pool, qwen3_dir, [f"{layout}@{budget}" for budget in BUDGETS]))


@pytest.mark.parametrize(
    "split",
    [
        {"num_layers_in_first_pipeline_stage": 1},
        pytest.param({"num_layers_in_last_pipeline_stage": 1}, marks=pytest.mark.slow),
        pytest.param(
            {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_uneven_pipeline_stages_change_no_number(worker_pool, qwen3_dir, split):
    assert_same(verify_sft(worker_pool, qwen3_dir, ["pp2@96"], model_config=split))


# ---- GRPO ----------------------------------------------------------------------------------------------------------

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "prompt_mean")
ROLLOUT_BUDGETS = {400: (1, 1), 160: (2, 2), 80: (3, 3), 56: (5, 4)}  # tokens: micro-batches of the two updates


def verify_grpo(pool: Any, model: Any, loss: GRPOLossConfig, layouts: list[str], **options: Any) -> Report:
    """One rollout and two updates on it; one process takes each update's part whole. One response is empty."""
    build = partial(subjects.grpo, model, loss=loss, max_tokens_per_microbatch=max(ROLLOUT_BUDGETS), **options)
    batch = make_batch(build({}).module, None, processes=2)
    world = max(LAYOUTS.get(name.partition("@")[0], (1, {}))[0] for name in layouts)
    # vespo: A log π of some 4 each cancel to a loss of 0.2, and φ takes up to k = 3 times the rounding of w, of 1e-5
    tolerance = 1e-4 if loss.policy_loss == "vespo" else RELATIVE
    return verify_layouts(build, layouts, batch=batch, pool=pool, processes=world, steps=1, tolerance=tolerance)


def test_the_budgets_split_an_update(qwen3_dir):
    batch = make_batch(subjects.grpo(qwen3_dir, {}).module, None, processes=2)
    lengths = [len(sequence) for sequence in batch.sequences]
    for budget, parts in ROLLOUT_BUDGETS.items():
        updates = lengths[: len(lengths) // 2], lengths[len(lengths) // 2 :]
        assert tuple(len(plan_microbatches(update, budget)) for update in updates) == parts


@pytest.mark.deadline(300)
@pytest.mark.parametrize("aggregation", by_default(["prompt_mean"], AGGREGATIONS))
def test_no_layout_and_no_split_changes_an_update(worker_pool, qwen3_dir, aggregation):
    """Loss, gradient norm and weights of both updates, with KL to a reference, entropy and importance weights."""
    loss = GRPOLossConfig(kl_coef=0.1, entropy_coef=0.01, aggregation=aggregation)
    layouts = ["single@56", "dp2@56", "pp2@160"]
    if aggregation == "prompt_mean":  # its denominators are of several sequences
        layouts += ["cp2_dp2@80", "pp2_vpp2@160", "tp2_sp@400"]
    assert_same(verify_grpo(worker_pool, qwen3_dir, loss, layouts))


@pytest.mark.slow
@pytest.mark.deadline(900)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_layout_changes_an_update_whatever_the_split(worker_pool, qwen3_dir, aggregation, layout):
    loss = GRPOLossConfig(kl_coef=0.1, entropy_coef=0.01, aggregation=aggregation)
    names = [f"{layout}@{budget}" for budget in ROLLOUT_BUDGETS]
    assert_same(verify_grpo(worker_pool, qwen3_dir, loss, names))


# ---- algorithms ----------------------------------------------------------------------------------------------------

ALGORITHMS = {
    "ppo_clip": {"clip_low": 0.01, "clip_high": 0.02, "kl_coef": 0.1, "kl_importance_weighting": True},
    "gspo": {"policy_loss": "gspo", "aggregation": "seq_mean_token_mean", "clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {
        "policy_loss": "cispo",
        "advantage": "reinforce_pp",
        "kl_coef": 0.1,
        "kl_estimator": "k1",
        "kl_in": "reward",
    },
    "sapo": {"policy_loss": "sapo", "advantage": "reinforce_pp_baseline", "correction": "icepop", "kl_coef": 0.1},
    "geo_mask": {"advantage": "rloo", "correction": "geo_mask", "geo_mask_low": 0.3, "geo_mask_high": 3.0},
    "tis_sequence": {"advantage": "dr_grpo", "correction_level": "sequence", "kl_coef": 0.1, "kl_estimator": "k2"},
    "luspo": {"policy_loss": "luspo", "aggregation": "seq_mean_token_sum", "clip_low": 3e-4, "clip_high": 4e-4},
    "vespo": {"policy_loss": "vespo", "correction": "geo_mask", "geo_mask_low": 0.3, "geo_mask_high": 3.0},
    "masks": {"off_policy_mask_threshold": 0.5, "top_entropy_quantile": 0.5, "entropy_coef": 0.01},
    "bypass": {"correction": None, "bypass": True, "entropy_coef": 0.01},
}
OVERLONG = OverlongSettings(penalty=1.0, buffer=0.5, filter=True)


@pytest.mark.deadline(300)
@pytest.mark.parametrize(
    ("name", "layout"),
    by_default(
        [("gspo", "cp2_dp2@80"), ("sapo", "pp2@160")],
        [("gspo", "cp2_dp2@80"), ("masks", "cp2_dp2@80"), ("cispo", "dp2@56"), ("sapo", "pp2@160")],
        several=True,
    ),
)
def test_no_layout_changes_a_loss(worker_pool, qwen3_dir, name, layout):
    """Those that need more than their own tokens: gspo and the off-policy mask a sequence's, cut over ranks;
    reinforce_pp and the mask of low entropies those of all replicas."""
    loss = GRPOLossConfig(**ALGORITHMS[name])
    assert_same(verify_grpo(worker_pool, qwen3_dir, loss, [layout], overlong=OVERLONG))


@pytest.mark.slow
@pytest.mark.deadline(900)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_layout_changes_any_loss(worker_pool, qwen3_dir, name):
    layouts = ["tp2@80", "tp2_sp@400", "pp2@56", "dp2@56", "cp2@80", "cp2_dp2@400", "pp2_vpp2@160"]
    assert_same(verify_grpo(worker_pool, qwen3_dir, GRPOLossConfig(**ALGORITHMS[name]), layouts, overlong=OVERLONG))
