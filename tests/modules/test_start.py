"""The memory plan of a module as it is configured, and what refuses a run for a GPU that is made up."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_megatron_rl.devices.facts import GPU, Extension
from lightning_megatron_rl.devices.moments import COMPUTING, GIB, PUSHING, SAMPLING, WRAPPING, MemoryPlan
from lightning_megatron_rl.modules import start
from lightning_megatron_rl.modules.reference import ReferenceSettings
from lightning_megatron_rl.rollout.colocated import ColocatedVLLMEngine
from lightning_megatron_rl.rollout.vllm import VLLMEngine
from tests.modules.runs import ReplayEngine, fit_grpo

ENGINES: dict[str, Any] = {
    "replayed": ReplayEngine,
    "vllm": lambda: VLLMEngine(kv_cache_memory_gb=2.0, dtype="bfloat16"),
    "auto": lambda: VLLMEngine(kv_cache_memory_gb=2.0),
    "share": VLLMEngine,
    "sleeps": lambda: VLLMEngine(kv_cache_memory_gb=2.0, sleep_level=1),
    "elsewhere": lambda: VLLMEngine(devices=[5]),
    "second": lambda: VLLMEngine(devices=[1]),
    "on both": lambda: VLLMEngine(tensor_parallel_size=2),
    "on cpu": lambda: VLLMEngine(device="cpu"),
    "within": lambda: ColocatedVLLMEngine(kv_cache_memory_gb=2.0, tensor_parallel_size=2, dtype="bfloat16"),
}


class Plans(pl.Callback):
    """Makes plans of the module that is about to train, with engines of its own."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self.moments: dict[str, set[str]] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        from lightning_megatron_rl.modules.start import make_plan

        memory = {"free": 80 * GIB, "total": 80 * GIB}
        for name, make_engine in ENGINES.items():
            engine = make_engine()
            plan = make_plan(pl_module, training=True, engine=engine, frozen_copies=pl_module.frozen_copies, **memory)
            self.found[name] = {part.name: part.size for part in (*plan.trainer, *plan.sampler)}
            self.moments[name] = set(plan.totals)
            assert plan.offloads == pl_module.strategy.offloads
        pushed: Any = pl_module.weights_to_push()
        if not pl_module.strategy.layout.is_whole:
            assert len(list(pushed.buckets())) > 0
            room = pl_module._planned_views[1]._room
            self.found["push"] = sum(tensor.nbytes for tensor in (*room._buckets.values(), room.message()))
        self.found["parameters"] = sum(parameter.numel() for parameter in pl_module.model.parameters())

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        from lightning_megatron_rl.strategy.offload import gradient_tensors, optimizer_tensors

        chunks, optimizers = list(pl_module.strategy.chunks), pl_module.strategy.optimizers
        for name, tensors in (
            ("gradients", gradient_tensors(chunks)),
            ("optimizer", optimizer_tensors(optimizers, chunks)),
        ):
            self.found[name] = sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def plans(
    model: Path, world_size: int, strategy: dict[str, Any], *, optimizer: dict[str, Any] | None = None, **trainer: Any
) -> dict[str, Any]:
    from megatron.core.optimizer import OptimizerConfig

    callback = Plans()
    module: dict[str, Any] = {"reference": ReferenceSettings(offload=False)}
    if optimizer is not None:
        module["optimizer"] = OptimizerConfig(lr=1e-3, **optimizer)
    callbacks: list[Any] = [callback]
    fit_grpo(
        model, strategy, world_size, steps=1, callbacks=callbacks, loss={"kl_coef": 0.1}, module=module, trainer=trainer
    )
    return {**callback.found, "moments": callback.moments}


@pytest.mark.parametrize(
    ("world_size", "strategy", "shards", "replicas"),
    [(1, {}, 1, 1), (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, 2, 1), (2, {}, 1, 2)],
    ids=["one", "tp2", "dp2"],
)
def test_plan_counts_what_the_module_holds(worker_pool, qwen3_dir, world_size, strategy, shards, replicas):
    found = worker_pool.run(plans, qwen3_dir, world_size, strategy, world_size=world_size, init_process_group=False)[0]
    here = found["replayed"]
    # norms are on every rank and counted as divided: less than 2 % of this model
    assert here["trainer: weights"] == pytest.approx(4 * found["parameters"], rel=0.02)  # fp32
    assert here["trainer: gradients"] == here["trainer: weights"] == here["trainer: reference"]
    assert here["trainer: optimizer state"] == 2 * here["trainer: weights"] / replicas
    assert not [name for name in here if name.startswith("sampler")]  # recorded samples take no memory
    assert found["vllm"]["sampler: key/value cache"] == 2 * GIB
    assert found["vllm"]["sampler: weights"] == here["trainer: weights"] * shards / 2  # whole, in 16 bits
    assert found["auto"]["sampler: weights"] == here["trainer: weights"] * shards  # as in the checkpoint, which is fp32
    assert found["share"]["sampler: weights and cache"] == 40 * GIB
    for name in ENGINES:
        assert ("trainer: weight push" in found[name]) == (shards > 1 and name not in ("replayed", "on cpu")), name
    if shards > 1:
        # norms are sent by one rank and counted as divided, and tensors begin at multiples of 64 bytes
        assert found["vllm"]["trainer: weight push"] == pytest.approx(found["push"], rel=0.02)


def has_sampler(found: dict[str, Any], name: str) -> bool:
    return any(part.startswith("sampler") for part in found[name])


def test_sampler_counts_on_the_gpus_that_it_is_on(worker_pool, qwen3_dir):
    strategy = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "offload_while_sampling": ["optimizer"]}
    first, second = worker_pool.run(plans, qwen3_dir, 2, strategy, world_size=2, init_process_group=False)
    there = {name: (has_sampler(first, name), has_sampler(second, name)) for name in ENGINES}
    assert there == {
        "replayed": (False, False),
        **dict.fromkeys(("vllm", "auto", "share", "sleeps"), (True, False)),  # the first rank starts it on its own GPU
        "elsewhere": (False, False),
        "second": (False, True),
        "on both": (True, True),
        "on cpu": (False, False),
        "within": (True, True),
    }
    within = first["within"]
    assert "sampler: process" not in within
    # in 16 bits, halved: the trainer has half of the model in fp32
    assert within["sampler: weights"] == first["replayed"]["trainer: weights"] / 2
    assert within["sampler: key/value cache"] == 2 * GIB
    assert first["moments"]["vllm"] == {COMPUTING, WRAPPING}
    assert first["moments"]["sleeps"] == {COMPUTING, WRAPPING, PUSHING, SAMPLING}


@pytest.mark.parametrize(
    ("precision", "ddp_config", "gradients", "optimizer"),
    [("32-true", None, 4, 8), ("bf16-mixed", None, 4, 12), ("bf16-mixed", {"grad_reduce_in_fp32": False}, 2, 12)],
)
def test_state_of_experts_is_planned_as_megatron_shards_it(
    worker_pool, qwen3_moe_dir, precision, ddp_config, gradients, optimizer
):
    # two replicas of the dense part, one of each expert: 2 ranks / (PP 1 x EP 2 x ETP 1)
    strategy = {"expert_model_parallel_size": 2, "ddp_config": ddp_config}
    for found in worker_pool.run(
        expert_plans, qwen3_moe_dir, strategy, precision, world_size=2, init_process_group=False
    ):
        here = found["replayed"]
        # padding of Megatron's buckets comes on top
        assert found["gradients"] == pytest.approx(here["trainer: gradients"], rel=0.02)
        planned = here["trainer: optimizer state"] + here["trainer: optimizer state, experts"]
        assert found["optimizer"] == pytest.approx(planned, rel=0.02)
        dense, experts = (
            here[f"trainer: optimizer state{kind}"] * replicas / optimizer
            for kind, replicas in (("", 2), (", experts", 1))
        )
        assert dense + experts == pytest.approx(here["trainer: gradients"] / gradients)
        assert dense + experts == pytest.approx(found["parameters"], rel=0.02)


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_state_of_another_optimizer_is_planned(worker_pool, qwen3_dir, momentum):
    optimizer = {"optimizer": "sgd", "sgd_momentum": momentum}
    strategy = {"use_distributed_optimizer": False}
    (found,) = worker_pool.run(
        plans, qwen3_dir, 1, strategy, optimizer=optimizer, world_size=1, init_process_group=False
    )
    here = found["replayed"]
    assert here["trainer: optimizer state"] == (here["trainer: gradients"] if momentum else 0)
    assert found["optimizer"] == pytest.approx(here["trainer: optimizer state"], rel=0.02)
    assert "trainer: weights, old and new" not in here


def expert_plans(model: Path, strategy: dict[str, Any], precision: Any) -> dict[str, Any]:
    from megatron.core.distributed import DistributedDataParallelConfig

    if strategy["ddp_config"] is not None:
        strategy["ddp_config"] = DistributedDataParallelConfig(**strategy["ddp_config"])
    return plans(model, 2, strategy, precision=precision)


MODULE: Any = SimpleNamespace(  # what is asked of a module before its memory is planned
    strategy=SimpleNamespace(
        root_device=torch.device("cuda", 0),
        precision_plugin=SimpleNamespace(precision="16-mixed", params_dtype=torch.float16),
        layout=SimpleNamespace(context_parallel_size=1),
    ),
    model_config={},
    layer_backend="torch",
)


def on_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], vllm: Extension | None = None) -> None:
    """Make this machine look like one with a GPU, and torch like the pinned one for CUDA."""
    gpu = GPU("a GPU", capability, total_bytes=80 * GIB, free_bytes=80 * GIB)
    monkeypatch.setattr(start, "measure_gpu", lambda index: gpu)
    monkeypatch.setattr(start, "installed_vllm", lambda: vllm)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "sm_90"])


def test_gpu_that_torch_has_no_kernels_for_is_refused(monkeypatch):
    on_gpu(monkeypatch, (7, 0))
    with pytest.raises(ValueError, match=r"no kernels for the GPU a GPU, .* is 7\.0: .* sm_75 sm_80 sm_90"):
        start.check_gpu(MODULE, training=True)


@pytest.mark.parametrize("name", ["vllm", "within"])
def test_vllm_of_another_cuda_is_refused_wherever_it_runs(monkeypatch, name):
    on_gpu(monkeypatch, (9, 0), Extension("0.26.0", cuda_major=12))
    with pytest.raises(RuntimeError, match=r"vLLM 0\.26\.0 is built for CUDA 12, torch .* for CUDA 13\.0"):
        start.check_gpu(MODULE, training=True, engine=ENGINES[name]())


def test_vllm_of_another_cuda_is_left_alone_without_a_sampler_of_its_own(monkeypatch):
    on_gpu(monkeypatch, (9, 0), Extension("0.26.0", cuda_major=12))
    monkeypatch.setattr(start, "make_plan", lambda *args, **kwargs: MemoryPlan((), (), free=0))
    monkeypatch.setattr(start, "run_on_all_ranks", lambda check: check())
    start.check_gpu(MODULE, training=True, engine=ReplayEngine())
