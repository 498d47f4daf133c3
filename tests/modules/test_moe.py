"""Training mixtures of experts: router losses, expert bias, frozen routers and replayed routing, in every layout."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_megatron_rl.data.packing import TokenSequence
from lightning_megatron_rl.models.moe import MoESettings, balance_loss
from tests.distributed import WorkerError
from tests.modules.runs import fit_grpo
from tests.strategy.test_megatron import RELATIVE, assert_same_run
from tests.tiny_models import SPECIAL_TOKENS, VOCAB_SIZE
from tests.training import Run, fit_sft

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "dp2": (2, {}),
    "ep2": (2, {"expert_model_parallel_size": 2}),
    "tp2_sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "cp2": (2, {"context_parallel_size": 2}),
    "pp2_vpp2": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    "tp2_sp_pp2": (
        4,
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True},
    ),
    "ep2_cp2": (4, {"expert_model_parallel_size": 2, "context_parallel_size": 2}),
}
BOTH_LOSSES = MoESettings(aux_loss_coeff=0.3, z_loss_coeff=0.1)
MOE_METRICS = ("moe/aux_loss", "moe/load_imbalance")


def long_sequences(count: int) -> list[TokenSequence]:
    """Ragged sequences of 21 to 40 tokens: with 40 per micro-batch, each is a micro-batch of its own in all layouts."""
    generator = torch.Generator().manual_seed(5)
    sequences = []
    for _ in range(count):
        length = int(torch.randint(21, 41, (), generator=generator))
        token_ids = torch.randint(len(SPECIAL_TOKENS), VOCAB_SIZE, (length,), generator=generator)
        sequences.append(TokenSequence(token_ids, torch.arange(length) >= length // 2, {}))
    return sequences


def sft(pool: Any, model: Any, layout: str = "single", batch_size: int = 4, steps: int = 2, **module: Any) -> list[Run]:
    world_size, strategy = LAYOUTS[layout]
    return pool.run(
        fit_sft,
        model,
        strategy,
        world_size,
        steps=steps,
        batch_size=batch_size,
        module={"max_tokens_per_microbatch": 40, **module},
        sequences=long_sequences(steps * batch_size),
        world_size=world_size,
        init_process_group=False,
    )


def grpo(pool: Any, model: Any, layout: str = "single", **options: Any) -> list[Run]:
    world_size, strategy = LAYOUTS[layout]
    return pool.run(fit_grpo, model, strategy, world_size, world_size=world_size, init_process_group=False, **options)


@pytest.fixture(scope="module")
def reference(worker_pool, qwen3_moe_dir) -> Run:
    return sft(worker_pool, qwen3_moe_dir, moe=BOTH_LOSSES)[0]


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "single"])
def test_router_losses_do_not_see_the_layout(worker_pool, qwen3_moe_dir, reference, layout):
    """Fails with Megatron's own losses: they count padding, and weigh with positions over target tokens."""
    runs = sft(worker_pool, qwen3_moe_dir, layout, moe=BOTH_LOSSES)
    assert_same_run(runs[0], reference)
    for mine, theirs in zip(runs[0].steps, reference.steps, strict=True):
        for name in MOE_METRICS:
            assert mine[name] == pytest.approx(theirs[name], rel=RELATIVE), name
    for run in runs[1:]:
        assert [step["moe/aux_loss"] for step in run.steps] == [step["moe/aux_loss"] for step in runs[0].steps]
