"""The layouts of the CPU suite under NCCL: one loss, one gradient norm, for torch's layers and TransformerEngine's."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron_rl.models.layers.moe import MoESettings
from lightning_megatron_rl.verify.layouts import parse_layout
from lightning_megatron_rl.verify.pool import WorkerPool
from lightning_megatron_rl.verify.report import Report
from lightning_megatron_rl.verify.runner import verify_layouts
from tests.gpu.machine import by_processes, needs_processes
from tests.gpu.test_backends import EXPERTS_RELATIVE
from tests.gpu.test_training import BF16_RELATIVE, backend, relative_steps
from tests.modules import test_parts
from tests.strategy.test_invariance import BUDGETS, LENGTHS, ragged_batch
from tests.strategy.test_megatron import LAYOUTS
from tests.tiny_models import save_tiny_model
from tests.training import Run, fit_sft
from tests.verify import subjects

pytestmark = pytest.mark.deadline(300)
RELATIVE = 1e-4  # fp32 sums in another order, and atomics


def by_size(*layouts: str) -> list[Any]:
    """Names of layouts as parameters, each with the number of processes that it needs."""
    return by_processes((name, parse_layout(name).world_size) for name in layouts)


def verify(pool: WorkerPool, build: Any, layout: str) -> Report:
    """Torch's layers in fp32: one layout against one GPU."""
    world_size = parse_layout(layout).world_size
    return verify_layouts(
        partial(build, layer_backend="torch", max_tokens_per_microbatch=max(BUDGETS)),
        [layout],
        batch=ragged_batch(),
        pool=pool,
        processes=world_size,
        device="cuda",
        tolerance=RELATIVE,
    )


@pytest.fixture(scope="module")
def moe_dir(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("qwen3_moe"), "qwen3_moe")


@pytest.mark.parametrize("layout", by_size("single@40", *(f"{name}@96" for name in LAYOUTS)))
def test_layout_gives_the_numbers_of_one_gpu(gpu_pool, qwen3_dir, layout):
    row = verify(gpu_pool, partial(subjects.sft, qwen3_dir), layout)[layout]
    assert row.verdict == "same", row.reason
    assert row.peak_memory_gb is not None
    assert row.peak_memory_gb > 0


@pytest.mark.parametrize("layout", by_size("single@56", "dp2@56"))
def test_parts_add_up_to_the_whole(gpu_pool, qwen3_dir, layout):
    test_parts.verify(
        gpu_pool, qwen3_dir, "prompt_mean", [layout], device="cuda", tolerance=RELATIVE, layer_backend="torch"
    )


@pytest.mark.parametrize("layout", by_size("ep2@96", "tp2_ep2_etp1_sp@96", "pp2_ep2@96", "cp2_ep2@96"))
def test_experts_give_the_numbers_of_one_gpu(gpu_pool, moe_dir, layout):
    """Without router losses: the balance loss depends on the division into micro-batches."""
    build = partial(subjects.sft, moe_dir, moe=MoESettings(aux_loss_coeff=0.0))
    row = verify(gpu_pool, build, layout)[layout]
    assert row.verdict == "same", row.reason


def fit_te(
    model: Path,
    strategy: dict[str, Any],
    world_size: int,
    model_config: dict[str, Any] | None = None,
    layers: str = "transformer_engine",
    **module: Any,
) -> Run:
    """Two steps in bf16, with TransformerEngine or other layers."""
    variant = backend(layers, "bf16-mixed")
    return fit_sft(
        model,
        strategy,
        world_size,
        batch_size=len(LENGTHS),
        sequences=ragged_batch().sequences * 2,
        module={**variant["module"], "max_tokens_per_microbatch": 96, "model_config": model_config or {}, **module},
        trainer={**variant["trainer"], "accelerator": "cuda"},
    )


@pytest.fixture(scope="module")
def te_on_one_gpu(gpu_pool, qwen3_dir) -> Run:
    return gpu_pool.run(fit_te, qwen3_dir, {}, 1, world_size=1, init_process_group=False)[0]


@pytest.mark.parametrize("layout", by_processes((name, size) for name, (size, _) in LAYOUTS.items()))
def test_transformer_engine_follows_one_gpu(gpu_pool, qwen3_dir, te_on_one_gpu, layout):
    world_size, strategy = LAYOUTS[layout]
    options = {"world_size": world_size, "init_process_group": False, "timeout": 250}
    run = gpu_pool.run(fit_te, qwen3_dir, strategy, world_size, **options)[0]
    assert relative_steps(run, te_on_one_gpu) < BF16_RELATIVE


@needs_processes(LAYOUTS["cp2"][0])
def test_context_parallelism_by_all_to_all_follows_one_gpu(gpu_pool, qwen3_dir, te_on_one_gpu):
    """The default, from neighbour to neighbour (p2p), is in the layouts above."""
    world_size, strategy = LAYOUTS["cp2"]
    options = {"world_size": world_size, "init_process_group": False, "timeout": 250}
    changed = {"model_config": {"cp_comm_type": "a2a"}}
    run = gpu_pool.run(fit_te, qwen3_dir, strategy, world_size, **changed, **options)[0]
    assert relative_steps(run, te_on_one_gpu) < BF16_RELATIVE


@needs_processes(LAYOUTS["cp2"][0])
def test_context_parallelism_of_torch_layers_follows_one_gpu(gpu_pool, qwen3_dir):
    """In bf16, where torch attends by its flash kernels."""
    world_size, strategy = LAYOUTS["cp2"]
    options = {"layers": "torch", "init_process_group": False, "timeout": 250}
    single = gpu_pool.run(fit_te, qwen3_dir, {}, 1, world_size=1, **options)[0]
    run = gpu_pool.run(fit_te, qwen3_dir, strategy, world_size, **{**options, "world_size": world_size})[0]
    assert relative_steps(run, single) < BF16_RELATIVE


@pytest.mark.parametrize("layout", by_size("ep2", "tp2_ep2_etp1_sp", "pp2_ep2"))
def test_transformer_engines_experts_follow_one_gpu(gpu_pool, moe_dir, layout):
    """Their grouped products, with tokens that come from other GPUs; without router losses, as above."""
    parsed = parse_layout(layout)
    options = {"moe": MoESettings(aux_loss_coeff=0.0), "init_process_group": False, "timeout": 250}
    single = gpu_pool.run(fit_te, moe_dir, {}, 1, world_size=1, **options)[0]
    run = gpu_pool.run(
        fit_te, moe_dir, parsed.strategy, parsed.world_size, **{**options, "world_size": parsed.world_size}
    )[0]
    assert relative_steps(run, single) < EXPERTS_RELATIVE


@pytest.mark.parametrize("recompute", ["none", 1, "full"])  # of four layers
@pytest.mark.parametrize("layout", by_size("ep2", "tp2_ep2_etp1_sp"))
def test_gathered_tokens_follow_one_gpu(gpu_pool, moe_dir, layout, recompute):
    """Each replica of ep2 has micro-batches of other lengths; tokens without experts here come back as zeros."""
    parsed = parse_layout(layout)
    options = {"moe": MoESettings(aux_loss_coeff=0.0), "init_process_group": False, "timeout": 250}
    fused = {"moe_permute_fusion": True}
    single = gpu_pool.run(fit_te, moe_dir, {}, 1, model_config=fused, world_size=1, **options)[0]
    changed = {**fused, "moe_token_dispatcher_type": "allgather"}
    run = gpu_pool.run(
        fit_te,
        moe_dir,
        parsed.strategy,
        parsed.world_size,
        model_config=changed,
        recompute=recompute,
        **{**options, "world_size": parsed.world_size},
    )[0]
    assert relative_steps(run, single) < EXPERTS_RELATIVE


@pytest.mark.parametrize("layout", by_size("ep2@40"))
def test_gathered_tokens_give_the_numbers_of_one_gpu(gpu_pool, moe_dir, layout):
    """Torch's layers in fp32, without fused permutation."""
    gather = {"moe_token_dispatcher_type": "allgather"}
    build = partial(subjects.sft, moe_dir, moe=MoESettings(aux_loss_coeff=0.0), model_config=gather)
    row = verify(gpu_pool, build, layout)[layout]
    assert row.verdict == "same", row.reason
