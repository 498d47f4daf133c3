"""`Budget`: settles what training settings leave to the planner, and measures a step or two before it trusts it."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

import torch
from lightning.pytorch.utilities import rank_zero_info

from lightning_megatron_rl.devices.facts import GPU
from lightning_megatron_rl.devices.measure import measure_gpu
from lightning_megatron_rl.modules.planning import longest_sequence
from lightning_megatron_rl.modules.start import make_plan, plan_run
from lightning_megatron_rl.modules.training import TrainingSettings
from lightning_megatron_rl.planner.budget import (
    MARGIN,
    WITHOUT_GPU,
    can_be_tried,
    candidates,
    expected_peak,
    fastest,
    fits,
    leaves_room,
)
from lightning_megatron_rl.planner.hardware import GIB, HARDWARE, recognise
from lightning_megatron_rl.planner.moments import MemoryPlan
from lightning_megatron_rl.planner.run import Run

if TYPE_CHECKING:
    from lightning_megatron_rl.modules.model import ModelModule

_LIKE = HARDWARE["h100"]  # whose rates stand in for those of a GPU that the planner does not know


@dataclass(frozen=True)
class Trial:
    """A first step, or two, with half of the tokens that are wanted, whose peak says how many of them fit."""

    tried: MemoryPlan
    wanted: list[tuple[TrainingSettings, MemoryPlan]]  # what may follow, the most tokens first
    is_second: bool = False  # the optimizer's state is there from the beginning


class Budget:
    """Chooses the tokens of a micro-batch and recomputation for a module whose settings say "auto".

    No number depends on the choice beyond the order of sums; the same settings give the same choice on the same GPUs.

    Args:
        module: Its settings are replaced by those that are chosen.
    """

    def __init__(self, module: "ModelModule") -> None:
        self._module = module
        self._open: TrainingSettings | None = None  # as they were given
        self._trial: Trial | None = None
        self._why = ""

    def settle(self, *, training: bool) -> None:
        """Choose, on all ranks alike; nothing if nothing is left open. A collective on GPUs.

        Raises:
            ValueError: Not even the least fits, with the arithmetic.
        """
        module = self._module
        if module.train_settings.is_open:
            self._open = module.train_settings
        if self._open is None:
            return
        self._trial = None
        device = module.strategy.root_device
        if device.type != "cuda":
            module.train_settings = self._open.settle(WITHOUT_GPU, recompute="none")
            self._why = "nothing is planned on a CPU"
            return
        self._plan(self._open, measure_gpu(device.index), training=training)

    def _plan(self, given: TrainingSettings, gpu: GPU, *, training: bool) -> None:
        module = self._module
        kind = recognise(gpu.name)
        least = longest_sequence(module, module.trainer.datamodule, module.strategy.layout)  # type: ignore[attr-defined]
        run = plan_run(module, module.trainer.datamodule, kind or _LIKE)  # type: ignore[attr-defined]
        open_tokens, open_recompute = given.max_tokens_per_microbatch == "auto", given.recompute == "auto"
        if "model" in module._modules:  # built with or without
            open_recompute = False
        runs = list(candidates(run, tokens=open_tokens, recompute=open_recompute, least=least))

        def plan(found: Run) -> MemoryPlan:
            return make_plan(
                module,
                training=training,
                engine=module.engine,
                frozen_copies=module.frozen_copies,
                free=gpu.free_bytes,
                total=gpu.total_bytes,
                settings=given.settle(found.microbatch_tokens, recompute=found.recompute_setting),
            )

        plans = [plan(found) for found in runs]
        everywhere = _on_all_ranks([fits(found) for found in plans])
        fitting = [found for found, holds in zip(runs, everywhere, strict=True) if holds]
        if not fitting:
            _refuse(plans, run)
        chosen = fastest(fitting)
        wanted = given.settle(chosen.microbatch_tokens, recompute=chosen.recompute_setting)
        half = chosen.microbatch_tokens // 2
        self._why = f"{chosen.step_seconds:.3g} s a step expected, chosen of {len(fitting)} settings that fit"
        if kind is None:
            self._why += f", with the rates of an {_LIKE.name}"
        if not (training and open_tokens and can_be_tried(chosen.microbatch_tokens, least)):
            module.train_settings = wanted
            return
        module.train_settings = given.settle(half, recompute=chosen.recompute_setting)
        more = [
            (given.settle(found.microbatch_tokens, recompute=found.recompute_setting), needed)
            for found, needed in zip(runs, plans, strict=True)
            if found.recompute == chosen.recompute and half < found.microbatch_tokens <= chosen.microbatch_tokens
        ]
        self._trial = Trial(plan(replace(chosen, microbatch_tokens=half)), more[::-1])
        self._why += f"; the first step takes {half} and is measured"

    def end_step(self) -> None:
        """After the first step: take the wanted tokens if what was measured leaves room; a collective then.

        If it does not, the second step has half of them, too: the first had no state of the optimizer beside its
        activations, so that the plan counts for what they take together. Then the most tokens that fit are taken.
        """
        if self._trial is None:
            return
        trial, self._trial = self._trial, None
        device = self._module.strategy.root_device
        room = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        if not self._take(trial, torch.cuda.max_memory_allocated(device), room):
            self._trial = replace(trial, is_second=True)

    def _take(self, trial: Trial, measured: int, room: int) -> bool:
        """Take the most tokens that fit on all ranks, of which this one has measured so many bytes and has room.

        False: not the wanted ones do, and a second step may show that they do.
        """
        whole = trial.is_second
        fitting = [leaves_room(measured, trial.tried, plan, room, whole=whole) for _, plan in trial.wanted]
        holds = _on_all_ranks(fitting)
        if not holds[0] and not whole:
            return False
        before, most = self._module.train_settings.token_budget, trial.wanted[0][0].token_budget
        taken = [settings for (settings, _), has_room in zip(trial.wanted, holds, strict=True) if has_room]
        if taken:
            self._module.train_settings = taken[0]
        now = self._module.train_settings.token_budget
        expected = expected_peak(measured, trial.tried, trial.wanted[0][1], whole=whole)
        rank_zero_info(
            f"train.max_tokens_per_microbatch=auto: {now} from now on{'' if now == most else f', not {most}'}; the"
            f" first {'two steps' if whole else 'step'} took {measured / GIB:.1f} GiB with micro-batches of {before}"
            f" tokens, {most} are expected to take {expected / GIB:.1f} of {room / GIB:.1f} GiB."
        )
        return True

    def describe(self) -> list[tuple[str, str]]:
        """Return a row for the table at start: what was chosen; none if nothing was left open."""
        if self._open is None:
            return []
        settings = self._module.train_settings if self._trial is None else self._trial.wanted[0][0]
        words: dict[str | int, str] = {"none": "not recomputed", "full": "recomputed"}
        again = words.get(settings.recompute, f"{settings.recompute} layers of each stage recomputed")
        return [("auto", f"{settings.token_budget} tokens per micro-batch, {again}: {self._why}")]


def _on_all_ranks(answers: list[bool]) -> list[bool]:
    """Return which of these hold on every rank."""
    every: list[list[bool]] = [[] for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(every, answers)
    return [all(column) for column in zip(*every, strict=True)]


def _refuse(plans: list[MemoryPlan], run: Run) -> NoReturn:
    """Name the arithmetic of what needs least, and the smallest change of something else that fits."""
    least = min(plans, key=lambda plan: plan.needed)
    change = run.smallest_change()
    raise ValueError(
        f"train.max_tokens_per_microbatch and recompute: none of {len(plans)} settings that auto chooses from leaves"
        f" {1 - MARGIN:.0%} of the free memory. The least:\n{least.describe()}\n"
        + (f"The smallest change that fits: {change}" if change else "No change known here makes it fit")
    )
