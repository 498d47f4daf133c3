"""`verify_layouts`: every layout on warm local processes, each compared with the single process."""

import pickle
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from lightning_megatron_rl.modules.grpo import GRPOModule
from lightning_megatron_rl.modules.pairs import PairModule
from lightning_megatron_rl.modules.policy import PolicyModule
from lightning_megatron_rl.parallel.layout import ParallelLayout
from lightning_megatron_rl.verify.batch import FrozenBatch, make_batch
from lightning_megatron_rl.verify.compare import blurred_parameters, largest_noise, make_row, reference_row
from lightning_megatron_rl.verify.job import Build, LayoutRefusedError, Measurement, run_layout
from lightning_megatron_rl.verify.layouts import Layout, default_layouts, parse_layout
from lightning_megatron_rl.verify.pool import WorkerError, WorkerPool
from lightning_megatron_rl.verify.report import Report, Row, describe_environment

_PARTS = 4  # micro-batches that the batch is cut into, about
_SINGLE = parse_layout("single")
_PERTURBED_RUNS = 3  # see `largest_noise`
_BALANCE_NOTE = (
    "note: the load-balancing loss is on (train.moe.aux_loss_coeff={:g}); it is defined by the micro-batch"
    " (docs/moe.md), so every layout with other micro-batches than the single process departs. Verify with"
    " --model.train.moe.aux_loss_coeff 0."
)
_LAYOUT_ARGUMENTS = set(ParallelLayout.__dataclass_fields__)


def verify_layouts(
    build: Build,
    layouts: Sequence[str] | None = None,
    *,
    processes: int = 4,
    device: Literal["cpu", "cuda"] = "cpu",
    steps: int = 2,
    tolerance: float = 1e-5,
    batch: FrozenBatch | str | Path | None = None,
    timeout_s: float = 600.0,
    pool: WorkerPool | None = None,
    on_start: Callable[[Report], None] = lambda report: None,
    on_row: Callable[[Row], None] = lambda row: None,
) -> Report:
    """Train on one frozen batch under every layout and compare with a single process in fp32.

    The single process runs again, each time with weights that are moved by other rounding errors: how far its gradients
    move then is the noise that those of a layout are held to, parameter by parameter.
    The single process takes the batch in micro-batches of the module's own budget, every other layout in about four,
    or in those that ``@N`` after its name asks for.
    Learning rate and Adam's epsilon are set to 1e-3, schedulers are off: two steps must move the weights visibly.

    Args:
        build: Makes module and strategy from a layout's arguments; importable by name in the worker processes.
        layouts: Names such as "tp2_pp2_sp" or "tp2_pp2_sp@4096"; by default all that fit the processes.
        processes: Most processes of a layout.
        device: Where they compute; "cuda" takes one GPU per process.
        steps: Optimizer steps (rollouts for a module that samples), all on the same batch.
        tolerance: Largest relative difference.
        batch: What to train on: a `FrozenBatch`, a file that `RolloutSamples` wrote, or None for a synthetic batch.
        timeout_s: Deadline of one layout.
        pool: Worker processes to use and leave running; by default new ones, ended afterwards.
        on_start: Called with the report before its first row.
        on_row: Called with each row when it is there.

    Raises:
        ValueError: Arguments that cannot be: an unknown layout, more processes than there are, a malformed batch.
        RuntimeError: The single process itself fails.
    """
    _check_numbers(processes, device, steps, tolerance, processes if pool is None else pool.node_size)
    asked = [parse_layout(name) for name in layouts or []]
    for layout in asked:
        if layout.world_size > processes:
            raise ValueError(
                f"layout {layout.name}: {layout.world_size} processes > processes={processes}: raise processes or leave"
                " it out."
            )
    _check_importable(build)
    module = build(_SINGLE.strategy).module
    if not isinstance(module, PolicyModule):
        raise ValueError(
            f"{type(module).__name__} is no PolicyModule: only modules that train through it can be verified."
        )
    if isinstance(module, PairModule):
        raise ValueError(
            f"{type(module).__name__} trains on preference pairs, and the frozen batch is one of sequences: verify"
            " model, layout and settings with an SFTModule, whose forward and backward passes are the same."
        )
    frozen = batch if isinstance(batch, FrozenBatch) else make_batch(module, batch, processes=processes)
    report = Report(
        subject=f"{type(module).__name__}({module.model_path})",
        batch=frozen.description,
        device=device,
        steps=steps,
        tolerance=tolerance,
        rows=[],
        requested=[layout.name for layout in asked],
        environment=describe_environment(device),
    )
    on_start(report)

    def add(row: Row) -> None:
        report.rows.append(row)
        on_row(row)

    with (
        tempfile.TemporaryDirectory(prefix="verify-layout-") as directory,
        closing(WorkerPool(processes)) if pool is None else nullcontext(pool) as workers,
    ):
        run = partial(
            workers.run,
            run_layout,
            build,
            frozen,
            init_process_group=False,
            timeout=timeout_s,
            steps=steps,
            device=device,
            timeout_s=timeout_s,
            directory=Path(directory),
        )
        reference = _run_reference(run)
        add(reference_row(_SINGLE, reference))
        noise = largest_noise(reference, [_run_reference(run, seed) for seed in range(_PERTURBED_RUNS)])
        report.blurred = blurred_parameters(reference, noise)
        if reference.balance_coeff:
            report.note = _BALANCE_NOTE.format(reference.balance_coeff)
        names = [layout.name for layout in asked] or default_layouts(processes, has_experts=reference.num_experts > 1)
        split = _split_budget(frozen, module.train_settings.token_budget, processes)
        for layout in (parse_layout(name) for name in names if name != _SINGLE.name):
            budget = layout.max_tokens_per_microbatch or split
            add(
                _run_one(
                    run,
                    layout,
                    module,
                    frozen,
                    budget,
                    partial(make_row, reference=reference, tolerance=tolerance, noise=noise),
                )
            )
    return report


def _run_reference(run: Callable[..., list[Measurement]], perturbation: int | None = None) -> Measurement:
    """Run the single process, to be compared with, or to see what rounding errors in its weights make of it.

    The latter have the same micro-batches: in others, a loss that depends on them would pass for noise.
    """
    try:
        (reference,) = run(
            _SINGLE,
            max_tokens_per_microbatch=None,
            is_reference=perturbation is None,
            perturbation=perturbation,
            world_size=1,
        )
    except WorkerError as error:
        if (raised := error.raised.get(0)) and raised[0] == LayoutRefusedError.__name__:
            raise ValueError(f"a single process cannot train: {raised[1]}") from error
        raise RuntimeError(f"the single process, to which layouts are compared, failed:\n{error}") from error
    for step, norm in enumerate(reference.grad_norms, 1):
        if not norm > 0:
            raise ValueError(
                f"the single process's gradient norm in step {step} is {norm:g}: a batch that teaches nothing proves"
                " nothing. Take another recorded step, or a synthetic batch."
            )
    return reference


def _run_one(
    run: Callable[..., list[Measurement]],
    layout: Layout,
    module: PolicyModule,
    batch: FrozenBatch,
    budget: int,
    compare: Callable[[Layout, list[Measurement]], Row],
) -> Row:
    if reason := _indivisible(layout, module, batch):
        return Row(layout.name, layout.world_size, "refused", reason)
    try:
        ranks = run(layout, max_tokens_per_microbatch=budget, is_reference=False, world_size=layout.world_size)
    except WorkerError as error:
        for kind, message in error.raised.values():
            if kind == LayoutRefusedError.__name__:
                return Row(layout.name, layout.world_size, "refused", message)
        raised = [f"rank {rank}: {kind}: {message}" for rank, (kind, message) in error.raised.items()]
        reason = raised[0] if raised else "a rank died or ran past its deadline"
        return Row(layout.name, layout.world_size, "failed", reason, log=str(error))
    return compare(layout, ranks)


def _indivisible(layout: Layout, module: PolicyModule, batch: FrozenBatch) -> str:
    """Why the batch cannot be divided among the layout's replicas; the ranks themselves would hang."""
    sizes = {name: value for name, value in layout.strategy.items() if name in _LAYOUT_ARGUMENTS}
    replicas = ParallelLayout(**sizes).data_parallel_size(layout.world_size)
    if not isinstance(module, GRPOModule):
        count = len(batch.sequences)
        return f"{count} sequences in the batch for {replicas} model replicas" if count < replicas else ""
    count, updates = len(batch.prompts), module.updates_per_rollout
    if count % (replicas * updates):
        return (
            f"{count} prompts in the batch / ({replicas} model replicas x {updates} updates per rollout) ="
            f" {count / replicas / updates:g} is not whole"
        )
    return ""


def _split_budget(batch: FrozenBatch, own: int, processes: int) -> int:
    """Tokens of a micro-batch such that the batch makes about four, and the longest sequence fits in any layout."""
    # rows are padded to a multiple of tensor x 2 x context parallel size
    return min(own, max(batch.num_tokens // _PARTS, batch.longest + 2 * processes))


def _check_numbers(processes: int, device: str, steps: int, tolerance: float, node_size: int) -> None:
    if processes < 1 or steps < 1:
        raise ValueError(f"processes={processes} and steps={steps} must be at least 1.")
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance={tolerance:g} must be between 0 and 1: it is a relative difference, such as 1e-5.")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r} must be 'cpu' or 'cuda'.")
    if device == "cuda" and torch.cuda.device_count() < min(processes, node_size):
        raise ValueError(
            f"device=cuda with processes={processes}: torch {torch.__version__} finds {torch.cuda.device_count()} CUDA"
            " devices, and each process needs one. Check nvidia-smi and CUDA_VISIBLE_DEVICES, lower processes, or use"
            " device=cpu."
        )


def _check_importable(build: Build) -> None:
    error: Exception | None = None
    try:
        message = pickle.dumps(build)
    except (pickle.PicklingError, AttributeError, TypeError) as caught:
        error, reason = caught, str(caught)
    else:
        if b"__main__" not in message:
            return
        reason = "it is of the script that is running, which they do not import"
    raise ValueError(
        f"{build!r} cannot be sent to the worker processes ({reason}): give a function at the top of an importable"
        " module, or functools.partial of one."
    ) from error
