"""A module and its data as the planner sees them: before a run from their settings alone, at its start on its GPUs."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from lightning_megatron_rl.data.planning import round_up
from lightning_megatron_rl.data.preference import PreferenceDataModule
from lightning_megatron_rl.modules.sharing import microbatch_rules
from lightning_megatron_rl.modules.training import TrainingSettings
from lightning_megatron_rl.parallel.layout import ParallelLayout
from lightning_megatron_rl.planner.divisibility import DividedSizes, PipelineSplit
from lightning_megatron_rl.planner.hardware import Hardware
from lightning_megatron_rl.planner.memory import ModelSize
from lightning_megatron_rl.planner.needs import EngineNeeds
from lightning_megatron_rl.planner.run import Run, Sampling
from lightning_megatron_rl.planner.timing import Work
from lightning_megatron_rl.strategy.state_size import state_size

if TYPE_CHECKING:
    from lightning_megatron_rl.modules.model import ModelModule
    from lightning_megatron_rl.strategy.megatron import MegatronStrategy
    from lightning_megatron_rl.strategy.precision import MegatronPrecision

PROMPT_TOKENS = 256  # of a prompt, where nobody says how long they are
SEQUENCE_TOKENS = 1024  # of a supervised sequence, the same


@dataclass(frozen=True)
class Lengths:
    """How long sequences are taken to be; None: a prompt of at most 256 tokens, responses as long as they may be.

    Args:
        prompt: Tokens of a prompt.
        response: Tokens of a response.
    """

    prompt: int | None = None
    response: int | None = None


@dataclass(frozen=True)
class Model:
    """A model as its config describes it."""

    name: str
    size: ModelSize
    divided: DividedSizes
    dtype: str = "bfloat16"
    gated_by_silu: bool = True


def describe_run(
    module: "ModelModule",
    data: Any,
    strategy: "MegatronStrategy",
    *,
    model: Model,
    precision: "MegatronPrecision",
    kind: Hardware,
    world: int,
    lengths: Lengths = Lengths(),
    averages: int = 0,
) -> Run:
    """Return the run that a module, its data and a strategy make on so many GPUs.

    Args:
        module: Need not have been set up.
        data: A data module; known of it are its `batch_size` and `max_length`, if it has them.
        strategy: Need not have been set up, either.
        model: Of `module.model_path`.
        precision: The Trainer's.
        kind: The GPUs.
        world: Their number.
        lengths: Of prompts and responses.
        averages: Of the weights, that are kept beside the optimizer's state.
    """
    settings: TrainingSettings = module.train_settings
    from lightning_megatron_rl.strategy.megatron_configs import resolve_ddp_config

    ddp_config = resolve_ddp_config(
        strategy.ddp_config,
        precision=precision.precision,
        use_distributed_optimizer=strategy.use_distributed_optimizer,
        device=torch.device("cuda"),
    )
    state = state_size(precision, ddp_config, settings.optimizer, fused=True)
    state = replace(state, optimizer=state.optimizer + averages * torch.float32.itemsize)
    fields = settings.model_config
    lora = settings.lora
    run = Run(
        model=model.name,
        size=model.size,
        divided=model.divided,
        layout=strategy.layout,
        kind=kind,
        world=world,
        work=describe_work(module, data, lengths),
        precision=precision.precision,
        state=state,
        sharded=strategy.use_distributed_optimizer,
        pipeline_split=PipelineSplit.from_overrides(fields),
        microbatch_tokens=settings.token_budget,
        logprob_chunk=module.logprob_chunk_size,
        fused_activation=bool(fields.get("bias_activation_fusion", model.gated_by_silu)),
        adapter_parameters=0 if lora is None else adapter_parameters(model.size, lora.rank),
        frozen_copies=module.frozen_copies,
        sampling=_describe_sampling(module),
        servers=_describe_servers(module),
        offloads=tuple(strategy.offloads),
        stored=model.dtype,
        dispatcher=fields.get("moe_token_dispatcher_type"),
    )
    return replace(run, recompute=settings.recomputed(run.chunk_layers))


def _check_length(what: str, tokens: int | None, most: int, limit: str) -> None:
    """Refuse a length to plan with that no sequence of the run can have.

    Raises:
        ValueError: It is longer than the config's limit.
    """
    if tokens is not None and tokens > most:
        raise ValueError(f"{what} of {tokens} tokens to plan with > {limit} = {most}: plan with fewer, or raise it")


def describe_work(module: Any, data: Any, lengths: Lengths) -> Work:
    """Return what a step of a module does: a rollout with its passes, or a batch of sequences.

    Raises:
        ValueError: Lengths that the config's limits do not let sequences have.
    """
    batch = int(getattr(data, "batch_size", 1))
    sampling = getattr(module, "sampling", None)
    reference = getattr(module, "reference", None)
    referred = reference is not None and reference.kind != "none"
    if sampling is None or module.engine is None:
        longest = getattr(data, "max_length", SEQUENCE_TOKENS)
        given = (lengths.prompt or 0) + (lengths.response or 0)
        _check_length("sequences", given, longest, "data.max_length")
        tokens = min((lengths.prompt or 0) + (lengths.response or SEQUENCE_TOKENS), longest)
        sequences = batch * (2 if isinstance(data, PreferenceDataModule) else 1)  # both sides of a pair
        if (most := getattr(data, "max_tokens_per_batch", None)) is not None:
            sequences = max(1, min(sequences, most // tokens))
        return Work(sequences=sequences, tokens=tokens, scored=int(referred), longest=longest, rows=batch)
    room = max(1, module.engine.max_model_len - sampling.max_tokens)
    _check_length("responses", lengths.response, sampling.max_tokens, "sampling.max_tokens")
    _check_length("prompts", lengths.prompt, room, "engine.max_model_len - sampling.max_tokens")
    response = lengths.response or sampling.max_tokens
    prompt = lengths.prompt or min(PROMPT_TOKENS, room)
    return Work(
        sequences=batch * module.num_generations,
        tokens=prompt + response,
        prompts=batch,
        prompt_tokens=prompt,
        response_tokens=response,
        updates=module.updates_per_rollout,
        scored=int(module.scores_first) + int(referred),
        longest=module.engine.max_model_len,
    )


def longest_sequence(module: Any, data: Any, layout: ParallelLayout) -> int:
    """Return the most tokens of a sequence that a run can have: what a micro-batch must hold if `auto` chooses it.

    They are those of all context-parallel ranks, with the padding that the layout asks for.

    Raises:
        ValueError: Nobody says it: no sampler, and a data module without `batch_size` and `max_length`.
    """
    multiple = microbatch_rules(layout, fp8=module.train_settings.is_fp8).row_multiple
    if module.engine is not None:
        return round_up(int(module.engine.max_model_len), multiple)
    if hasattr(data, "max_length") and hasattr(data, "batch_size"):
        return round_up(int(data.max_length), multiple)
    raise ValueError(
        f"train.max_tokens_per_microbatch={module.train_settings.max_tokens_per_microbatch!r},"
        f" train.recompute={module.train_settings.recompute!r} with {type(data).__name__}: the planner does not know"
        " how long its sequences are; give a number of tokens, and recompute none, full or a number of layers, or a"
        " data module that has batch_size (sequences) and max_length (tokens)"
    )


def adapter_parameters(size: ModelSize, rank: int) -> int:
    """Return roughly how many numbers adapters on all linear layers have; of experts each has its own.

    Example:
        An MLP of width f in a hidden width h adds ``rank * ((h + 2 * f) + (f + h))`` in each layer.
    """
    attention = 2 * (size.hidden + size.query_width) + size.key_value_width
    each = 2 * size.hidden + 3 * size.ffn_width
    experts = size.experts / size.experts_met if size.experts_met else 1.0
    return int(rank * size.layers * (attention + each * experts))


def _describe_sampling(module: "ModelModule") -> Sampling | None:
    engine = module.engine
    if engine is None:
        return None
    needs = engine.describe_needs()
    if needs is None or not needs.on_gpu:
        return None
    return Sampling(
        needs=needs,
        sequences=getattr(engine, "max_num_seqs", 256),
        tokens=engine.max_model_len,
        sleeps=engine.sleep_level > 0,
    )


def _describe_servers(module: "ModelModule") -> EngineNeeds | None:
    needs = None if module.engine is None else module.engine.describe_needs()
    return needs if needs is not None and needs.servers else None
