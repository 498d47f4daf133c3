"""Weights of a split model that are read where they lie: all ranks agree, and say where theirs are."""

import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron_rl.weights import sharded_views
from lightning_megatron_rl.weights.lending import Lending
from lightning_megatron_rl.weights.lent import LentWeights, Readiness
from lightning_megatron_rl.weights.placement import Placement
from lightning_megatron_rl.weights.source import WeightSource
from tests.selection import by_default
from tests.weights.test_sharded_views import PUSHES, differences, disturb, exported, in_buckets, run_case, train

DEFAULT = ("qwen3 tp2_pp2_sp", "qwen2_tied pp2", "qwen3_moe tp2_sp_ep2_etp1")
PLANNED = {case: broadcasts for case, broadcasts in PUSHES.items() if broadcasts is not None}
READERS = 2


def share(block: Tensor, device: int) -> tuple[Any, ...]:
    """What another process maps the memory with, which moves into the host's shared memory the first time."""
    return tuple(block.untyped_storage()._share_filename_cpu_())


def lendable(share: Any = share) -> Any:
    """A CPU's memory in place of a GPU's: torch maps either into another process."""
    lending = partial(Lending, identify=lambda device: "host", share=share)
    return mock.patch.object(sharded_views, "Lending", lending)


def open_memory(handle: tuple[Any, ...]) -> Tensor:
    storage = torch.UntypedStorage._new_shared_filename_cpu(*handle)
    return torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload,no-any-return]


def read(lent: LentWeights, blocks: list[Tensor]) -> list[tuple[str, Tensor]]:
    """Every weight, piece by piece."""
    found = []
    for name, weight in lent.weights.items():
        tensor = torch.full(weight.shape, torch.nan, dtype=weight.dtype)
        matrix = tensor.view(weight.shape[0], -1) if weight.shape else tensor.view(1, 1)
        for piece in weight.pieces:
            shape, strides = (piece.blocks, piece.size, piece.width), (piece.step, piece.stride, 1)
            part = Placement("", piece.memory, weight.dtype, shape, strides, piece.offset).view(blocks)
            rows = matrix[piece.row : piece.row + piece.blocks * piece.size]
            rows[:, piece.column : piece.column + piece.width] = part.reshape(-1, piece.width)
        found.append((name, tensor))
    return found


class Reader:
    """Takes weights as an engine does whose processes know, or do not, what goes where."""

    def __init__(self, loads: bool = True) -> None:
        self.readiness = Readiness.CANNOT
        self.loads = loads
        self.lent: LentWeights | None = None
        self.blocks: list[Tensor] = []
        self.way = ""

    def update_weights(self, weights: WeightSource, version: int) -> list[tuple[str, Tensor]]:
        """Return what was read."""
        lent = weights.lender.lend(self.readiness, READERS)
        if lent is not None:
            self.way = "known" if lent is self.lent else "lent"
            if lent is not self.lent:
                self.blocks = [open_memory(memory.handles[READERS - 1]) for memory in lent.memories]
            found = read(lent, self.blocks)
            self.lent, self.readiness = lent, Readiness.KNOWS_PLACES
            if weights.lender.settle(self.loads):
                return found
        self.way = f"{self.way} buckets".strip()
        found = list(in_buckets(weights))
        self.readiness = Readiness.NEEDS_PLACES
        return found


def push(policy: Any, reader: Reader) -> tuple[str, list[str]]:
    """How weights were taken by this rank's reader, and what is not what an export has; nothing of other ranks."""
    expected = exported(policy)
    weights = policy.weights_to_push()
    if not policy.strategy.replica.is_leader:
        weights.run_collectives()
        return "", []
    reader.way = ""
    found = reader.update_weights(weights, 1)
    return reader.way, differences(found, expected)


def push_four_times(model: Path, strategy: dict[str, Any], world_size: int) -> list[tuple[str, list[str]]]:
    """In buckets, lent, lent again since it has moved into shared memory, and where it was, with other weights."""
    policy = train(model, strategy, world_size)
    reader = Reader()
    with lendable():
        found = [push(policy, reader), push(policy, reader)]
    for _ in range(2):
        disturb(policy)
        found.append(push(policy, reader))
    return found


@pytest.mark.parametrize("case", by_default(DEFAULT, PLANNED))
def test_lent_weights_are_the_exported_ones(worker_pool, checkpoint, case):
    leaders = 0
    for rounds in run_case(worker_pool, checkpoint, case, push_four_times):
        assert not any(different for _, different in rounds)
        ways = [way for way, _ in rounds]
        assert ways in (["buckets", "lent", "lent", "known"], [""] * 4)
        leaders += bool(ways[0])
    assert leaders >= 1


def read_in_process(
    model: Path, strategy: dict[str, Any], world_size: int
) -> list[tuple[list[str], list[bool], list[str]]]:
    """Every rank reads for a sampler in its own process: what differs, which memory is its own, and what is read there.

    That is the tensors of which nothing comes from another rank.
    """
    policy = train(model, strategy, world_size)
    found = []
    for number in range(3):
        expected = exported(policy)
        with lendable() if number == 0 else nullcontext():
            weights = policy.weights_to_push()
        assert weights.lender is not None
        lent = weights.lender.lend(Readiness.NEEDS_PLACES, 1, in_process=True)
        assert lent is not None
        own = [memory.block is not None for memory in lent.memories]
        assert [len(memory.handles) for memory in lent.memories] == [1 - is_own for is_own in own]
        blocks = [open_memory(one.handles[0]) if one.block is None else one.block for one in lent.memories]
        here = [name for name, one in lent.weights.items() if all(own[piece.memory] for piece in one.pieces)]
        found.append((differences(read(lent, blocks), expected), own, here))
        assert weights.lender.settle(True)
        disturb(policy)
    return found


@pytest.mark.parametrize("case", ["qwen3 tp2_pp2_sp", "qwen3_moe tp2_sp_ep2_etp1"])
def test_samplers_in_the_trainers_processes_read_their_own_memory_as_it_is(worker_pool, checkpoint, case):
    norms = 0
    for rounds in run_case(worker_pool, checkpoint, case, read_in_process):
        assert not any(different for different, *_ in rounds)
        for _, own, here in rounds:
            assert any(own)
            assert not all(own)
            norms += sum("norm" in name for name in here)
    # in each round: 4 norms of each of 4 layers, and the last one, on both ranks that have them; none from another rank
    assert norms == 3 * 2 * (4 * 4 + 1)


def push_apart(model: Path, strategy: dict[str, Any]) -> list[Any]:
    """Samplers in the ranks' processes that read their own memory alone, so that no rank waits for another."""
    policy = train(model, strategy, 2)
    is_late = policy.strategy.global_rank == 1
    readiness = [Readiness.NEEDS_PLACES]
    found: list[Any] = []

    def push(*, late: bool = False) -> None:
        expected = exported(policy)
        with lendable():
            weights = policy.weights_to_push()
        assert weights.lender is not None
        if late and is_late:
            dist.barrier()  # the other rank has its weights
        lent = weights.lender.lend(readiness[0], 1, in_process=True)
        if late and not is_late:
            dist.barrier()
        has = lent is not None and weights.lender.settle(True, apart=True)
        readiness[0] = Readiness.KNOWS_PLACES if has else Readiness.NEEDS_PLACES
        found.append("buckets" if lent is None else "lent" if has else "too early")
        if lent is not None and has:
            blocks = [open_memory(one.handles[0]) if one.block is None else one.block for one in lent.memories]
            assert not differences(read(lent, blocks), expected)
        else:
            assert not differences(list(in_buckets(weights)), expected)
        dist.barrier()  # what is compared is also the other's
        disturb(policy)

    push()
    push()  # memory has moved, to where processes share it
    push()
    for _ in range(2):
        push(late=True)
    for forget in (False, True):
        if is_late and forget:
            policy.planned_views.let_go()
        elif is_late:
            parameter = next(policy.model.parameters())
            parameter.data = parameter.data.clone()
        push()
        for _ in range(3):
            push()
        push(late=True)
    return found


def test_ranks_that_read_their_own_memory_do_not_wait_for_each_other(worker_pool, qwen3_dir):
    strategy = {"tensor_model_parallel_size": 2}
    first, second = worker_pool.run(push_apart, qwen3_dir, strategy, world_size=2, init_process_group=False)
    again = ["lent"] * 4
    assert first == ["lent"] * 5 + ["too early", *again] * 2
    assert second == ["lent"] * 5 + ["buckets", *again] * 2


def push_with_trouble(model: Path, strategy: dict[str, Any]) -> list[Any]:
    """A reader that cannot; parameters that move; a reader that is gone in the middle; then all is well again."""
    from lightning_megatron_rl.modules import sampling

    policy = train(model, strategy, 2)
    reader = Reader(loads=False)
    with lendable():
        found: list[Any] = [push(policy, reader), push(policy, reader)]
    reader.loads = True
    found += [push(policy, reader), push(policy, reader)]
    if not policy.strategy.replica.is_leader:  # only this rank knows
        parameter = next(policy.model.parameters())
        parameter.data = parameter.data.clone()
    disturb(policy)
    found.append(push(policy, reader))

    def update(weights: WeightSource, version: int) -> Any:
        assert weights.lender.lend(Readiness.KNOWS_PLACES, READERS) is not None
        raise sampling.WeightsLostError("gone")

    def gone(weights: WeightSource, version: int) -> Any:
        raise sampling.WeightsLostError("gone before it asked for anything")

    for fail in (update, gone):
        engine = SimpleNamespace(is_collective=False, update_weights=fail)
        found.append(sampling.Sampler(policy, engine)._push(policy.weights_to_push(), 1))
    reader.readiness = Readiness.CANNOT
    found += [push(policy, reader), push(policy, reader)]
    policy.planned_views.let_go()  # the end of a fit
    disturb(policy)
    found.append(push(policy, reader))
    return found


def test_whatever_happens_nobody_waits_and_weights_are_right(worker_pool, qwen3_dir):
    strategy = {"tensor_model_parallel_size": 2}
    leader, other = worker_pool.run(push_with_trouble, qwen3_dir, strategy, world_size=2, init_process_group=False)
    good: list[str] = []
    assert leader == [
        ("buckets", good),
        ("lent buckets", good),
        ("lent", good),
        ("known", good),
        ("lent", good),  # the memory of one rank is another's now
        None,
        None,
        ("buckets", good),
        ("lent", good),
        ("lent", good),
    ]
    assert other == [("", good)] * 5 + [None] * 2 + [("", good)] * 3


def push_beside_another(model: Path, strategy: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Two replicas, each with a reader of its own, share experts; what one of them cannot, neither does."""
    policy = train(model, strategy, 2)
    reader = Reader()
    with lendable():
        found = [push(policy, reader)]
    if policy.strategy.global_rank == 1:
        reader.readiness = Readiness.CANNOT
    found.append(push(policy, reader))
    reader.loads = policy.strategy.global_rank == 0
    found.append(push(policy, reader))
    reader.loads = True
    found.append(push(policy, reader))
    disturb(policy)
    if policy.strategy.global_rank == 1:
        reader.readiness = Readiness.NEEDS_PLACES  # another process: rank 0's reader is told anew as well
    found.append(push(policy, reader))
    return found


def test_replicas_that_share_experts_go_one_way(worker_pool, qwen3_moe_dir):
    strategy = {"expert_model_parallel_size": 2}
    results = worker_pool.run(push_beside_another, qwen3_moe_dir, strategy, world_size=2, init_process_group=False)
    good: list[str] = []
    ways = ["buckets", "buckets", "lent buckets", "lent", "lent"]
    assert results == [[(way, good) for way in ways]] * 2


def lend_what_cannot_be_shared(model: Path, strategy: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """The memory of rank 1 cannot be exported."""
    policy = train(model, strategy, 2)
    rank = policy.strategy.global_rank

    def share_on_rank_0(block: Tensor, device: int) -> Any:
        if rank == 1:
            raise RuntimeError("out of file descriptors")
        return share(block, device)

    reader = Reader()
    with lendable(share_on_rank_0):
        return [push(policy, reader) for _ in range(3)]


def test_memory_that_cannot_be_shared_is_pushed_in_buckets(worker_pool, qwen3_dir):
    strategy = {"tensor_model_parallel_size": 2}
    leader, other = worker_pool.run(
        lend_what_cannot_be_shared, qwen3_dir, strategy, world_size=2, init_process_group=False
    )
    assert leader == [("buckets", [])] * 3
    assert other == [("", [])] * 3


def free_buckets(model: Path, strategy: dict[str, Any]) -> tuple[bool, bool]:
    """Whether there is memory for buckets after a push by buckets, and after one of lent weights."""
    policy = train(model, strategy, 2)
    reader = Reader()
    with lendable():
        push(policy, reader)
    views = policy.planned_views.views
    before = views._memory is not None
    push(policy, reader)
    return before, views._memory is not None


def test_lent_weights_need_no_memory_for_buckets(worker_pool, qwen3_dir):
    strategy = {"tensor_model_parallel_size": 2}
    results = worker_pool.run(free_buckets, qwen3_dir, strategy, world_size=2, init_process_group=False)
    assert results == [(True, False)] * 2


def lend_on_cpu(model: Path, strategy: dict[str, Any]) -> tuple[int, LentWeights | None]:
    policy = train(model, strategy, 2)
    weights = policy.weights_to_push()
    return len(weights.lender.gpus), weights.lender.lend(Readiness.NEEDS_PLACES, 1)


def test_memory_of_a_cpu_is_not_lent(worker_pool, qwen3_dir):
    strategy = {"tensor_model_parallel_size": 2}
    results = worker_pool.run(lend_on_cpu, qwen3_dir, strategy, world_size=2, init_process_group=False)
    assert results == [(0, None)] * 2


def end_a_fit(model: Path, strategy: dict[str, Any]) -> tuple[float, float]:
    """When this rank's module was done with what it reads, rank 1 later than rank 0, and when it took its own back."""
    from lightning_megatron_rl.modules.exporting import PlannedViews
    from lightning_megatron_rl.modules.sft import SFTModule

    taken: list[float] = []
    done: list[float] = []

    class Reading(SFTModule):
        """Ends as one whose engine reads the memory of all ranks."""

        def teardown(self, stage: str) -> None:
            if dist.get_rank() == 1:
                time.sleep(0.5)
            done.append(time.monotonic())
            super().teardown(stage)

    let_go = PlannedViews.let_go
    with mock.patch.object(PlannedViews, "let_go", lambda views: (taken.append(time.monotonic()), let_go(views))):
        train(model, strategy, 2, module=Reading)
    return done[0], taken[0]


def test_memory_is_taken_back_when_no_rank_reads_it(worker_pool, qwen3_dir):
    strategy = {"tensor_model_parallel_size": 2}
    first, second = worker_pool.run(end_a_fit, qwen3_dir, strategy, world_size=2, init_process_group=False)
    assert min(first[1], second[1]) > max(first[0], second[0])
