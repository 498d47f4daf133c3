"""What is checked on a GPU before a run loads anything: capability, builds, and whether trainer and sampler fit."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from lightning_megatron_rl.devices import checks
from lightning_megatron_rl.devices.facts import DeviceFacts
from lightning_megatron_rl.devices.measure import import_engine, installed_vllm, measure_gpu, parse_version
from lightning_megatron_rl.devices.memory import ModelSize, Split, StateBytes, sampler_parts, trainer_parts
from lightning_megatron_rl.devices.moments import MemoryPlan, Part
from lightning_megatron_rl.models.backend import LayerBackend, resolve_layer_backend
from lightning_megatron_rl.models.sharded_views import BUCKET_BYTES
from lightning_megatron_rl.models.size import model_size
from lightning_megatron_rl.rollout.checkpoint import CheckpointLayout
from lightning_megatron_rl.rollout.colocated import ColocatedVLLMEngine
from lightning_megatron_rl.rollout.engine import RolloutEngine
from lightning_megatron_rl.rollout.vllm import VLLMEngine
from lightning_megatron_rl.strategy.distributed import run_on_all_ranks
from lightning_megatron_rl.strategy.state_size import has_fused_adam, state_size

if TYPE_CHECKING:
    from megatron.core.optimizer import OptimizerConfig

    from lightning_megatron_rl.models.lora import LoRASettings
    from lightning_megatron_rl.strategy.megatron import MegatronStrategy


class Starts(Protocol):
    """What of a module decides whether it fits on a GPU."""

    max_tokens_per_microbatch: int
    logprob_chunk_size: int
    layer_backend: Any
    model_config: dict[str, Any]
    lora: "LoRASettings | None"
    optimizer_config: "OptimizerConfig | None"  # None: Adam

    @property
    def strategy(self) -> "MegatronStrategy": ...  # noqa: D102
    @property
    def hf_model(self) -> Any: ...  # noqa: D102


def check_gpu(module: Starts, *, training: bool, engine: RolloutEngine | None = None, frozen_copies: int = 0) -> None:
    """Refuse a run that this rank's GPU cannot do or cannot hold; on a CPU there is nothing to refuse.

    Args:
        module: The module that is about to load its weights.
        training: Whether gradients and optimizer state will be there.
        engine: Its sampler, if it has one.
        frozen_copies: Reference policies that stay on the GPU.

    Raises:
        ValueError: Torch has no kernels for the GPU, or it lacks a number format or memory; with the arithmetic.
        RuntimeError: Transformer Engine or vLLM does not fit the installed torch.
    """
    strategy = module.strategy
    device = strategy.root_device
    if device.type != "cuda":
        return
    precision = strategy.precision_plugin
    gpu = measure_gpu(device.index)
    facts = DeviceFacts(
        torch=torch.__version__,
        torch_cuda=parse_version(torch.version.cuda),
        architectures=tuple(torch.cuda.get_arch_list()),
        gpus=(gpu,),
        vllm=installed_vllm(),
    )
    checks.check_architecture(facts)
    checks.check_precision(facts, precision.precision)
    fields = module.model_config
    checks.check_low_precision(facts, fields.get("fp8"), fields.get("fp8_recipe", "delayed"), fields.get("fp4"))
    if _backend(module) == "transformer_engine":
        checks.check_transformer_engine(replace(facts, transformer_engine=import_engine()))
    if isinstance(engine, VLLMEngine | ColocatedVLLMEngine):
        checks.check_vllm(facts)
    plan = make_plan(
        module,
        training=training,
        engine=engine,
        frozen_copies=frozen_copies,
        free=gpu.free_bytes,
        total=gpu.total_bytes,
    )
    run_on_all_ranks(plan.check)  # a GPU that is fuller than the others must not leave their ranks waiting


def make_plan(
    module: Starts, *, training: bool, engine: RolloutEngine | None, frozen_copies: int, free: int, total: int
) -> MemoryPlan:
    """Return what `module` and its engine take of a GPU with so many bytes in `total`, `free` before they start.

    Of the engine that is what it takes of this rank's GPU: nothing if it is on others.
    """
    strategy = module.strategy
    checkpoint = CheckpointLayout.read(module.hf_model.path)
    size = model_size(module.hf_model.config, checkpoint.shapes)
    parts = trainer_parts(
        size,
        _split(strategy),
        precision=strategy.precision_plugin.precision,
        tokens=module.max_tokens_per_microbatch,
        logprob_chunk=module.logprob_chunk_size,
        recompute=module.model_config.get("recompute_granularity") == "full",
        fused_activation=_fuses_activation(module),
        frozen_copies=frozen_copies,
        training=training,
        adapters=module.lora is not None,
        state=_state_size(module) if training else None,
        push_bucket=BUCKET_BYTES if _puts_together(module, engine) else 0,
    )
    sleeps = engine is not None and engine.sleep_level > 0
    sampler = _sampler(engine, strategy, size, checkpoint.dtype, total)
    return MemoryPlan(parts, sampler, free=free, apart=sleeps, offloads=strategy.offloads)


def _puts_together(module: Starts, engine: RolloutEngine | None) -> bool:
    """Whether weights are put together from several ranks for a sampler on a GPU."""
    if module.lora is not None or module.strategy.layout.is_whole:
        return False
    return isinstance(engine, ColocatedVLLMEngine) or (isinstance(engine, VLLMEngine) and engine.device != "cpu")


def _split(strategy: "MegatronStrategy") -> Split:
    layout, world = strategy.layout, strategy.world_size
    tensor, pipeline = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    expert, expert_tensor = layout.expert_model_parallel_size, layout.expert_tensor_parallel_size or tensor
    return Split(
        tensor=tensor,
        pipeline=pipeline,
        chunks=layout.virtual_pipeline_model_parallel_size or 1,
        context=layout.context_parallel_size,
        expert=expert,
        expert_tensor=expert_tensor,
        replicas=layout.data_parallel_size(world) * layout.context_parallel_size,
        expert_replicas=world // (pipeline * expert * expert_tensor),
        sharded=strategy.use_distributed_optimizer,
    )


def _state_size(module: Starts) -> StateBytes:
    strategy = module.strategy
    return state_size(
        strategy.precision_plugin,
        strategy.resolve_ddp_config(),
        module.optimizer_config,
        fused=has_fused_adam(),
    )


def _fuses_activation(module: Starts) -> bool:
    """Whether one kernel computes the MLP's gate: the user's choice, else that of `models.fusions`."""
    fields = module.model_config
    if fields.get("use_te_activation_func"):
        return True
    by_default = (
        _backend(module) == "transformer_engine" and getattr(module.hf_model.config, "hidden_act", "") == "silu"
    )
    return bool(fields.get("bias_activation_fusion", by_default))


def _backend(module: Starts) -> LayerBackend:
    return resolve_layer_backend(
        module.layer_backend,
        module.strategy.root_device,
        params_dtype=module.strategy.precision_plugin.params_dtype,
        context_parallel_size=module.strategy.layout.context_parallel_size,
    )


def _sampler(
    engine: RolloutEngine | None, strategy: "MegatronStrategy", size: ModelSize, stored: str, total: int
) -> tuple[Part, ...]:
    """What vLLM takes of this rank's GPU; `stored` is the dtype of the checkpoint, which "auto" stands for."""
    if isinstance(engine, VLLMEngine) and _is_here(engine, strategy):
        utilization, own_process = engine.gpu_memory_utilization, True
    elif isinstance(engine, ColocatedVLLMEngine):
        utilization, own_process = 0.0, False  # its cache has a size
    else:
        return ()
    cache_gb = engine.kv_cache_memory_gb
    return sampler_parts(
        size,
        tensor=engine.tensor_parallel_size,
        total=total,
        utilization=utilization,
        cache_bytes=None if cache_gb is None else int(cache_gb * 2**30),
        element_bytes=4 if (stored if engine.dtype == "auto" else engine.dtype) == "float32" else 2,
        own_process=own_process,
    )


def _is_here(engine: VLLMEngine, strategy: "MegatronStrategy") -> bool:
    """Whether the engine, which the first rank of this replica starts, has a worker on this rank's GPU."""
    assert strategy.replica is not None
    assert strategy.parallel_devices is not None
    numbers = [
        place if device.index is None else device.index for place, device in enumerate(strategy.parallel_devices)
    ]
    first = strategy.replica.ranks[0] - (strategy.global_rank - strategy.local_rank)
    if engine.device == "cpu" or first < 0:  # the first rank is on another node
        return False
    devices = engine.devices or range(numbers[first], numbers[first] + engine.tensor_parallel_size)
    return numbers[strategy.local_rank] in devices
