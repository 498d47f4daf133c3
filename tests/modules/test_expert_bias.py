"""Expert biases follow the load of real tokens, whatever the layout; frozen routers stay as they are."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lightning_megatron_rl.models.layers.moe import MoESettings
from tests.modules.runs import NUM_GENERATIONS, fit_grpo, recorded_samples
from tests.modules.test_moe import FULL_RECOMPUTE, LAYOUTS, long_sequences, sft
from tests.selection import by_default
from tests.training import Run, fit_sft, frozen_sequences

MOVING_BIAS = MoESettings(aux_loss_coeff=0.0, expert_bias_update_rate=0.25)
TOPK = 2  # experts of a token


class TokenCounts(pl.Callback):
    """Takes note of what Megatron is about to update the biases by: tokens of each expert, on this rank."""

    def __init__(self) -> None:
        self.updates: list[dict[int, Tensor]] = []  # by layer

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        from megatron.core.utils import get_model_config

        for config in {id(config): config for config in map(get_model_config, module.model)}.values():
            config.finalize_model_grads_func = self._noting(config.finalize_model_grads_func, module.routers.routers)

    def _noting(self, finalize: Any, routers: list[Any]) -> Any:
        def finalize_model_grads(*args: Any, **kwargs: Any) -> None:
            self.updates.append({router.layer_number: router.local_tokens_per_expert.clone() for router in routers})
            finalize(*args, **kwargs)

        return finalize_model_grads


def counting(fit: Any, model: Path, strategy: dict[str, Any], world_size: int, **options: Any) -> Run:
    """A run of one step with the counts of its update."""
    counts = TokenCounts()
    run = fit(model, strategy, world_size, steps=1, callbacks=[counts], **options)
    (run.extra["counts"],) = counts.updates
    return run


def count(pool: Any, fit: Any, model: Path, layout: str = "single", **options: Any) -> tuple[Tensor, Run]:
    """Tokens of each expert, ``[expert layers, experts]``, summed over ranks, and the first rank's run."""
    world_size, strategy = LAYOUTS[layout]
    runs = pool.run(
        counting, fit, model, strategy, world_size, world_size=world_size, init_process_group=False, **options
    )
    layers = sorted({layer for run in runs for layer in run.extra["counts"]})
    return torch.stack([sum(run.extra["counts"].get(layer, 0) for run in runs) for layer in layers]), runs[0]


def update(pool: Any, model: Path, layout: str = "single", num_sequences: int = 4, **module: Any) -> Any:
    """The counts of an SFT step on sequences that are a micro-batch each."""
    module = {"max_tokens_per_microbatch": 40, "moe": MOVING_BIAS, **module}
    options = {"batch_size": 4, "sequences": long_sequences(num_sequences), "module": module}
    return count(pool, fit_sft, model, layout, **options)


def biases(run: Run) -> Tensor:
    names = sorted(name for name in run.weights if name.endswith("e_score_correction_bias"))
    return torch.stack([run.weights[name] for name in names])


def stored_biases(model: Path) -> Tensor:
    files = load_file(model / "model.safetensors")
    return torch.stack([files[name] for name in sorted(files) if name.endswith("e_score_correction_bias")])


@pytest.fixture(scope="module")
def reference(worker_pool, deepseek_dir) -> tuple[Tensor, Run]:
    return update(worker_pool, deepseek_dir)


def test_expert_bias_moves_by_its_rate_towards_even_load(worker_pool, deepseek_dir, reference):
    """One step up for experts with less than the mean load, one down for those with more; none at rate 0."""
    still = biases(sft(worker_pool, deepseek_dir, steps=1, moe=MoESettings(aux_loss_coeff=0.0))[0])
    assert torch.equal(still, stored_biases(deepseek_dir))
    counts, run = reference
    assert (counts.sum(1) == TOPK * sum(map(len, long_sequences(4)))).all(), "padding, or a token twice"
    expected = still + MOVING_BIAS.expert_bias_update_rate * (counts.mean(1, keepdim=True) - counts).sign()
    assert torch.equal(biases(run), expected)
    assert not torch.equal(biases(run), still)


@pytest.mark.parametrize(
    "layout", by_default(["dp2", "tp2_sp", "ep2"], ["dp2", "tp2_sp", "pp2", "ep2", "cp2", "cp2_ep2", "tp2_sp_ep2_etp1"])
)
def test_expert_bias_does_not_see_the_layout(worker_pool, deepseek_dir, reference, layout):
    """The same tokens are counted, and padding, which differs between layouts, is not."""
    counts, run = update(worker_pool, deepseek_dir, layout)
    assert torch.equal(counts, reference[0])
    assert torch.equal(biases(run), biases(reference[1]))


def test_expert_bias_does_not_see_micro_batches_of_padding(worker_pool, deepseek_dir):
    """Three sequences are three micro-batches, but the interleaved schedule and two replicas ask for a fourth."""
    counts, single = update(worker_pool, deepseek_dir, num_sequences=3)
    for layout in ("pp2_vpp2", "dp2"):
        split_counts, split = update(worker_pool, deepseek_dir, layout, num_sequences=3)
        assert torch.equal(split_counts, counts), layout
        assert torch.equal(biases(split), biases(single)), layout


def test_expert_bias_does_not_see_padded_rows(worker_pool, deepseek_dir):
    """Rows of 4 to 40 tokens, padded to the longest: padding would go to the same experts, and outvote tokens."""
    (packed, _), (padded, _) = (
        count(
            worker_pool,
            fit_sft,
            deepseek_dir,
            sequences=frozen_sequences(4),
            module={"packing": packing, "max_tokens_per_microbatch": 400, "moe": MOVING_BIAS},
        )
        for packing in (True, False)
    )
    assert torch.equal(padded, packed)


def test_tokens_that_are_routed_again_in_backward_count_once(worker_pool, deepseek_dir, reference):
    """Recomputation calls each router twice."""
    counts, _ = update(worker_pool, deepseek_dir, model_config=FULL_RECOMPUTE)
    assert torch.equal(counts, reference[0])


def test_tokens_that_are_only_scored_do_not_count(worker_pool, deepseek_dir):
    """Old log-probs and those of the reference policy are passes, too."""
    module = {"updates_per_rollout": 1, "moe": MOVING_BIAS}
    counts, _ = count(worker_pool, fit_grpo, deepseek_dir, module=module)
    samples = recorded_samples()[: 4 * NUM_GENERATIONS]
    tokens = sum(len(sample.prompt.token_ids) + len(sample.response_ids) for sample in samples)
    assert (counts.sum(1) == TOPK * tokens).all()


def test_frozen_routers_stay_as_they_are(worker_pool, qwen3_moe_dir):
    runs = {}
    for freeze in (False, True):
        runs[freeze] = sft(worker_pool, qwen3_moe_dir, "ep2", moe=MoESettings(freeze_router=freeze))[0]
    files = load_file(qwen3_moe_dir / "model.safetensors")
    for name, weight in files.items():
        is_router = name.endswith("mlp.gate.weight")
        assert torch.equal(runs[True].weights[name], weight) == is_router, name
        assert not torch.equal(runs[False].weights[name], weight), name
