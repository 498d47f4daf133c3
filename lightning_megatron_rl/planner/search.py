"""The fastest layouts that fit given GPUs, out of all that divide a model."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import Any, NoReturn

from lightning_megatron_rl.parallel.layout import ParallelLayout
from lightning_megatron_rl.planner.divisibility import PipelineSplit
from lightning_megatron_rl.planner.hardware import GIB
from lightning_megatron_rl.planner.run import Run, Sampling

_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 14, 16)
MARGIN = 0.97  # of the free memory that a proposal takes at most: allocators round up
_FACTORS = (2, 4, 8, 16, 32, 64)  # times as many GPUs, that a refusal tries
_LONG = 16_384  # tokens of a sequence from which context parallelism is tried


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, with its run."""

    run: Run
    seconds: float

    def overlay(self, per_node: int, model_config: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        """Return the settings as a config's overlay.

        Args:
            per_node: GPUs of a node.
            model_config: That of the config, which an overlay's replaces as a whole.
        """
        run, layout = self.run, self.run.layout
        strategy: dict[str, Any] = {
            "tensor_model_parallel_size": layout.tensor_model_parallel_size,
            "pipeline_model_parallel_size": layout.pipeline_model_parallel_size,
            "virtual_pipeline_model_parallel_size": layout.virtual_pipeline_model_parallel_size,
            "context_parallel_size": layout.context_parallel_size,
            "expert_model_parallel_size": layout.expert_model_parallel_size,
            "expert_tensor_parallel_size": layout.expert_tensor_parallel_size,
            "sequence_parallel": layout.sequence_parallel,
        }
        train = {"max_tokens_per_microbatch": run.microbatch_tokens, "recompute": run.recompute_setting}
        model: dict[str, Any] = {"train": train}
        split = {name: value for name, value in vars(run.pipeline_split).items() if value}
        kept = {key: value for key, value in model_config.items() if not hasattr(run.pipeline_split, key)}
        if run.recompute or kept.get("recompute_granularity") == "full":  # `recompute` says it all
            kept = {key: value for key, value in kept.items() if not key.startswith("recompute_")}
        if split or kept != model_config:
            model["train"]["model_config"] = kept | split
        if run.sampling is not None:
            strategy["offload_while_sampling"] = list(run.offloads) or None
            needs = run.sampling.needs
            model["engine"] = {
                "class_path": "VLLMEngine" if needs.own_process else "ColocatedVLLMEngine",
                "init_args": {
                    "tensor_parallel_size": needs.tensor_parallel_size,
                    "sleep_level": 2 if run.sampling.sleeps else 0,
                },
            }
        devices = min(run.world, per_node)
        return {
            "trainer": {
                "devices": devices,
                "num_nodes": run.world // devices,
                "strategy": {"class_path": "MegatronStrategy", "init_args": strategy},
            },
            "model": {"init_args": model},
        }


def search(run: Run, *, count: int = 3) -> list[Candidate]:
    """Return the fastest layouts of a run's GPUs that fit, each with another way to divide the model.

    Everything else of the run stays: model, work, precision, optimizer, cache.

    Example:
        ``search(run)[0].run.layout`` is the fastest.

    Raises:
        ValueError: None fits, with the smallest need.
    """
    best, nearest = _fitting(run)
    if not best:
        _refuse(run, nearest)
    return sorted(best.values(), key=lambda found: found.seconds)[:count]


def _fitting(run: Run) -> tuple[dict[ParallelLayout, Candidate], tuple[float, Run] | None]:
    """The fastest run of each layout that fits, and, of those that do not, the one that needs least with its bytes."""
    best: dict[ParallelLayout, Candidate] = {}
    nearest: tuple[float, Run] | None = None
    for candidate in _runs(run):
        try:
            candidate.check()
        except ValueError:
            continue
        plan = candidate.memory()
        if plan.needed > MARGIN * plan.free:
            if nearest is None or plan.needed < nearest[0]:
                nearest = plan.needed, candidate
            continue
        seconds = candidate.step_seconds
        known = best.get(candidate.layout)
        if known is None or seconds < known.seconds:
            best[candidate.layout] = Candidate(candidate, seconds)
    return best, nearest


def _refuse(run: Run, nearest: tuple[float, Run] | None) -> NoReturn:
    """Say what comes nearest, and how many times as many GPUs would do."""
    if nearest is None:
        reason = _sampler_refusal(run)
        if reason is not None:
            raise ValueError(
                f"{run.model} divides over {run.world} x {run.kind.name}, but no sampler has room on the"
                f" {min(run.kind.per_node, run.world)} GPU(s) of a node: {reason}"
            )
        raise ValueError(
            f"no layout divides {run.model}, its batch and {run.world} GPUs: change the number of GPUs, or batch_size"
        )
    needed, closest = nearest
    text = (
        f"{run.model} does not fit {run.world} x {run.kind.name} in any layout: {closest.layout.describe(run.world)}"
        f" needs least, {needed / GIB:.1f} of {run.kind.free / GIB:.1f} GiB."
    )
    for factor in _FACTORS:
        fitting = _fitting(replace(run, world=run.world * factor))[0]
        if fitting:
            layout = min(fitting.values(), key=lambda found: found.seconds).run.layout
            text += f" Smallest change that fits: {run.world * factor} GPUs, {layout.describe(run.world * factor)}"
            break
    raise ValueError(text)


def _sampler_refusal(run: Run) -> str | None:
    """Why layouts that divide everything are refused for their samplers: of those on the most GPUs; None if none is."""
    most, reason = 0, None
    for candidate in _runs(run):
        if candidate.sampling is None or candidate.sampling.needs.tensor_parallel_size <= most:
            continue
        try:
            replace(candidate, sampling=None).check()
        except ValueError:
            continue
        try:
            candidate.check()
        except ValueError as error:
            most, reason = candidate.sampling.needs.tensor_parallel_size, str(error)
    return reason


def _runs(run: Run) -> Iterator[Run]:
    for layout in _layouts(run):
        longest = run.work.tokens
        budgets = sorted({run.microbatch_tokens, *(b for b in (4096, 8192, 16_384, 32_768) if b >= longest)})
        samplings = _samplings(run)
        for tokens, recompute, (sampling, offloads) in product(budgets, (0.0, 1.0), samplings):
            yield replace(
                run,
                layout=layout,
                pipeline_split=_stages(run, layout),
                microbatch_tokens=tokens,
                recompute=recompute,
                sampling=sampling,
                offloads=offloads,
            )


def _layouts(run: Run) -> Iterator[ParallelLayout]:
    experts = run.divided.experts
    contexts = (1, 2, 4, 8) if run.work.tokens >= _LONG else (1,)
    expert_sizes = (1, 2, 4, 8, 16, 32) if experts is not None else (1,)
    for tp, pp, cp, ep in product((1, 2, 3, 4, 8), _SIZES, contexts, expert_sizes):
        if tp > run.kind.per_node or tp * pp * cp > run.world or run.world % (tp * pp * cp):
            continue
        if experts is not None and run.world % (pp * ep):
            continue
        yield ParallelLayout(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            context_parallel_size=cp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=1 if experts is not None and tp > 1 else None,
            sequence_parallel=tp > 1,
        )


def _stages(run: Run, layout: ParallelLayout) -> PipelineSplit:
    """Fewer layers for the last stage, which has the output layer, where they do not divide."""
    layers, stages = run.size.layers, layout.pipeline_model_parallel_size
    last = layers - (stages - 1) * -(-layers // stages)
    return PipelineSplit(num_layers_in_last_pipeline_stage=last) if layers % stages and last > 0 else PipelineSplit()


def _samplings(run: Run) -> list[tuple[Sampling | None, tuple[str, ...]]]:
    if run.sampling is None:
        return [(None, ())]
    sampling = run.sampling
    if sampling.needs.devices is not None:  # the user has placed it
        return [(sampling, run.offloads)]
    found: list[tuple[Sampling | None, tuple[str, ...]]] = []
    for tensor in (1, 2, 4, 8):
        if tensor > min(run.kind.per_node, run.world) or run.divided.num_attention_heads % tensor:
            continue
        needs = replace(sampling.needs, tensor_parallel_size=tensor)
        found.append((replace(sampling, needs=needs, sleeps=False), ()))
        for offloads in ((), ("optimizer",), ("optimizer", "gradients", "parameters")):
            found.append((replace(sampling, needs=needs, sleeps=True), offloads))
    return found
