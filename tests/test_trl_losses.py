"""Losses and gradients that TRL computed (benchmarks/trl_losses.py), computed again with this project's settings."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron_rl.algorithms.preferences import DPO_LOSSES, side_gradients
from lightning_megatron_rl.algorithms.tally import Tally
from lightning_megatron_rl.data.packing import TokenSequence, make_microbatches
from lightning_megatron_rl.modules.dpo import DPOModule
from lightning_megatron_rl.modules.grpo_config import GRPOLossConfig
from lightning_megatron_rl.modules.grpo_loss import GRPOLoss
from lightning_megatron_rl.modules.rollout_batch import Rollout
from tests.command_line import ROOT

FIGURES = json.loads((ROOT / "benchmarks" / "results" / "trl_losses.json").read_text())
# TRL keeps a few of its settings, such as sapo's temperatures, as fp32 tensors: a rounding of 6e-8, at most ten of them
TOLERANCE = 6e-7

SEQUENCE_MEAN = {"aggregation": "seq_mean_token_mean"}
GSPO = {"policy_loss": "gspo", **SEQUENCE_MEAN, "clip_low": 0.03, "clip_high": 0.04}
DAPO = {"clip_high": 0.28}
OURS: dict[str, dict[str, Any]] = {
    "grpo": SEQUENCE_MEAN,
    "dr_grpo": {"aggregation": "seq_mean_token_sum_norm"},
    "dapo": DAPO,
    "two_sided": {"dual_clip": 1.5},
    "cispo": {"policy_loss": "cispo", "clip_high": 0.2},
    "sapo": {"policy_loss": "sapo", **SEQUENCE_MEAN},
    "gspo": GSPO,
    "luspo": {"policy_loss": "luspo", "aggregation": "seq_mean_token_sum", "clip_low": 0.03, "clip_high": 0.04},
    "luspo_token": {"aggregation": "seq_mean_token_sum"},
    "vespo": {"policy_loss": "vespo"},
    "vespo_settings": {
        "policy_loss": "vespo",
        "vespo_k_positive": 1.5,
        "vespo_lambda_positive": 2.5,
        "vespo_k_negative": 2.5,
        "vespo_lambda_negative": 1.5,
    },
    "kl": {"kl_coef": 0.1},
    "kl_weighted": {"kl_coef": 0.1, "kl_importance_weighting": True},
    "entropy_bonus": {"entropy_coef": 0.01},
    "off_policy_mask": {**SEQUENCE_MEAN, "off_policy_mask_threshold": 0.05},
    "off_policy_mask_gspo": {**GSPO, "off_policy_mask_threshold": 0.05},
    "top_entropy": {"top_entropy_quantile": 0.2},
    "top_entropy_half": {**SEQUENCE_MEAN, "top_entropy_quantile": 0.5, "kl_coef": 0.1},
    "top_entropy_one": {"top_entropy_quantile": 0.0},
}
TOKEN_MASK, SEQUENCE_MASK = {"icepop_low": 0.8, "icepop_high": 1.25}, {"icepop_low": 0.7, "icepop_high": 1.5}
for _name, _loss in (("dapo", DAPO), ("gspo", GSPO)):
    # what a loss of sequences is corrected by without being told is a weight per sequence
    OURS[f"{_name}_token_truncate"] = {**_loss, "correction": "tis", "correction_cap": 1.2, "correction_level": "token"}
    OURS[f"{_name}_token_mask"] = {**_loss, "correction": "icepop", **TOKEN_MASK, "correction_level": "token"}
    _level = {"correction_level": "sequence"} if _name == "dapo" else {}
    OURS[f"{_name}_sequence_truncate"] = {**_loss, "correction": "tis", "correction_cap": 1.2, **_level}
    OURS[f"{_name}_sequence_mask"] = {**_loss, "correction": "icepop", **SEQUENCE_MASK, **_level}
OURS["vespo_token_truncate"] = {"policy_loss": "vespo", "correction": "tis", "correction_cap": 1.2}
OURS["vespo_token_mask"] = {"policy_loss": "vespo", "correction": "icepop", **TOKEN_MASK}


@pytest.fixture(scope="module")
def rows() -> dict[str, Tensor]:
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in FIGURES["batch"].items()}


def assert_close(loss: Tensor, gradient: Tensor, theirs: dict[str, Any]) -> None:
    expected = torch.tensor(theirs["gradient"], dtype=torch.float64)
    assert loss.item() == pytest.approx(theirs["loss"], rel=TOLERANCE)
    assert (gradient - expected).norm() <= TOLERANCE * expected.norm()
    assert torch.equal(gradient != 0, expected != 0)  # the same tokens are clipped and masked


def test_every_case_of_trl_has_its_settings_here():
    assert FIGURES["versions"]["trl"] == "1.16.0"
    assert FIGURES["grpo"].keys() == OURS.keys()
    assert FIGURES["dpo"].keys() == DPO_LOSSES.keys()


@pytest.mark.parametrize("plan", [[[0, 1, 2, 3, 4, 5]], [[4, 1], [0], [5, 2, 3]]], ids=["whole", "micro-batches"])
@pytest.mark.parametrize("name", OURS)
def test_grpo(name: str, plan: list[list[int]], rows: dict[str, Tensor]):
    config = GRPOLossConfig(**{"dual_clip": None, "correction": None, **OURS[name]})
    loss = GRPOLoss(config)
    mask = rows["mask"].bool()
    with_prompt = {
        field: torch.nn.functional.pad(values, (1, 0)) for field, values in rows.items() if values.dim() == 2
    }
    whole_mask = torch.nn.functional.pad(mask, (1, 0))
    fields = ("old_logprobs", "rollout_logprobs", "ref_logprobs", "entropies")
    sequences = [
        TokenSequence(
            torch.arange(10),
            whole_mask[row],
            {field: with_prompt[field][row] for field in fields} | {"advantages": rows["advantages"][row].expand(10)},
        )
        for row in range(6)
    ]
    rollout = Rollout([None] * 6, sequences, num_generations=1)  # type: ignore[list-item]
    rollout.set_correction_weights(loss)
    if config.top_entropy_quantile < 1:
        rollout.set_entropies([sequence.fields["entropies"] for sequence in sequences])
    rollout.set_top_entropy(loss, lambda total: total)
    weights = loss.token_weights(
        mask.sum(1), torch.arange(6), max_response_length=FIGURES["max_response"], all_reduce=lambda total: total
    )
    logprobs = rows["logprobs"].clone().requires_grad_()
    padded = torch.nn.functional.pad(logprobs, (0, 1))  # a position's label is the next token
    value = torch.zeros((), dtype=torch.float64)
    for batch in make_microbatches(sequences, plan, packed=len(plan) == 1):
        current = padded[batch.sequence_index, batch.position_ids.clamp(max=9)]
        losses = loss(batch, current, batch.fields["entropies"], Tally())
        value = value + torch.where(batch.mask, losses * weights[batch.sequence_index], 0.0).sum()
    value = value / mask.sum()
    (gradient,) = torch.autograd.grad(value, logprobs)
    assert_close(value, gradient, FIGURES["grpo"][name])


@pytest.mark.parametrize("name", DPO_LOSSES)
def test_dpo(name: str, rows: dict[str, Tensor]):
    """The two passes of DPOModule: values of the sides, then the derivative by each token's log-prob."""
    case = FIGURES["dpo"][name]
    module = DPOModule("nothing", loss=name, **{"beta": 0.3, **case["settings"]})  # type: ignore[arg-type]
    mask = rows["mask"].bool()
    sides = [TokenSequence(torch.arange(10), torch.nn.functional.pad(row, (1, 0))) for row in mask]
    shares = torch.tensor([module.token_share(side) for side in sides], dtype=torch.float64)
    ratios = torch.where(mask, rows["logprobs"] - rows["ref_logprobs"], 0.0)
    losses, *gradients = side_gradients(module.pair_loss, *(ratios.sum(1) * shares).chunk(2))
    gradient = mask * (torch.cat(gradients) * shares)[:, None] / len(losses)
    assert_close(losses.mean(), gradient, case)
