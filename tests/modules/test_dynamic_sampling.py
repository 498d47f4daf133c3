"""Dynamic sampling: what is drawn again, in how many rounds, and that replicas draw as one process would."""

import random
import threading
from typing import Any

import pytest
import torch

from lightning_megatron_rl.algorithms.tally import Tally
from lightning_megatron_rl.modules.dynamic_sampling import DynamicSampling, Replicas, refill_groups, shuffled_prompts
from lightning_megatron_rl.modules.grpo import GRPOModule
from lightning_megatron_rl.modules.grpo_config import GRPOLossConfig
from lightning_megatron_rl.sample import Prompt, Sample
from tests.modules.runs import NUM_GENERATIONS, ReplayEngine, fit_grpo, length, prompts

G = 2
POOL = [Prompt(token_ids=[index], text=str(index), index=index) for index in range(40)]


def answer(prompt: Prompt) -> list[Sample]:
    """Rewards 0 and 1 for every third prompt; no spread for the others."""
    rewards = (0.0, 1.0) if prompt.index % 3 == 0 else (1.0, 1.0)
    return [Sample(prompt, [1], [-1.0], reward=reward) for reward in rewards]


def refill(batch: list[Prompt], replicas: Replicas, max_rounds: int = 3, pool: list[Prompt] = POOL) -> tuple[Any, Any]:
    tally = Tally()
    asked: list[list[int]] = []

    def sample(chosen: list[Prompt]) -> list[Sample]:
        asked.append([prompt.index for prompt in chosen])
        return [member for prompt in chosen for member in answer(prompt)]

    samples = refill_groups(
        [member for prompt in batch for member in answer(prompt)],
        G,
        max_rounds=max_rounds,
        candidates=lambda number: shuffled_prompts(pool, seed=5, step=7, round_number=number),
        sample=sample,
        replicas=replicas,
        tally=tally,
    )
    return samples, (tally, asked)


ALONE = Replicas(0, lambda value: [value])


def indices(samples: list[Sample]) -> list[int]:
    return [sample.prompt.index for sample in samples[::G]]


def test_groups_without_spread_make_room_and_others_stay():
    samples, (tally, asked) = refill([POOL[0], POOL[1], POOL[3], POOL[4]], ALONE, max_rounds=20)
    got = indices(samples)
    assert (got[0], got[2]) == (0, 3)
    assert got[1] % 3 == got[3] % 3 == 0
    assert all(first.prompt is second.prompt for first, second in zip(samples[::2], samples[1::2], strict=True))
    drawn = [index for round_ in asked for index in round_]
    assert len(set(drawn)) == len(drawn), "a prompt was drawn twice"
    assert not set(drawn) & {0, 1, 3, 4}
    assert tally.compute() == {"rollout/refill_groups": len(drawn), "rollout/refill_rounds": len(asked)}


def test_rounds_are_bounded():
    hopeless = [prompt for prompt in POOL if prompt.index % 3]
    samples, (tally, asked) = refill([POOL[1], POOL[2]], ALONE, pool=hopeless)
    assert indices(samples) == [1, 2]
    assert len(asked) == 3
    assert tally.compute() == {"rollout/refill_groups": 6, "rollout/refill_rounds": 3}


def test_nothing_to_refill_and_nothing_to_refill_with():
    samples, (tally, asked) = refill([POOL[0], POOL[3]], ALONE)
    assert indices(samples) == [0, 3]
    assert asked == []
    assert tally.compute()["rollout/refill_rounds"] == 0
    samples, (_, asked) = refill([POOL[1]], ALONE, pool=[POOL[1]])
    assert indices(samples) == [1]
    assert asked == []


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("max_rounds", [1, 3])
def test_replicas_together_draw_what_one_process_draws(replicas: int, seed: int, max_rounds: int):
    """Fails if a replica draws by itself (two of them would take the same prompts), and, where some groups are left
    after the last round, if which ones depends on where they were.
    """
    batch = random.Random(seed).sample(POOL, 6)
    whole, (tally, asked) = refill(batch, ALONE, max_rounds)
    barrier = threading.Barrier(replicas, timeout=20)
    box: list[Any] = [None] * replicas
    results: list[Any] = [None] * replicas

    def run(rank: int) -> None:
        def gather(value: Any) -> list[Any]:
            box[rank] = value
            barrier.wait()
            everywhere = list(box)
            barrier.wait()
            return everywhere

        results[rank] = refill(batch[rank::replicas], Replicas(rank, gather), max_rounds)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all(result is not None for result in results)
    got = sorted(index for samples, _ in results for index in indices(samples))
    assert got == sorted(indices(whole))
    rounds = [part.compute() for _, (part, _) in results]
    assert sum(part["rollout/refill_groups"] for part in rounds) == tally.compute()["rollout/refill_groups"]
    assert {part["rollout/refill_rounds"] for part in rounds} == {len(asked)}


def test_order_depends_on_step_and_round_alone():
    def order(**change: int) -> list[int]:
        return [
            prompt.index for prompt in shuffled_prompts(POOL, **{"seed": 5, "step": 7, "round_number": 1, **change})
        ]

    assert order() == order()
    assert sorted(order()) == list(range(40))
    assert len({tuple(order()), tuple(order(step=8)), tuple(order(round_number=2)), tuple(order(seed=6))}) == 4


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="max_rounds=0"):
        DynamicSampling(max_rounds=0)
    settings: dict[str, Any] = {"model": "nothing", "rewards": [length], "engine": ReplayEngine(), "num_generations": 1}
    loss = GRPOLossConfig(advantage="reinforce_pp")
    GRPOModule(**settings, loss=loss)
    with pytest.raises(ValueError, match="dynamic_sampling with num_generations=1: one response has no spread"):
        GRPOModule(**settings, loss=loss, dynamic_sampling=DynamicSampling())


# ---- in a run ------------------------------------------------------------------------------------------------------


def flat_for_odd(samples: list[Sample]) -> list[float]:
    """No spread for prompts of odd index."""
    return [float(sum(sample.response_ids) % 5) * (sample.prompt.index % 2 == 0) for sample in samples]


def fit_with_refill(model: Any, strategy: dict[str, Any], world_size: int) -> dict[str, Any]:
    """One step on 4 prompts, two of them without spread, out of 16."""
    from lightning_megatron_rl.data.prompts import PromptDataModule

    class Data(PromptDataModule):
        def encode(self, rows: list[Any], dataset: str, source_name: str) -> list[Prompt]:
            return prompts(16)

    seen: list[int] = []

    class Looking(GRPOModule):
        def log_rollout(self, rollout: Any, tally: Any) -> None:
            seen.extend(sample.prompt.index for sample in rollout.samples[::NUM_GENERATIONS])
            super().log_rollout(rollout, tally)

    data = Data(train=lambda: [{"prompt": "x"}] * 16, tokenizer=str(model), batch_size=4, shuffle=False)
    run = fit_grpo(
        model,
        strategy,
        world_size,
        steps=1,
        rewards=[flat_for_odd],
        module={"dynamic_sampling": DynamicSampling(max_rounds=4), "updates_per_rollout": 1},
        make_module=Looking,
        data=data,
    )
    return {"seen": seen, "step": run.steps[0]}


def test_a_run_draws_the_same_prompts_in_every_layout(worker_pool, qwen3_dir):
    (one,) = worker_pool.run(fit_with_refill, qwen3_dir, {}, 1, world_size=1, init_process_group=False)
    two = worker_pool.run(fit_with_refill, qwen3_dir, {}, 2, world_size=2, init_process_group=False)
    assert {0, 2} <= set(one["seen"])
    assert sorted(one["seen"]) == sorted(two[0]["seen"] + two[1]["seen"])
    assert 0 < one["step"]["rollout/refill_rounds"] <= 4
    assert one["step"]["rollout/refill_groups"] >= 2
    for name in ("rollout/refill_rounds", "rollout/refill_groups", "reward/mean", "reward/zero_spread_frac"):
        assert one["step"][name] == pytest.approx(two[0]["step"][name], rel=1e-12), name  # float64 sums
    # two optimizer-free passes over the same samples: 1e-5 is what layouts may differ by
    assert one["step"]["policy/grad_norm"] == pytest.approx(two[1]["step"]["policy/grad_norm"], rel=1e-5)
    assert torch.isfinite(torch.tensor(one["step"]["policy/grad_norm"]))
