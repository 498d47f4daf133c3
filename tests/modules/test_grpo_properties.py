"""Properties of the objective as a whole, searched by hypothesis: micro-batches as they are laid out for the model."""

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron_rl.data.planning import plan_microbatches
from lightning_megatron_rl.modules.grpo_config import GRPOLossConfig
from tests.algorithms.ranks import run_ranks
from tests.modules.test_grpo_loss import SETTINGS, batch, gradient, our_loss, plain_loss
from tests.properties import PROPERTY, SEEDS, cuts

# float64 sums of some hundred terms in another order
VALUE, GRADIENT = {"rtol": 1e-11, "atol": 1e-13}, {"rtol": 1e-10, "atol": 1e-13}


@pytest.mark.parametrize("name", SETTINGS)
@PROPERTY
@given(data=st.data(), seed=SEEDS, groups=st.integers(1, 4), packed=st.booleans())
def test_any_order_and_cut_gives_the_plain_formula(
    name: str, data: st.DataObject, seed: int, groups: int, packed: bool
):
    config = GRPOLossConfig(**SETTINGS[name])
    sequences, logprobs = batch(seed, groups)
    parts = our_loss(config, sequences, logprobs, data.draw(cuts(len(sequences))), packed=packed)
    formula = plain_loss(config, sequences, logprobs)
    torch.testing.assert_close(parts, formula, **VALUE)
    torch.testing.assert_close(gradient(parts, logprobs), gradient(formula, logprobs), **GRADIENT)


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "vespo", "off_policy", "k3", "tis_sequence"])
@PROPERTY
@given(seed=SEEDS, budget=st.integers(20, 200), ranks=st.sampled_from([1, 2, 4]))
def test_any_token_budget_and_context_parallel_size(name: str, seed: int, budget: int, ranks: int):
    """The micro-batches that a budget gives, each sequence cut over ranks, some of which hold none of a response."""
    config = GRPOLossConfig(**SETTINGS[name])
    sequences, logprobs = batch(seed)
    whole = our_loss(config, sequences, logprobs, [list(range(len(sequences)))])
    plan = plan_microbatches([len(sequence) for sequence in sequences], budget)

    def rank(number: int, all_reduce) -> torch.Tensor:
        return our_loss(config, sequences, logprobs, plan, share=(ranks, number), all_reduce=all_reduce)

    shares = run_ranks([functools.partial(rank, number) for number in range(ranks)])
    torch.testing.assert_close(sum(shares), whole, **VALUE)
    torch.testing.assert_close(gradient(sum(shares), logprobs), gradient(whole, logprobs), **GRADIENT)
