"""The memory plan of a module as it is configured, and what refuses a run for a GPU that is made up."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_megatron_rl.callbacks.weight_average import WeightAverage
from lightning_megatron_rl.data.prompts import PromptDataModule
from lightning_megatron_rl.devices.facts import GPU, Extension
from lightning_megatron_rl.models.families.registry import FAMILIES
from lightning_megatron_rl.modules import start
from lightning_megatron_rl.modules.budget import Budget
from lightning_megatron_rl.modules.ppo import PPOModule
from lightning_megatron_rl.modules.reference import ReferenceSettings
from lightning_megatron_rl.modules.training import TrainingSettings
from lightning_megatron_rl.planner.budget import MARGIN
from lightning_megatron_rl.planner.memory import PROCESS_BYTES
from lightning_megatron_rl.planner.moments import COMPUTING, GIB, PUSHING, SAMPLING, WRAPPING, MemoryPlan
from lightning_megatron_rl.rollout.protocol import RolloutEngine
from lightning_megatron_rl.rollout.servers.engine import VLLMServers
from lightning_megatron_rl.rollout.vllm.colocated import ColocatedVLLMEngine
from lightning_megatron_rl.rollout.vllm.engine import VLLMEngine
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
    "servers": lambda: VLLMServers(["http://one:1", "http://two:1", "http://three:1"], bucket_mb=1),
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
        data = PromptDataModule("rows.jsonl", tokenizer=pl_module.model_path, batch_size=8)
        self.found["row"] = start.describe_plan(pl_module, data, "NVIDIA H200")
        assert start.describe_plan(pl_module, data, None) == start.describe_plan(pl_module, data, "a new GPU") == []
        pushed: Any = pl_module.weights_to_push()
        if not pl_module.strategy.layout.is_whole:
            assert len(list(pushed.buckets())) > 0
            buffers = pl_module.planned_views.views._memory
            self.found["push"] = sum(tensor.nbytes for tensor in (*buffers._buckets.values(), buffers.message()))
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
    model: Path,
    world_size: int,
    strategy: dict[str, Any],
    *,
    optimizer: dict[str, Any] | None = None,
    averages: bool = False,
    **trainer: Any,
) -> dict[str, Any]:
    from megatron.core.optimizer import OptimizerConfig

    callback = Plans()
    module: dict[str, Any] = {"reference": ReferenceSettings(offload=False)}
    if optimizer is not None:
        module["optimizer"] = OptimizerConfig(lr=1e-3, **optimizer)
    callbacks: list[Any] = [callback]
    if averages:
        callbacks.insert(0, WeightAverage())
        module["reference"] = ReferenceSettings(kind="average", average_decay=0.9)
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
    ((name, row),) = found["row"]
    assert name == "plan"
    assert re.match(r"1\.0 of 139\.2 GiB per GPU; [\d.]+ s per step, ", row), row  # a context, and a tiny model
    assert found["vllm"]["sampler: key/value cache"] == 2 * GIB
    assert found["vllm"]["sampler: weights"] == here["trainer: weights"] * shards / 2  # whole, in 16 bits
    assert found["auto"]["sampler: weights"] == here["trainer: weights"] * shards  # as in the checkpoint, which is fp32
    assert found["share"]["sampler: weights and cache"] == 40 * GIB
    for name in ENGINES:
        pushes = name == "servers" or (shards > 1 and name not in ("replayed", "on cpu"))
        assert ("trainer: weight push" in found[name]) == pushes, name
    whole = 2 * here["trainer: weights"]  # of a tiny model
    assert found["servers"]["trainer: weight push"] == min(whole, -(-3 // replicas) * 2**20)
    if shards > 1:
        # norms are sent by one rank and counted as divided, and tensors begin at multiples of 64 bytes
        assert found["vllm"]["trainer: weight push"] == pytest.approx(found["push"], rel=0.02)


def test_plan_counts_averages(worker_pool, qwen3_dir):
    """Of a callback and of the reference, in fp32, divided as the optimizer's state is; the reference is no copy."""
    options = {"averages": True, "world_size": 2, "init_process_group": False}
    found = worker_pool.run(plans, qwen3_dir, 2, {}, **options)[0]
    here = found["replayed"]
    assert "trainer: reference" not in here
    assert here["trainer: optimizer state"] == (2 + 2) * here["trainer: weights"] / 2
    assert found["optimizer"] == pytest.approx(here["trainer: optimizer state"], rel=0.02)  # padding of buckets


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
        "servers": (False, False),
        "within": (True, True),
    }
    within = first["within"]
    assert "sampler: process" not in within
    # in 16 bits, halved: the trainer has half of the model in fp32
    assert within["sampler: weights"] == first["replayed"]["trainer: weights"] / 2
    assert within["sampler: key/value cache"] == 2 * GIB
    assert first["moments"]["vllm"] == {COMPUTING, WRAPPING}
    assert first["moments"]["sleeps"] == {COMPUTING, WRAPPING, PUSHING, SAMPLING}


def test_engines_of_two_replicas_count_where_they_meet(worker_pool, qwen3_dir):
    first, second = worker_pool.run(plans, qwen3_dir, 2, {}, world_size=2, init_process_group=False)
    process = "sampler: process"
    assert (first["on both"][process], second["on both"][process]) == (GIB, 2 * GIB)  # on 0 and 1, and on 1 and 2
    assert (first["second"].get(process), second["second"][process]) == (None, 2 * GIB)  # both engines are on 1
    assert first["vllm"][process] == second["vllm"][process] == GIB


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
    train_settings=TrainingSettings(layer_backend="torch"),
    hf_model=SimpleNamespace(has_latent_attention=False, family=FAMILIES["qwen3"]),
)


def on_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], vllm: Extension | None = None) -> None:
    """Make this machine look like one with a GPU, and torch like the pinned one for CUDA."""
    gpu = GPU("a GPU", capability, total_bytes=80 * GIB, free_bytes=80 * GIB)
    monkeypatch.setattr(start, "measure_gpu", lambda index: gpu)
    monkeypatch.setattr(start, "installed_vllm", lambda: vllm)
    monkeypatch.setattr(start, "installed_packages", lambda: {"vllm"})  # an environment for GPUs
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "sm_90"])


def test_gpu_that_torch_has_no_kernels_for_is_refused(monkeypatch):
    on_gpu(monkeypatch, (7, 0))
    with pytest.raises(ValueError, match=r"no kernels for the GPU a GPU, .* is 7\.0: .* sm_75 sm_80 sm_90"):
        start.check_gpu(MODULE, training=True)


def test_part_of_the_gpus_processors_is_refused(monkeypatch):
    on_gpu(monkeypatch, (9, 0))
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "75")
    with pytest.raises(ValueError, match="CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=75: with a part of a GPU's processors"):
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


def ranks(local_rank: int = 0, *, leaders: list[int], gpus: int = 2, before: int = 0) -> Any:
    """A strategy's numbers, on a machine with so many ranks that comes after `before` others."""
    return SimpleNamespace(
        parallel_devices=[torch.device("cuda", number) for number in range(gpus)],
        local_rank=local_rank,
        global_rank=before + local_rank,
        replica=SimpleNamespace(leaders=leaders),
        offloads=(),
    )


@pytest.mark.parametrize(
    ("engine", "options", "found"),
    [
        ({"tensor_parallel_size": 2}, {"leaders": [0, 1]}, {0: 1, 1: 2, 2: 1}),
        ({"tensor_parallel_size": 2}, {"leaders": [0, 2], "gpus": 4}, {0: 1, 1: 1, 2: 1, 3: 1}),
        ({}, {"leaders": [0, 1]}, {0: 1, 1: 1}),
        ({"devices": [3]}, {"leaders": [0, 1]}, {3: 2}),
        ({"devices": [3]}, {"leaders": [0, 2], "before": 2}, {3: 1}),  # the other's is on the other machine
        ({}, {"leaders": [0, 1, 2, 3], "before": 2}, {0: 1, 1: 1}),
        ({}, {"leaders": [0], "before": 2}, {}),
        ({"device": "cpu"}, {"leaders": [0, 1]}, {}),
    ],
)
def test_engines_of_all_replicas_are_counted_on_each_gpu(engine, options, found):
    for local_rank in range(2):
        assert start.engines_on(VLLMEngine(**engine), ranks(local_rank, **options)) == found


def test_engines_in_the_trainers_are_one_for_each():
    assert start.engines_on(ENGINES["within"](), ranks(leaders=[0])) == {0: 1, 1: 1}
    assert start.engines_on(ReplayEngine(), ranks(leaders=[0])) == {}


class OwnEngine(RolloutEngine):
    """A user's, which says nothing of GPUs."""


def test_an_engine_that_describes_nothing_is_left_out_of_the_plan_and_the_table_says_so(monkeypatch):
    on_gpu(monkeypatch, (9, 0), Extension("0.26.0", cuda_major=12))  # a vLLM that it does not use
    monkeypatch.setattr(start, "make_plan", lambda *args, **kwargs: MemoryPlan((), (), free=0))
    monkeypatch.setattr(start, "run_on_all_ranks", lambda check: check())
    start.check_gpu(MODULE, training=True, engine=OwnEngine())
    assert start.engines_on(OwnEngine(), ranks(leaders=[0])) == {}
    rows = [("sampler's memory", "not planned: OwnEngine has no describe_needs()")]
    assert start.describe_unplanned(OwnEngine(), MODULE.strategy) == rows
    assert start.describe_unplanned(ReplayEngine(), MODULE.strategy) == []
    on_cpu: Any = SimpleNamespace(root_device=torch.device("cpu"))
    assert start.describe_unplanned(OwnEngine(), on_cpu) == []


def on_two_gpus(
    monkeypatch: pytest.MonkeyPatch, model: Path, *, free: dict[int, int], capability: tuple[int, int] = (9, 0)
) -> Any:
    """Make this machine look like one with 4 GPUs, and return a module on its first; all engines' weights are 16-bit.

    Args:
        monkeypatch: Pytest's.
        model: A model's directory.
        free: GiB that are free on GPUs that have fewer than 80.
        capability: Of GPUs without a trainer.
    """
    from transformers import AutoConfig

    on_gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(start, "count_gpus", lambda: 4)
    monkeypatch.setattr(
        start, "measure_unused_gpu", lambda index: GPU("another", capability, 80 * GIB, free.get(index, 80) * GIB)
    )
    monkeypatch.setattr(start, "make_plan", lambda *args, **kwargs: MemoryPlan((), (), free=0))
    monkeypatch.setattr(start, "run_on_all_ranks", lambda check: check())
    fields = {**vars(MODULE.strategy), **vars(ranks(leaders=[0, 1]))}
    hf_model = SimpleNamespace(**vars(MODULE.hf_model), path=model, config=AutoConfig.from_pretrained(model))
    return SimpleNamespace(**{**vars(MODULE), "strategy": SimpleNamespace(**fields), "hf_model": hf_model})


def test_gpu_of_samplers_alone_that_is_too_small_is_refused(monkeypatch, qwen3_dir):
    module = on_two_gpus(monkeypatch, qwen3_dir, free={2: 40, 3: 70})
    start.check_gpu(module, training=True, engine=VLLMEngine())  # on the trainers' GPUs
    start.check_gpu(module, training=True, engine=VLLMEngine(devices=[2], gpu_memory_utilization=0.2))
    start.check_gpu(module, training=True, engine=VLLMEngine(devices=[7]))  # the engine says that there is none
    start.check_gpu(module, training=True, engine=VLLMEngine(tensor_parallel_size=2, kv_cache_memory_gb=38.0))
    message = r"needs 41\.0 GiB of a GPU \(number 2, the sampler's\) that has 40\.0 GiB free"
    with pytest.raises(ValueError, match=message) as error:
        start.check_gpu(module, training=True, engine=VLLMEngine(tensor_parallel_size=2))
    assert "lower the engine's gpu_memory_utilization" in str(error.value)
    with pytest.raises(
        ValueError, match=r"(?s)needs 82\.0 GiB of a GPU \(number 3.*x 2 engines"
    ):  # one of each replica
        start.check_gpu(module, training=True, engine=VLLMEngine(devices=[3]))
    module.strategy.local_rank = module.strategy.global_rank = 1
    start.check_gpu(module, training=True, engine=VLLMEngine(devices=[3]))  # the first rank of the machine looks


@pytest.mark.parametrize("name", ["within", "vllm"])
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_engine_in_bf16_is_refused_on_gpus_without_it(monkeypatch, qwen3_dir, tmp_path, name, dtype):
    module = on_two_gpus(monkeypatch, in_bf16(qwen3_dir, tmp_path), free={})
    on_gpu(monkeypatch, (7, 5))
    engine = ENGINES[name]()
    engine.dtype = dtype
    with pytest.raises(ValueError, match=r"samples in bfloat16 on the GPU a GPU, .* is 7\.5.*dtype='float16'"):
        start.check_gpu(module, training=True, engine=engine)
    for other in ("float16", "float32"):
        engine.dtype = other
        start.check_gpu(module, training=True, engine=engine)
    engine.dtype, module.hf_model.path = "auto", qwen3_dir  # in fp32
    start.check_gpu(module, training=True, engine=engine)
    start.check_gpu(module, training=True, engine=VLLMEngine(device="cpu", dtype="bfloat16"))


def test_engine_in_bf16_is_refused_on_a_gpu_without_a_trainer(monkeypatch, qwen3_dir):
    module = on_two_gpus(monkeypatch, qwen3_dir, free={}, capability=(7, 5))
    start.check_gpu(module, training=True, engine=VLLMEngine(dtype="bfloat16"))
    for places in ({"devices": [2]}, {"tensor_parallel_size": 2}):
        with pytest.raises(ValueError, match=r"samples in bfloat16 on the GPU another, .* is 7\.5"):
            start.check_gpu(module, training=True, engine=VLLMEngine(dtype="bfloat16", **places))


def in_bf16(model: Path, directory: Path) -> Path:
    """Return a model's directory whose config says that its weights are in bf16."""
    shutil.copytree(model, directory / "bf16")
    file = directory / "bf16" / "config.json"
    config = {name: value for name, value in json.loads(file.read_text()).items() if name != "torch_dtype"}
    file.write_text(json.dumps({**config, "dtype": "bfloat16"}))
    return directory / "bf16"


class Chooses(pl.Callback):
    """Has a module choose for a GPU that is made up, before its model is built and after it."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def choose(self, module: Any, name: str, *, free: int, training: bool = True, **given: Any) -> None:
        kept = module.train_settings
        module.train_settings = replace(kept, **given)
        budget = Budget(module)
        budget._open = module.train_settings
        gpu = GPU("NVIDIA H100 80GB HBM3", (9, 0), 80 * GIB, free)
        try:
            budget._plan(module.train_settings, gpu, training=training)
            chosen = module.train_settings
            more = [settings.token_budget for settings, _ in budget._trial.wanted] if budget._trial else [None]
            self.found[name] = (chosen.token_budget, chosen.recompute, more[0])
            self.found[f"{name} row"] = budget.describe()
            if budget._trial:
                self.found[f"{name}, measured"] = [self.take(module, budget, fits) for fits in (0, 1, None)]
        except ValueError as error:
            self.found[name] = str(error)
        module.train_settings = kept

    def take(self, module: Any, budget: Budget, fits: int | None) -> int:
        """Return what follows two steps as planned, where the second rank has room for one of what may, or none."""
        assert budget._trial is not None
        trial, half = budget._trial, module.train_settings
        needed = [plan.needed - PROCESS_BYTES for _, plan in trial.wanted]  # torch does not see all of it
        room, needs = needed[0] / MARGIN, int(trial.tried.needed) - PROCESS_BYTES
        if module.trainer.global_rank:
            room = needs if fits is None else needed[fits] / MARGIN
        is_second = not budget._take(trial, needs, int(room) + 1)
        assert is_second == (fits != 0)
        if is_second:
            assert module.train_settings is half
            assert budget._take(replace(trial, is_second=True), needs, int(room) + 1)
        taken: int = module.train_settings.token_budget
        module.train_settings = half
        return taken

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        trainer.datamodule = PromptDataModule("rows.jsonl", tokenizer=pl_module.model_path, batch_size=64)  # type: ignore[attr-defined]
        self.found["settled"] = pl_module.train_settings.token_budget
        self.found["row"] = pl_module.budget.describe()
        both: dict[str, Any] = {"max_tokens_per_microbatch": "auto", "recompute": "auto"}
        rank = trainer.global_rank
        self.choose(pl_module, "built", free=80 * GIB, **both)
        model = pl_module._modules.pop("model")
        self.choose(pl_module, "all", free=80 * GIB, **both)
        self.choose(pl_module, "scores", free=80 * GIB, training=False, **both)
        self.choose(pl_module, "one is full", free=80 * GIB if rank == 0 else int(1.1 * GIB), **both)
        self.choose(pl_module, "tokens", free=80 * GIB, max_tokens_per_microbatch="auto", recompute="none")
        self.choose(pl_module, "none", free=GIB // 2, **both)
        pl_module._modules["model"] = model


def choices(model: Path) -> dict[str, Any]:
    callback = Chooses()
    fit_grpo(model, {}, 2, steps=1, callbacks=[callback], module={"max_tokens_per_microbatch": "auto"})
    return callback.found


def test_auto_chooses_alike_on_all_ranks(worker_pool, qwen3_dir):
    first, second = worker_pool.run(choices, qwen3_dir, world_size=2, init_process_group=False)
    for name in ("settled", "row", "built", "all", "scores", "tokens"):
        assert first[name] == second[name], name
    assert first["settled"] == 8192  # nothing is planned on a CPU
    assert first["row"] == [("auto", "8192 tokens per micro-batch, not recomputed: nothing is planned on a CPU")]
    half, recompute, wanted = first["all"]
    assert (2 * half, recompute) == (wanted, "none")  # plenty of room; the first step is measured
    ((_, row),) = first["all row"]
    assert f"{wanted} tokens per micro-batch, not recomputed" in row
    assert f"the first step takes {half} and is measured" in row
    assert first["scores"] == (wanted, "none", None)  # no step is taken
    assert first["all, measured"] == second["all, measured"]  # for the fuller one
    whole, next_to_it, least = first["all, measured"]
    assert (whole, least) == (wanted, half)
    assert half < next_to_it < wanted
    assert first["one is full"][0] == second["one is full"][0] < wanted  # for the fuller one
    assert "none of" in first["none"]
    assert "trainer: weights" in first["none"]  # the arithmetic


def test_ppo_refuses_auto():
    for given in ({"max_tokens_per_microbatch": "auto"}, {"recompute": "auto"}):
        with pytest.raises(ValueError, match=r"auto'.*the planner does not know what a critic takes; give PPOModule"):
            PPOModule("nothing", rewards=[lambda **_: [0.0]], train=TrainingSettings(**given))
