"""The objective as a whole: plain formulas in float64, and any cut into micro-batches and shares gives one number."""

import functools
import random

import pytest
import torch
from torch import Tensor

from lightning_megatron_rl import algorithms
from lightning_megatron_rl.algorithms import LinearSchedule, Tally
from lightning_megatron_rl.algorithms.policy_losses import gspo
from lightning_megatron_rl.data.packing import MicroBatch, TokenSequence, context_parallel_share, make_microbatches
from lightning_megatron_rl.data.planning import MicroBatchRules
from lightning_megatron_rl.modules.grpo_config import GRPOLossConfig
from lightning_megatron_rl.modules.grpo_loss import TOP_ENTROPY_FIELD, GRPOLoss
from tests.algorithms.ranks import run_ranks

GROUP = 4  # responses per prompt
MAX_RESPONSE = 12
USUAL_CLIPS = {"gspo": (3e-4, 4e-4), "luspo": (2e-3, 2.5e-3), "cispo": (0.2, 4.0)}  # of their papers
SETTINGS = {
    "ppo_clip": {"policy_loss": "ppo_clip", "clip_high": 0.28},
    "prompt_mean": {"policy_loss": "ppo_clip", "aggregation": "prompt_mean", "dual_clip": None},
    # the correction is per sequence by default: with a weight per token, token form and sequence form would differ
    "gspo": {"policy_loss": "gspo", "aggregation": "seq_mean_token_mean", "clip_low": 0.05, "clip_high": 0.1},
    "gspo_token": {
        "policy_loss": "gspo",
        "aggregation": "seq_mean_token_mean",
        "clip_low": 0.05,
        "clip_high": 0.1,
        "correction_level": "token",
    },
    "luspo": {"policy_loss": "luspo", "aggregation": "seq_mean_token_sum", "clip_low": 0.05, "clip_high": 0.1},
    "vespo": {"policy_loss": "vespo", "kl_coef": 0.1},
    "vespo_icepop": {"policy_loss": "vespo", "correction": "icepop", "icepop_low": 0.7},
    "vespo_geo_mask": {"policy_loss": "vespo", "correction": "geo_mask", "geo_mask_low": 0.9, "geo_mask_high": 1.2},
    "off_policy": {"off_policy_mask_threshold": 0.05, "kl_coef": 0.1},
    "top_entropy": {"top_entropy_quantile": 0.3, "entropy_coef": 0.01, "kl_coef": 0.1},
    "cispo": {"policy_loss": "cispo", "clip_high": 0.5},
    "gspo_usual": {"policy_loss": "gspo", "aggregation": "seq_mean_token_mean"},
    "luspo_usual": {"policy_loss": "luspo", "aggregation": "seq_mean_token_sum"},
    "cispo_usual": {"policy_loss": "cispo"},
    "sapo": {"policy_loss": "sapo", "aggregation": "seq_mean_token_mean"},
    "k1": {"kl_coef": 0.1, "kl_estimator": "k1", "kl_importance_weighting": True},
    "k2": {"kl_coef": 0.1, "kl_estimator": "k2", "aggregation": "seq_mean_token_sum"},
    "k3": {"kl_coef": 0.1, "kl_importance_weighting": True, "aggregation": "seq_mean_token_sum_norm"},
    "entropy": {"entropy_coef": 0.01},
    "icepop": {"correction": "icepop"},
    "geo_mask": {"correction": "geo_mask", "geo_mask_low": 0.9, "geo_mask_high": 1.2},
    "tis_sequence": {"correction_level": "sequence"},
    "icepop_sequence": {"correction": "icepop", "correction_level": "sequence"},
    "none": {"correction": None},
}


def batch(seed: int, groups: int = 3) -> tuple[list[TokenSequence], list[Tensor]]:
    """Ragged sequences, one with a hole in its mask, one without a response token; and log-probs, of all tokens."""
    generator = torch.Generator().manual_seed(seed)
    sequences, logprobs = [], []
    for number in range(groups * GROUP):
        prompt = int(torch.randint(1, 6, (), generator=generator))
        response = 0 if number == 1 else int(torch.randint(1, MAX_RESPONSE, (), generator=generator))
        length = prompt + response
        mask = torch.arange(length) >= prompt
        if response > 3 and number % 3 == 0:
            mask[prompt + 1] = False
        noise = 0.3 * torch.randn(4, length, generator=generator, dtype=torch.float64)
        current = -1 - noise[0].abs()
        old, rollout, reference = current + noise[1], current + noise[1] + noise[2], current + noise[3]
        advantage = torch.randn((), generator=generator, dtype=torch.float64).expand(length).clone()
        # of the two passes that give entropies, which agree up to rounding
        entropies = torch.rand(length, generator=generator).double()
        fields = {"old_logprobs": old, "rollout_logprobs": rollout, "ref_logprobs": reference, "advantages": advantage}
        fields["entropies"] = entropies
        sequences.append(TokenSequence(torch.arange(length), mask, fields))
        logprobs.append(current.requires_grad_())
    return sequences, logprobs


def plain_loss(config: GRPOLossConfig, sequences: list[TokenSequence], logprobs: list[Tensor]) -> Tensor:
    """The formulas of docs/algorithms.md, sequence by sequence, with nothing shared with the implementation."""
    rows = []
    all_entropies = torch.cat([sequence.fields["entropies"][sequence.loss_mask] for sequence in sequences])
    least_entropy = torch.quantile(all_entropies.float(), 1 - config.top_entropy_quantile)
    for sequence, all_current in zip(sequences, logprobs, strict=True):
        mask, fields = sequence.loss_mask, sequence.fields
        current, old, roll = all_current[mask], fields["old_logprobs"][mask], fields["rollout_logprobs"][mask]
        a, ref = fields["advantages"][mask], fields["ref_logprobs"][mask]
        r = (current - old).exp()
        usual = USUAL_CLIPS.get(str(config.policy_loss), (0.2, 0.2))
        low = 1 - (usual[0] if config.clip_low is None else config.clip_low)
        high = 1 + (usual[1] if config.clip_high is None else config.clip_high)
        match config.policy_loss:
            case "ppo_clip":
                loss = torch.maximum(-a * r, -a * r.clamp(low, high))
                if config.dual_clip:
                    loss = torch.where(a < 0, torch.minimum(loss, -config.dual_clip * a), loss)
            case "gspo" | "luspo":
                s = (current - old).mean().exp()  # the sequence form: one ratio, one clip
                loss = torch.maximum(-a * s, -a * s.clamp(low, high))
            case "vespo":
                w = ((current - old).sum().exp().detach() * vespo_correction(config, old - roll)).clamp(min=1e-8)
                k, lam = (2, 3) if len(a) and a[0] >= 0 else (3, 2)
                loss = -(w**k) * (lam * (1 - w)).exp() * a * current
            case "cispo":
                loss = -r.detach().clamp(max=high) * a * current
            case "sapo":
                tau = torch.tensor([1.0 if x > 0 else 1.05 for x in a.tolist()], dtype=torch.float64)
                loss = -a / (1 + (-tau * (r - 1)).exp()) * 4 / tau
        w = (old - roll).exp()
        level = config.correction_level or ("sequence" if config.policy_loss in ("gspo", "luspo") else "token")
        if level == "sequence":
            w = w.prod()
        match "none" if config.policy_loss == "vespo" else config.correction:
            case "tis":
                loss = loss * w.clamp(max=2)
            case "icepop":
                loss = loss * torch.where((w >= 0.5) & (w <= 5), w, 0.0)
            case "geo_mask":
                mean = (old - roll).mean().exp() if len(w) else 0
                loss = loss * float(config.geo_mask_low <= mean <= config.geo_mask_high)
        if config.off_policy_mask_threshold is not None and len(a) and a[0] < 0:
            loss = loss * float((roll - current).mean() <= config.off_policy_mask_threshold)
        entropies = sequence.fields["entropies"][mask]
        is_top = entropies >= least_entropy
        loss = loss * is_top
        x = current - ref
        kl = {"k1": x, "k2": x * x / 2, "k3": (-x).exp() + x - 1}[config.kl_estimator]
        loss = loss + config.kl_coef * kl * (r if config.kl_importance_weighting else 1)
        rows.append(loss - config.entropy_coef * entropies * is_top)
    tokens, n = sum(len(row) for row in rows), len(rows)
    match config.aggregation:
        case "token_mean":
            return torch.cat(rows).sum() / tokens
        case "seq_mean_token_mean":
            return torch.stack([row.mean() for row in rows if len(row)]).sum() / n
        case "seq_mean_token_sum":
            return torch.cat(rows).sum() / n
        case "seq_mean_token_sum_norm":
            return torch.cat(rows).sum() / (n * MAX_RESPONSE)
        case _:
            groups = [torch.cat(rows[start : start + GROUP]) for start in range(0, n, GROUP)]
            return torch.stack([group.mean() for group in groups]).mean()


def vespo_correction(config: GRPOLossConfig, differences: Tensor) -> Tensor:
    """The correction's part of a sequence's weight, from log π_old - log π_roll of its tokens."""
    w = differences.exp()
    match config.correction:
        case "tis":
            return w.clamp(max=2).prod()
        case "icepop":
            return torch.where((w >= config.icepop_low) & (w <= 5), w, 1e-8).prod()
        case _:
            mean = differences.mean().exp() if len(w) else 0
            return torch.tensor(1.0 if config.geo_mask_low <= mean <= config.geo_mask_high else 1e-8 ** len(w))


def our_loss(
    config: GRPOLossConfig,
    sequences: list[TokenSequence],
    logprobs: list[Tensor],
    plan: list[list[int]],
    *,
    packed: bool = True,
    scored_first: bool = True,
    share: tuple[int, int] = (1, 0),
    all_reduce=lambda tensor: tensor,
) -> Tensor:
    """The sum over micro-batches (of one context-parallel rank's share) of weighted token losses."""
    loss = GRPOLoss(config, all_reduce)
    prepared = []
    masks = [sequence.loss_mask for sequence in sequences]
    are_top = loss.top_entropy_masks(
        [sequence.fields["entropies"] for sequence in sequences], masks, lambda total: total
    )
    for sequence, is_top in zip(sequences, are_top, strict=True):
        fields = dict(sequence.fields)
        if config.top_entropy_quantile < 1:
            fields[TOP_ENTROPY_FIELD] = is_top.double()
        old, sampled, mask = (fields["old_logprobs"], fields["rollout_logprobs"], sequence.loss_mask)
        weights = loss.correction_weights(old[None], sampled[None], mask[None])
        if not scored_first:
            del fields["old_logprobs"]
        elif weights is not None:
            fields["correction_weights"] = weights[0]
        prepared.append(TokenSequence(sequence.token_ids, sequence.loss_mask, fields))
    lengths = torch.tensor([int(sequence.loss_mask.sum()) for sequence in sequences])
    groups = torch.arange(len(sequences)) // GROUP
    u = loss.token_weights(lengths, groups, max_response_length=MAX_RESPONSE, all_reduce=lambda vector: vector)
    rules = MicroBatchRules(sequence_multiple=1 if share[0] == 1 else 2 * share[0], row_multiple=2 * share[0])
    starts = torch.tensor([0, *(len(values) for values in logprobs)]).cumsum(0)
    total = torch.zeros((), dtype=torch.float64)
    for microbatch in make_microbatches(prepared, plan, packed=packed, rules=rules):
        part: MicroBatch = context_parallel_share(microbatch, *share)
        last = torch.tensor([len(values) for values in logprobs])[part.sequence_index] - 1
        label = starts[:-1][part.sequence_index] + torch.minimum(part.position_ids + 1, last)
        current = torch.where(part.mask, torch.cat(logprobs)[label], float("nan"))  # what padding holds is never seen
        losses = loss(part, current, part.fields["entropies"], Tally())
        total = total + torch.where(part.mask, losses * u[part.sequence_index], 0.0).sum()
    return total / lengths.sum()


def gradient(loss: Tensor, logprobs: list[Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, logprobs, materialize_grads=True)])


@pytest.mark.parametrize("name", SETTINGS)
def test_value_and_gradient_are_those_of_the_plain_formula(name: str):
    config = GRPOLossConfig(**SETTINGS[name])
    sequences, logprobs = batch(seed=0)
    ours = our_loss(config, sequences, logprobs, [list(range(len(sequences)))])
    theirs = plain_loss(config, sequences, logprobs)
    # float64 sums of some 80 terms in another order
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient(ours, logprobs), gradient(theirs, logprobs), rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize(
    ("name", "aggregation"),
    [
        ("ppo_clip", "token_mean"),
        ("gspo", "seq_mean_token_mean"),
        ("luspo", "seq_mean_token_sum"),
        ("cispo", "token_mean"),
    ],
)
def test_clips_that_are_not_given_are_those_of_the_loss(name: str, aggregation: str):
    """Not those of `ppo_clip`, with which `gspo` never clips; one alone may be given."""
    low, high = USUAL_CLIPS.get(name, (0.2, 0.2))
    config = GRPOLossConfig(policy_loss=name, aggregation=aggregation)
    assert config.clip_range == (low, high)
    assert GRPOLossConfig(policy_loss=name, aggregation=aggregation, clip_high=0.3).clip_range == (low, 0.3)
    given = GRPOLossConfig(policy_loss=name, aggregation=aggregation, clip_low=low, clip_high=high)
    sequences, logprobs = batch(1)
    whole = [list(range(len(sequences)))]
    assert our_loss(config, sequences, logprobs, whole) == our_loss(given, sequences, logprobs, whole)


@pytest.mark.parametrize("name", SETTINGS)
def test_without_a_pass_before_it_the_old_policy_is_the_one_that_is_updated(name: str):
    config = GRPOLossConfig(**SETTINGS[name])
    sequences, logprobs = batch(seed=4)
    for sequence, current in zip(sequences, logprobs, strict=True):
        sequence.fields["old_logprobs"] = current.detach().clone()
    plan = [[0, 1, 2], [3, 4, 5, 6, 7], [8, 9, 10, 11]]
    ours = our_loss(config, sequences, logprobs, plan, scored_first=False)
    theirs = plain_loss(config, sequences, logprobs)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient(ours, logprobs), gradient(theirs, logprobs), rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("name", SETTINGS)
def test_no_cut_and_no_order_changes_the_objective(name: str):
    """Property, over random batches: any order of sequences in any micro-batches, packed or padded, one objective."""
    config = GRPOLossConfig(**SETTINGS[name])
    for seed in range(6):
        sequences, logprobs = batch(seed)
        whole = our_loss(config, sequences, logprobs, [list(range(len(sequences)))])
        expected = gradient(whole, logprobs)
        rng = random.Random(seed)
        order = rng.sample(range(len(sequences)), len(sequences))
        cuts = sorted(rng.sample(range(1, len(order)), rng.randint(0, 5)))
        plan = [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)] + [[]]
        parts = our_loss(config, sequences, logprobs, plan, packed=seed % 2 == 0)
        torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(gradient(parts, logprobs), expected, rtol=1e-11, atol=1e-14)


OF_SEQUENCES = ["gspo", "vespo_geo_mask", "geo_mask", "tis_sequence", "icepop_sequence"]  # weights or ratios


@pytest.mark.parametrize(
    ("name", "scored_first"),
    [
        *((name, True) for name in (*OF_SEQUENCES, "ppo_clip", "gspo_token", "vespo", "off_policy", "cispo", "sapo")),
        *((name, False) for name in (*OF_SEQUENCES, "vespo_icepop")),
    ],
)
def test_sequences_cut_over_ranks_have_the_objective_of_whole_ones(name: str, scored_first: bool):
    """Fails for gspo if a rank takes the mean over its own part of a sequence. Some parts hold no response token."""
    config = GRPOLossConfig(**SETTINGS[name])
    sequences, logprobs = batch(seed=3)
    plan = [[0, 1, 2], [3, 4, 5, 6, 7], [8, 9, 10, 11]]
    whole = our_loss(config, sequences, logprobs, plan, scored_first=scored_first)

    def rank(number: int, all_reduce) -> Tensor:
        share = {"share": (2, number), "all_reduce": all_reduce}
        return our_loss(config, sequences, logprobs, plan, scored_first=scored_first, **share)

    shares = run_ranks([functools.partial(rank, number) for number in range(2)])
    torch.testing.assert_close(sum(shares), whole, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient(sum(shares), logprobs), gradient(whole, logprobs), rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize(
    ("options", "level"),
    [
        ({}, "token"),
        ({"policy_loss": "gspo", "aggregation": "seq_mean_token_mean"}, "sequence"),
        ({"policy_loss": gspo, "aggregation": "seq_mean_token_mean"}, "sequence"),
        ({"policy_loss": "luspo", "aggregation": "seq_mean_token_sum"}, "sequence"),
        (
            {"policy_loss": "luspo", "aggregation": "seq_mean_token_sum", "correction": "icepop"},
            "sequence",
        ),
        ({"policy_loss": "gspo", "aggregation": "seq_mean_token_mean", "correction_level": "token"}, "token"),
        ({"policy_loss": "vespo"}, "token"),
        ({"policy_loss": "vespo", "correction": "geo_mask"}, "token"),
        ({"correction_level": "sequence"}, "sequence"),
    ],
)
def test_correction_follows_the_level_of_the_loss_unless_told(options: dict, level: str):
    config = GRPOLossConfig(**options)
    assert config.weight_level == level
    if config.correction != "geo_mask":
        assert config.correction_options()["level"] == level
        assert ("correction of the mismatch", f"{config.correction}, per {level}") in config.describe()


def test_shares_of_masked_tokens_are_counted():
    """Of 4 tokens with entropies 1 to 4 the top half is two; of 2 sequences the one with A < 0 and 1.0 > 0.5 is out."""
    mask = torch.tensor([False, True, True])
    fields = {name: torch.zeros(3) for name in ("old_logprobs", "rollout_logprobs")}
    sequences = [
        TokenSequence(torch.arange(3), mask, {**fields, "advantages": torch.full((3,), a)}) for a in (1.0, -1.0)
    ]
    loss = GRPOLoss(GRPOLossConfig(off_policy_mask_threshold=0.5, top_entropy_quantile=0.5))
    entropies = [torch.tensor([9.0, 1.0, 4.0]), torch.tensor([9.0, 2.0, 3.0])]
    kept = loss.top_entropy_masks(entropies, [mask, mask], lambda total: total)
    assert [row.tolist() for row in kept] == [[False, False, True], [False, False, True]]
    for sequence, row in zip(sequences, kept, strict=True):
        sequence.fields[TOP_ENTROPY_FIELD] = row.float()
    (batch,) = make_microbatches(sequences, [[0, 1]])
    tally = Tally()
    losses = loss(batch, torch.full_like(batch.fields["advantages"], -1.0), torch.zeros(batch.mask.shape), tally)
    metrics = tally.compute()
    assert metrics["policy/off_policy_masked_frac"] == metrics["policy/entropy_masked_frac"] == 0.5
    assert (losses[batch.mask] != 0).tolist() == [False, True, False, False]


def test_rejected_tokens_keep_their_place_in_the_denominator():
    sequences, logprobs = batch(seed=0)
    for sequence in sequences:
        sequence.fields["rollout_logprobs"] = sequence.fields["old_logprobs"].clone()
    plan = [list(range(len(sequences)))]
    trusted = GRPOLossConfig(correction="icepop")
    before = gradient(our_loss(trusted, sequences, logprobs, plan), logprobs).split([len(row) for row in logprobs])
    sequences[0].fields["rollout_logprobs"] -= 10  # w = e^10 for every token of the first sequence
    after = gradient(our_loss(trusted, sequences, logprobs, plan), logprobs).split([len(row) for row in logprobs])
    assert before[0].abs().max() > 0
    assert after[0].abs().max() == 0
    for mine, theirs in zip(after[1:], before[1:], strict=True):
        assert torch.equal(mine, theirs)  # nothing was divided by fewer tokens


def test_kl_in_the_reward_is_not_in_the_loss_too():
    sequences, logprobs = batch(seed=0)
    plan = [list(range(len(sequences)))]
    plain = our_loss(GRPOLossConfig(), sequences, logprobs, plan)
    assert our_loss(GRPOLossConfig(kl_coef=0.5, kl_in="reward"), sequences, logprobs, plan) == plain
    assert our_loss(GRPOLossConfig(kl_coef=0.5), sequences, logprobs, plan) != plain


def test_entropy_coefficient_follows_its_schedule():
    loss = GRPOLoss(GRPOLossConfig(entropy_coef=0.01, entropy_schedule=LinearSchedule(final=0.0, num_steps=100)))
    coefficients = []
    for step in (0, 25, 100, 1000):
        loss.set_step(step)
        coefficients.append(loss.entropy_coef)
    assert coefficients == pytest.approx([0.01, 0.0075, 0.0, 0.0], abs=1e-15)  # a few units of rounding


def own_loss(logprobs, old_logprobs, advantages, sequences=None):
    return -advantages * logprobs, torch.ones_like(advantages)


class OwnCorrection:
    def __call__(self, old_logprobs, rollout_logprobs, mask):
        return mask.to(old_logprobs.dtype) / 2


def clipping_loss(logprobs, old_logprobs, advantages, sequences=None, clip_low=0.1, clip_high=None):
    return own_loss(logprobs, old_logprobs, advantages, sequences)


def test_shares_of_clipped_tokens_follow_a_loss_of_the_users_own():
    """Where it says nothing of a clip, they are those of `ppo_clip`'s."""
    assert GRPOLossConfig(policy_loss=own_loss).clip_range == (0.2, 0.2)
    assert GRPOLossConfig(policy_loss=clipping_loss).clip_range == (0.1, 0.2)
    assert GRPOLossConfig(policy_loss=clipping_loss, clip_high=0.3).clip_range == (0.1, 0.3)


def test_functions_and_classes_of_the_users_own():
    sequences, logprobs = batch(seed=0)
    for choice in (own_loss, f"{__name__}.own_loss"):
        config = GRPOLossConfig(policy_loss=choice, correction=f"{__name__}.OwnCorrection")
        value = our_loss(config, sequences, logprobs, [list(range(len(sequences)))])
        terms = [-s.fields["advantages"][s.loss_mask] * p[s.loss_mask] / 2 for s, p in zip(sequences, logprobs)]  # noqa: B905
        torch.testing.assert_close(value, torch.cat(terms).mean(), rtol=1e-12, atol=1e-14)  # float64 sums
        assert ("correction of the mismatch", f"{__name__}.OwnCorrection") in config.describe()


@pytest.mark.parametrize("path", ["", "lightning_megatron_rl.algorithms."])
@pytest.mark.parametrize(
    ("kind", "name", "function", "settings"),
    [
        ("policy_loss", "ppo_clip", algorithms.ppo_clip, {"clip_low": 0.05, "dual_clip": None}),
        ("correction", "tis", algorithms.truncated_importance_weights, {"correction_cap": 1.1}),
    ],
)
def test_a_shipped_function_has_the_settings_of_its_name(kind, name, function, settings, path):
    """Given as itself or by its path it was taken for a user's own, and trained with its defaults."""
    sequences, logprobs = batch(seed=0)
    plan = [list(range(len(sequences)))]
    choice = f"{path}{function.__name__}" if path else function
    value = our_loss(GRPOLossConfig(**{kind: choice, **settings}), sequences, logprobs, plan)
    assert torch.equal(value, our_loss(GRPOLossConfig(**{kind: name, **settings}), sequences, logprobs, plan))
    assert not torch.equal(value, our_loss(GRPOLossConfig(), sequences, logprobs, plan))


def mean_loss(logprobs, old_logprobs, advantages, sequences=None):
    return (-advantages * logprobs).mean(), torch.ones_like(advantages)


def lonely_loss(logprobs, old_logprobs, advantages, sequences=None):
    return -advantages * logprobs


def mean_kl(logprobs, ref_logprobs):
    return (logprobs - ref_logprobs).mean()


def weight_per_row(old_logprobs, rollout_logprobs, mask):
    return mask.double().mean(dim=1, keepdim=True)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy_loss": mean_loss}, r"policy loss .*mean_loss.* returned losses of shape \[\] for tokens of shape \["),
        ({"policy_loss": lonely_loss}, r"policy loss .*lonely_loss.* returned a Tensor: return the loss and the ratio"),
        ({"kl_coef": 0.1, "kl_estimator": mean_kl}, r"KL estimator .*mean_kl.* returned estimates of shape \[\]"),
        ({"correction": weight_per_row}, r"correction .*weight_per_row.* returned weights of shape \[1, 1\]"),
    ],
)
def test_values_that_are_not_per_token_are_refused(options: dict, message: str, packed: bool):
    """A mean over the tokens would be broadcast to each of them; two rows would be taken for loss and ratio."""
    sequences, logprobs = batch(seed=0)
    with pytest.raises(ValueError, match=message):
        our_loss(GRPOLossConfig(**options), sequences, logprobs, [[0, 2]], packed=packed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"policy_loss": "gpso"},
            "unknown policy loss 'gpso': choose one of cispo, gspo, luspo, ppo_clip, sapo, vespo",
        ),
        ({"correction": "tiss"}, "unknown correction 'tiss': choose one of geo_mask, icepop, tis"),
        ({"advantage": "gae"}, "needs the values of a critic"),
        ({"policy_loss": "tests.nowhere.loss"}, r"cannot be imported .*choose one of cispo.*PYTHONPATH"),
        ({"policy_loss": "math.pi"}, "is a float, which cannot be called"),
        ({"policy_loss": f"{__name__}.OwnCorrection"}, "is called with .logprobs, old_logprobs.* does not take them"),
        ({"advantage": "fractions.Fraction"}, "does not take them|cannot be called"),
        ({"policy_loss": "gspo"}, "gspo with aggregation=token_mean.*Set aggregation=seq_mean_token_mean"),
        ({"policy_loss": gspo, "aggregation": "prompt_mean"}, "gspo with aggregation=prompt_mean"),
        ({"bypass": True}, "bypass=true with correction=tis.*Set correction=null"),
        ({"policy_loss": "gspo", "aggregation": "seq_mean_token_sum"}, "under seq_mean_token_mean only"),
        ({"policy_loss": "luspo"}, "luspo with aggregation=token_mean.*Set aggregation=seq_mean_token_sum"),
        ({"correction": "geo_mask", "correction_level": "sequence"}, "only tis and icepop have a weight per sequence"),
        ({"correction": None, "correction_level": "sequence"}, "correction=None: only tis and icepop"),
        (
            {"policy_loss": "vespo", "correction_level": "sequence"},
            "vespo, which makes one weight of a sequence's tokens",
        ),
        ({"correction_level": "prompt"}, "correction_level='prompt': choose one of sequence, token, or null"),
        ({"vespo_k_positive": -1.0}, "vespo_k_positive=-1.0 must be at least 0"),
        ({"vespo_lambda_negative": 0.0}, "vespo_lambda_negative=0.0 must be above 0"),
        ({"vespo_k_negative": 40.0}, r"w = k / λ = 20 would be weighted with .* = e\^81.8, the limit is e\^20"),
        (
            {"off_policy_mask_threshold": 0.0},
            r"off_policy_mask_threshold=0.0 must be above 0: .*0.5 is usual",
        ),
        ({"off_policy_mask_threshold": float("nan")}, "off_policy_mask_threshold=nan"),
        (
            {"top_entropy_quantile": 1.2},
            r"top_entropy_quantile=1.2 must be in .*a share of the tokens.*0.2 is usual",
        ),
        ({"top_entropy_quantile": -0.1}, "top_entropy_quantile=-0.1"),
        (
            {"bypass": True, "correction": None, "top_entropy_quantile": 0.2},
            "bypass=true with top_entropy_quantile=0.2: entropies come from the pass",
        ),
        ({"kl_importance_weighting": True}, "kl_importance_weighting=true with kl_coef=0"),
        ({"kl_importance_weighting": True, "kl_coef": 0.1, "kl_in": "reward"}, "kl_in=reward"),
        ({"entropy_schedule": LinearSchedule(final=0.0)}, "set entropy_coef to the value at the start"),
        ({"icepop_low": 1.5}, "icepop_low=1.5 and icepop_high=5.0: weights of 1 must lie between"),
        ({"sapo_tau_negative": 0.0}, "sapo_tau_negative=0.0 must be above 0"),
        ({"dual_clip": 1.0}, "dual_clip=1.0"),
        ({"correction_cap": float("nan")}, "correction_cap=nan"),
    ],
)
def test_unknown_names_and_contradictions_are_refused(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        GRPOLossConfig(**options)
