"""Names of layouts, as `--layouts` takes them, and those that fit a number of processes."""

import math
import re
from dataclasses import dataclass
from itertools import product
from typing import Any

from lightning_megatron_rl.parallel.layout import ParallelLayout

SPLIT = "microbatches"  # a single process whose batch is cut into several micro-batches
_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
_PART = re.compile(r"(?P<size>tp|pp|vpp|cp|ep|etp|dp)(?P<value>[1-9]\d*)|sp|plain")
_HELP = (
    f"parts of a name are joined by _: tp2, pp2, vpp2, cp2, dp2, ep2, etp1, sp (sequence parallel), plain (no"
    f" distributed optimizer); or {SPLIT} (one process, several micro-batches). A token budget of micro-batches may"
    f" follow, as in tp2@4096. Example: tp2_pp2_sp"
)


@dataclass(frozen=True)
class Layout:
    """One way to spread a run over processes.

    Example:
        ``parse_layout("tp2_dp2_sp").world_size == 4``
    """

    name: str
    world_size: int  # processes
    strategy: dict[str, Any]  # arguments of `MegatronStrategy`
    max_tokens_per_microbatch: int | None = None  # None for a budget that makes about four micro-batches


def parse_layout(name: str) -> Layout:
    """Return the layout called `name`.

    The data-parallel size is what is asked for, or the smallest that expert parallelism can be spread over. A name
    followed by ``@N`` is that layout with micro-batches of at most N tokens.

    Raises:
        ValueError: An unknown name, a part given twice, sizes that contradict each other, an invalid budget.

    Example:
        ``parse_layout("pp2_vpp2").strategy["virtual_pipeline_model_parallel_size"] == 2``
    """
    sizes: dict[str, int] = {}
    flags: set[str] = set()
    base, at, budget = name.partition("@")
    if at and not re.fullmatch(r"[1-9]\d*", budget):
        raise ValueError(f"layout {name!r}: {budget!r} is no number of tokens; {_HELP}.")
    for part in [] if base in (SPLIT, "single") else base.split("_"):
        match = _PART.fullmatch(part)
        if match is None:
            raise ValueError(f"unknown layout {name!r}: {part!r} is no part of a layout; {_HELP}.")
        key = match["size"] or part
        if key in sizes or key in flags:
            raise ValueError(f"layout {name!r}: {key} is there twice.")
        if match["size"]:
            sizes[key] = int(match["value"])
        else:
            flags.add(part)
    strategy: dict[str, Any] = {
        argument: sizes.get(part, None if part in ("vpp", "etp") else 1) for part, argument in _SIZES.items()
    }
    strategy["sequence_parallel"] = "sp" in flags
    try:
        layout = ParallelLayout(**strategy)
    except ValueError as error:
        raise ValueError(f"layout {name!r}: {error}") from error
    experts = (layout.expert_tensor_parallel_size or layout.tensor_model_parallel_size) * (
        layout.expert_model_parallel_size * layout.pipeline_model_parallel_size
    )
    world_size = layout.model_parallel_size * sizes.get("dp", 1)
    if "dp" not in sizes:
        world_size = math.lcm(world_size, experts)
    try:
        layout.data_parallel_size(world_size)
    except ValueError as error:
        raise ValueError(f"layout {name!r}: {error}") from error
    if "plain" in flags:
        strategy["use_distributed_optimizer"] = False
    return Layout(name, world_size, strategy, int(budget) if at else None)


def default_layouts(processes: int, *, has_experts: bool) -> list[str]:
    """Return the names of all layouts worth a look whose processes divide `processes`.

    All products of tensor, pipeline, context and data parallelism; where tensor parallelism meets another kind,
    sequence parallelism is on. Each kind alone comes with its variants.

    Args:
        processes: Most processes of a layout.
        has_experts: Whether the model is a mixture of experts.

    Example:
        ``default_layouts(2, has_experts=False)`` is ``["microbatches", "tp2", "tp2_sp", "pp2", "pp2_vpp2", "cp2",
        "dp2", "dp2_plain"]``.
    """
    names = [SPLIT]
    for world in (size for size in range(2, processes + 1) if processes % size == 0):
        splits = [sizes for sizes in product(range(1, world + 1), repeat=4) if math.prod(sizes) == world]
        # one kind alone first, then ever more kinds together; tensor before pipeline before context before data
        for tp, pp, cp, dp in sorted(splits, key=lambda sizes: (sum(size > 1 for size in sizes), [-s for s in sizes])):
            parts = [f"{kind}{size}" for kind, size in zip(("tp", "pp", "cp", "dp"), (tp, pp, cp, dp), strict=True)]
            used = "_".join(part for part in parts if not part.endswith("p1"))
            variants = {
                f"tp{world}": ["", "_sp"],
                f"pp{world}": ["", "_vpp2"],
                f"dp{world}": ["", "_plain"],
            }.get(used, ["_sp" if tp > 1 else ""])
            names += [used + variant for variant in variants]
        if has_experts:
            names.append(f"ep{world}")
            if world % 4 == 0:
                names += [f"tp2_ep{world // 2}_sp", f"pp2_ep{world // 2}", f"cp2_ep{world // 2}"]
            names.append(f"tp2_ep{world}_etp1_sp")
    return names
