"""What is checked on a GPU before a run loads anything: capability, builds, and whether trainer and sampler fit."""

import json
import os
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lightning_megatron_rl.data.base import RowDataModule
from lightning_megatron_rl.devices import checks
from lightning_megatron_rl.devices.facts import GPU, PROCESSORS, DeviceFacts
from lightning_megatron_rl.devices.measure import (
    count_gpus,
    import_engine,
    installed_vllm,
    measure_gpu,
    measure_unused_gpu,
    parse_version,
)
from lightning_megatron_rl.models.families.check import divided_sizes
from lightning_megatron_rl.models.families.registry import FAMILIES
from lightning_megatron_rl.models.families.rope import scaled_positions
from lightning_megatron_rl.models.hf.size import model_size
from lightning_megatron_rl.models.layers.backend import LayerBackend, resolve_layer_backend
from lightning_megatron_rl.modules.planning import Lengths, Model, describe_run, describe_work
from lightning_megatron_rl.modules.training import TrainingSettings
from lightning_megatron_rl.parallel.distributed import run_on_all_ranks
from lightning_megatron_rl.planner.hardware import Hardware, recognise
from lightning_megatron_rl.planner.memory import StateBytes, trainer_parts
from lightning_megatron_rl.planner.moments import MemoryPlan
from lightning_megatron_rl.planner.needs import EngineNeeds
from lightning_megatron_rl.planner.report import summary
from lightning_megatron_rl.planner.run import Run, make_split
from lightning_megatron_rl.rollout.model_directory import CheckpointLayout
from lightning_megatron_rl.rollout.protocol import RolloutEngine
from lightning_megatron_rl.rollout.vllm.installation import check_for_gpu, installed_packages
from lightning_megatron_rl.strategy.products import check_products
from lightning_megatron_rl.strategy.state_size import has_fused_adam, state_size
from lightning_megatron_rl.weights.sharded_views import BUCKET_BYTES

if TYPE_CHECKING:
    from lightning_megatron_rl.modules.model import ModelModule
    from lightning_megatron_rl.strategy.megatron import MegatronStrategy


def check_positions(module: "ModelModule", data: Any, rope: dict[str, Any]) -> None:
    """Refuse sequences longer than the positions that YaRN is made for.

    Args:
        module: With its engine, if it has one.
        data: Its data module.
        rope: `rope_parameters` of the model's config.

    Raises:
        ValueError: With both lengths, and the factor that would do.
    """
    limit = scaled_positions(rope)
    engine = module.engine
    name, longest = (
        ("data.max_length", getattr(data, "max_length", 0))
        if engine is None
        else ("engine.max_model_len", engine.max_model_len)
    )
    if limit is not None and longest > limit:
        original = rope["original_max_position_embeddings"]
        raise ValueError(
            f"{name}={longest}: yarn of {module.model_path} is made for {original} x factor {rope['factor']} = {limit}"
            f" positions. Lower it, or raise the factor in config.json to {-(-longest // original)}"
        )


def check_sampled(module: "ModelModule", config: Any) -> None:
    """Refuse to sample from a model that vLLM would compute otherwise than Transformers, or may.

    Args:
        module: With its engine, if it has one.
        config: Of its model, Transformers'.

    Raises:
        ValueError: Nothing that vLLM sampled of this family was compared, or config.json lacks a setting that vLLM
            reads and Transformers does not.
    """
    if module.engine is None:
        return
    family = FAMILIES[config.model_type]
    if not family.sampled:
        raise ValueError(
            f"{type(module).__name__} with {family.name} ({module.model_path}): what vLLM samples of this family has"
            " not been compared with Transformers, so log-probs might be wrong. SFTModule and the export work"
        )
    for name, value in family.needed_to_sample.items():
        found = getattr(config, name, None)
        if found != value:
            raise ValueError(
                f"{type(module).__name__} with {family.name} ({module.model_path}): config.json has {name}={found!r}."
                f" Transformers computes {value!r} whatever it says, and vLLM something else then. Put"
                f" {json.dumps(name)}: {json.dumps(value)} into config.json"
            )


def check_gpu(
    module: "ModelModule", *, training: bool, engine: RolloutEngine | None = None, frozen_copies: int = 0
) -> MemoryPlan | None:
    """Refuse a run that this rank's GPU, or one of its samplers, cannot do or cannot hold; a CPU refuses nothing.

    Returns the plan of the rank's GPU; None on a CPU, where nothing is planned.

    Args:
        module: The module that is about to load its weights.
        training: Whether gradients and optimizer state will be there.
        engine: Its sampler, if it has one.
        frozen_copies: Reference policies that stay on the GPU.

    Raises:
        ValueError: Torch has no kernels for the GPU, it lacks a number format or memory, with the arithmetic, or only a
            part of its processors may be used.
        RuntimeError: Transformer Engine or vLLM does not fit the installed torch, or fp32 is not multiplied as fp32.
    """
    strategy = module.strategy
    device = strategy.root_device
    if device.type != "cuda":
        return None
    precision = strategy.precision_plugin
    gpu = measure_gpu(device.index)
    facts = DeviceFacts(
        torch=torch.__version__,
        torch_cuda=parse_version(torch.version.cuda),
        architectures=tuple(torch.cuda.get_arch_list()),
        gpus=(gpu,),
        processors=os.environ.get(PROCESSORS),
        vllm=installed_vllm(),
    )
    checks.check_architecture(facts)
    checks.check_processors(facts.processors)
    checks.check_precision(facts, precision.precision)
    fields = module.train_settings.model_config
    checks.check_low_precision(facts, fields.get("fp8"), fields.get("fp8_recipe", "delayed"), fields.get("fp4"))
    has_engine = _backend(module) == "transformer_engine"
    if has_engine:
        checks.check_transformer_engine(replace(facts, transformer_engine=import_engine()))
    if precision.precision == "32-true":
        run_on_all_ranks(partial(check_products, device, transformer_engine=has_engine))
    needs = _needs_of(engine)
    plans: list[MemoryPlan] = []
    samplers: tuple[GPU, ...] = ()
    if engine is not None and needs is not None:
        if needs.vllm:
            check_for_gpu(needs.device, installed_packages())
            checks.check_vllm(facts)
        others = _gpus_of_samplers(engine, strategy) if needs.on_gpu else {}
        plans += [plan_sampler(module, engine, number, other) for number, other in others.items()]
        shared = needs.on_gpu and engines_on(engine, strategy)[device.index]
        samplers = (*others.values(), gpu) if shared else tuple(others.values())
    plan = make_plan(
        module,
        training=training,
        engine=engine,
        frozen_copies=frozen_copies,
        free=gpu.free_bytes,
        total=gpu.total_bytes,
    )

    def check() -> None:
        if needs is not None and samplers:
            stored = CheckpointLayout.read(module.hf_model.path).dtype
            checks.check_engine_precision(replace(facts, gpus=samplers), needs.dtype_of(stored))
        for found in (plan, *plans):
            found.check()

    run_on_all_ranks(check)  # a GPU that is fuller than the others must not leave their ranks waiting
    return plan


def make_plan(
    module: "ModelModule",
    *,
    training: bool,
    engine: RolloutEngine | None,
    frozen_copies: int,
    free: int,
    total: int,
    settings: TrainingSettings | None = None,
) -> MemoryPlan:
    """Return what `module` and its engine take of a GPU with so many bytes in `total`, `free` before they start.

    Of the engine that is what it takes of this rank's GPU, and so do those of other replicas: nothing if all are on
    other GPUs, whose memory `plan_sampler` plans. `settings` stand in for the module's own.
    """
    strategy, settings = module.strategy, settings or module.train_settings
    checkpoint = CheckpointLayout.read(module.hf_model.path)
    size = model_size(module.hf_model.config, checkpoint.shapes)
    tokens, stages = settings.token_budget, strategy.layout.pipeline_model_parallel_size
    in_flight = stages  # micro-batches whose backward pass is to come, on the first stage
    if (most := _most_tokens(module)) is not None:
        tokens, in_flight = min(tokens, most), min(stages, -(-most // tokens))
    parts = trainer_parts(
        replace(size, layers=-(-size.layers * in_flight // stages)),
        make_split(strategy.layout, strategy.world_size, sharded=strategy.use_distributed_optimizer),
        precision=strategy.precision_plugin.precision,
        tokens=tokens,
        logprob_chunk=module.logprob_chunk_size,
        recompute=settings.recomputed(strategy.layout.chunk_layers(size.layers)),
        fused_activation=_fuses_activation(module),
        frozen_copies=frozen_copies,
        training=training,
        adapters=module.train_settings.lora is not None,
        state=_state_size(module) if training else None,
        push_bucket=BUCKET_BYTES if _puts_together(module, engine) else 0,
        message_bytes=_message_bytes(module, engine),
    )
    sleeps = engine is not None and engine.sleep_level > 0
    engines = engines_on(engine, strategy)[_numbers(strategy)[strategy.local_rank]]
    needs = _needs_of(engine)
    sampler = needs.parts(size, engines=engines, stored=checkpoint.dtype, total=total) if needs else ()
    return MemoryPlan(parts, sampler, free=free, apart=sleeps, offloads=strategy.offloads)


def _most_tokens(module: "ModelModule") -> int | None:
    """Return what a replica has in one update at most; None where nothing is known of what a step does."""
    data, strategy = module.trainer.datamodule, module.strategy  # type: ignore[attr-defined]
    if not isinstance(data, RowDataModule):
        return None
    return describe_work(module, data, Lengths()).most_tokens(strategy.layout.data_parallel_size(strategy.world_size))


def plan_sampler(module: "ModelModule", engine: RolloutEngine, number: int, gpu: GPU) -> MemoryPlan:
    """Return what the engines of this machine take of a GPU that no trainer is on."""
    checkpoint = CheckpointLayout.read(module.hf_model.path)
    size = model_size(module.hf_model.config, checkpoint.shapes)
    engines = engines_on(engine, module.strategy)[number]
    needs = engine.describe_needs()
    assert needs is not None
    sampler = needs.parts(size, engines=engines, stored=checkpoint.dtype, total=gpu.total_bytes)
    apart = engine.sleep_level > 0
    return MemoryPlan((), sampler, free=gpu.free_bytes, apart=apart, gpu=f"a GPU (number {number}, the sampler's)")


def describe_plan(module: "ModelModule", data: Any, gpu: str | None) -> list[tuple[str, str]]:
    """Return a row for the table at start: the memory that was planned, and what a step is expected to take.

    Args:
        module: That has been set up.
        data: The run's data module.
        gpu: Its GPU as the driver names it; None on a CPU. There is no row for one that the planner does not know.
    """
    kind = None if gpu is None else recognise(gpu)
    if kind is None or not isinstance(data, RowDataModule):  # nothing is known of what a step does
        return []
    return [("plan", f"{summary(plan_run(module, data, kind))} (docs/planning.md)")]


def plan_run(module: "ModelModule", data: Any, kind: Hardware) -> Run:
    """Return the run of a module that has its model's config, on GPUs of a kind."""
    checkpoint = CheckpointLayout.read(module.hf_model.path)
    config, strategy = module.hf_model.config, module.strategy
    model = Model(
        module.model_path,
        model_size(config, checkpoint.shapes),
        divided_sizes(config),
        checkpoint.dtype,
        getattr(config, "hidden_act", "") == "silu",
    )
    return describe_run(
        module,
        data,
        strategy,
        model=model,
        precision=strategy.precision_plugin,
        kind=kind.in_nodes(len(_numbers(strategy)), strategy.num_nodes),
        world=strategy.world_size,
        averages=module.num_averages,
    )


def _needs_of(engine: RolloutEngine | None) -> EngineNeeds | None:
    return None if engine is None else engine.describe_needs()


def _puts_together(module: "ModelModule", engine: RolloutEngine | None) -> bool:
    """Whether weights are put together from several ranks for a sampler on a GPU."""
    if module.train_settings.lora is not None or module.strategy.layout.is_whole:
        return False
    needs = _needs_of(engine)
    return needs is not None and needs.on_gpu


def _message_bytes(module: "ModelModule", engine: RolloutEngine | None) -> int:
    """What messages with weights to servers take of a rank's GPU at most."""
    needs, strategy = _needs_of(engine), module.strategy
    if needs is None:
        return 0
    replicas = strategy.layout.data_parallel_size(strategy.world_size)
    return needs.message_bytes(replicas, adapters=module.train_settings.lora is not None)


def _state_size(module: "ModelModule") -> StateBytes:
    strategy = module.strategy
    size = state_size(
        strategy.precision_plugin,
        strategy.resolve_ddp_config(),
        module.train_settings.optimizer,
        fused=has_fused_adam(),
    )
    return replace(size, optimizer=size.optimizer + module.num_averages * torch.float32.itemsize)


def _fuses_activation(module: "ModelModule") -> bool:
    """Whether one kernel computes the MLP's gate: the user's choice, else that of `models.fusions`."""
    fields = module.train_settings.model_config
    if fields.get("use_te_activation_func"):
        return True
    by_default = (
        _backend(module) == "transformer_engine" and getattr(module.hf_model.config, "hidden_act", "") == "silu"
    )
    return bool(fields.get("bias_activation_fusion", by_default))


def _backend(module: "ModelModule") -> LayerBackend:
    return resolve_layer_backend(
        module.train_settings.layer_backend,
        module.strategy.root_device,
        params_dtype=module.strategy.precision_plugin.params_dtype,
        context_parallel_size=module.strategy.layout.context_parallel_size,
        latent_attention=module.hf_model.has_latent_attention,
        family=module.hf_model.family,
    )


def _numbers(strategy: "MegatronStrategy") -> list[int]:
    """The GPU of each rank of this machine."""
    assert strategy.parallel_devices is not None
    return [place if device.index is None else device.index for place, device in enumerate(strategy.parallel_devices)]


def engines_on(engine: RolloutEngine | None, strategy: "MegatronStrategy") -> Counter[int]:
    """Return how many engines of the run have a worker on each GPU of this machine, by the GPU's number.

    The first rank of each replica starts one, on its own GPU and those behind it unless the engine names others.
    """
    needs = _needs_of(engine)
    if needs is None or not needs.on_gpu:
        return Counter()
    numbers = _numbers(strategy)
    assert strategy.replica is not None
    before = strategy.global_rank - strategy.local_rank  # ranks of the nodes before this one
    places = (leader - before for leader in strategy.replica.leaders)
    return needs.engines_on(numbers, [numbers[place] for place in places if 0 <= place < len(numbers)])


def describe_unplanned(engine: RolloutEngine, strategy: "MegatronStrategy") -> list[tuple[str, str]]:
    """Return a row for the table at start that says if nothing is planned for an engine beside GPUs."""
    if strategy.root_device.type == "cpu" or engine.describe_needs() is not None:
        return []
    return [("sampler's memory", f"not planned: {type(engine).__name__} has no describe_needs()")]


def _gpus_of_samplers(engine: RolloutEngine, strategy: "MegatronStrategy") -> dict[int, GPU]:
    """The GPUs that have samplers and no trainer, on the first rank of a machine; the engine names missing ones."""
    if strategy.local_rank > 0:
        return {}
    alone = sorted(engines_on(engine, strategy).keys() - set(_numbers(strategy)))
    return {number: measure_unused_gpu(number) for number in alone if 0 <= number < count_gpus()}
