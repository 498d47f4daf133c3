"""Weights of a model that is split over ranks: pushed by a plan, they are those of an export."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partialmethod
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron_rl.models.layers.lora import LoRASettings
from lightning_megatron_rl.verify.layouts import parse_layout
from lightning_megatron_rl.weights.export_views import RowBlocks
from lightning_megatron_rl.weights.pieces import Piece
from lightning_megatron_rl.weights.placement import aligned
from lightning_megatron_rl.weights.rectangles import matrix_shape
from lightning_megatron_rl.weights.source import WeightSource
from tests.selection import by_default

COLLECTIVES = ("broadcast", "all_gather", "all_reduce", "all_gather_object", "broadcast_object_list")

PUSHES = {  # family and layout: broadcasts of a push, one of each rank in each group of several that it has a part in
    "qwen3 tp2": 2,
    "qwen3 tp2_sp": 2,
    "qwen3 pp2": 2,
    "qwen3 pp2_vpp2": 2,
    "qwen3 tp2_pp2_sp": 4,
    "qwen3 tp2_dp2": 2,
    "qwen3 pp2_cp2": 2,
    "qwen2_tied tp2": 2,
    "gemma3 tp2": 2,
    "qwen2_tied pp2": 2,
    "qwen3_moe tp2_sp": 4,  # experts split as the rest
    "qwen3_moe tp2_sp_etp1": 2,  # experts whole on each rank
    "qwen3_moe ep2": 2,  # everything else whole on each rank
    "qwen3_moe tp2_sp_ep2_etp1": 4,
    "qwen3_moe tp2_sp_ep2": 6,  # four ranks split the experts, two and two the rest
    "qwen3_moe pp2_ep2": 6,
    "qwen3_moe ep2_dp4": 2,
    "qwen3_moe cp2_ep2": 2,  # in one replica, other than ep2's
    "deepseek_v3_plain tp2_sp": 4,
    "deepseek_v3_plain ep2": 2,
    "deepseek_v3_plain pp2": 3,  # all experts are on the last stage
    "deepseek_v3 pp2_vpp2": 4,
    "gpt_oss pp2": None,  # its experts are packed, and turned round
    "gpt_oss tp2_sp_etp1": None,
}
DEFAULT = (
    "qwen3 tp2_sp",
    "qwen3 tp2_pp2_sp",
    "qwen3 tp2_dp2",
    "qwen2_tied pp2",
    "qwen3_moe tp2_sp_ep2_etp1",
    "qwen3_moe tp2_sp_ep2",
    "deepseek_v3_plain tp2_sp",
    "gpt_oss tp2_sp_etp1",
)


def train(
    model: Path,
    strategy: dict[str, Any],
    world_size: int,
    precision: Any = "bf16-mixed",
    lora: Any = None,
    module: type | None = None,
) -> Any:
    """Return a policy, an `SFTModule` if not another, after an update."""
    from megatron.core.optimizer import OptimizerConfig

    from lightning_megatron_rl.modules.sft import SFTModule
    from lightning_megatron_rl.modules.training import TrainingSettings
    from tests.training import SequenceDataModule, frozen_sequences, make_trainer

    policy = (module or SFTModule)(
        str(model), train=TrainingSettings(optimizer=OptimizerConfig(lr=1e-2), max_tokens_per_microbatch=64, lora=lora)
    )
    trainer = make_trainer(strategy, world_size, max_steps=1, precision=precision)
    trainer.fit(policy, SequenceDataModule(frozen_sequences(8), 8))
    return policy


@torch.no_grad()
def disturb(policy: Any, *, copies_differ: bool = True) -> None:
    """Give every weight other numbers, and those of each replica their own; of context parallelism's copies, too."""
    from megatron.core import parallel_state

    replica = parallel_state.get_data_parallel_rank(with_context_parallel=copies_differ)
    expert_replica = parallel_state.get_expert_data_parallel_rank()
    biases = [buffer for name, buffer in policy.model.named_buffers() if name.endswith("expert_bias")]
    for tensor in [*policy.model.parameters(), *biases]:
        is_expert = not getattr(tensor, "allreduce", True)  # Megatron's mark
        pattern = torch.arange(tensor.numel()).view(tensor.shape) % 7 + 16 * (expert_replica if is_expert else replica)
        tensor.mul_(2).add_(pattern.to(tensor.dtype))


def exported(policy: Any) -> list[tuple[str, Tensor]]:
    """What an export writes, in the precision of training."""
    weights = policy.export_weights(policy.strategy.precision_plugin.params_dtype)
    return [(name, tensor.clone()) for name, tensor in weights]


def differences(pushed: list[tuple[str, Tensor]], expected: list[tuple[str, Tensor]]) -> list[str]:
    """Names of tensors that are not the same, bit by bit."""
    assert [name for name, _ in pushed] == [name for name, _ in expected]
    return [
        name
        for (name, tensor), (_, other) in zip(pushed, expected, strict=True)
        if tensor.dtype != other.dtype or not torch.equal(tensor, other)
    ]


def count_calls(policy: Any, run: Any) -> Counter[str]:
    """Call `run`; return how often it called collectives and Megatron-Bridge's conversion."""
    spies = {name: mock.patch.object(dist, name, wraps=getattr(dist, name)) for name in COLLECTIVES}
    bridge = policy.hf_model._bridge
    spies["conversion"] = mock.patch.object(bridge, "export_hf_weights", wraps=bridge.export_hf_weights)
    with ExitStack() as stack:
        entered = {name: stack.enter_context(spy) for name, spy in spies.items()}
        run()
        return Counter({name: spy.call_count for name, spy in entered.items() if spy.call_count})


def in_buckets(weights: WeightSource) -> Iterator[tuple[str, Tensor]]:
    """Copies of the tensors of buckets, each taken before the next but one is there."""
    if weights.buckets is None:
        yield from weights.tensors()
        return
    last: list[tuple[str, Tensor]] = []
    for bucket in weights.buckets():
        yield from [(name, tensor.clone()) for name, tensor in last]
        last = list(bucket)
    yield from [(name, tensor.clone()) for name, tensor in last]


def one_by_one(weights: WeightSource) -> list[tuple[str, Tensor]]:
    return list(weights.tensors())


def push_twice(model: Path, strategy: dict[str, Any], world_size: int) -> tuple[bool, list[str], Counter[str]]:
    """Whether pushes are planned, what differs after the weights changed, and the calls of a push.

    The leader of a replica takes buckets; the others of them take tensors every other time.
    """
    policy = train(model, strategy, world_size)
    list(in_buckets(policy.weights_to_push()))
    found = []
    for take in (in_buckets, in_buckets, one_by_one, in_buckets):
        disturb(policy)
        way = in_buckets if policy.strategy.replica.is_leader else take
        pushed: list[tuple[str, Tensor]] = []
        calls = count_calls(policy, lambda way=way, pushed=pushed: pushed.extend(way(policy.weights_to_push())))
        found += differences(pushed, exported(policy))
    return policy.planned_views.views is not None, found, calls


def run_case(worker_pool: Any, checkpoint: Any, case: str, function: Any) -> list[Any]:
    """Run a function of model, strategy and world size for a family and a layout such as "qwen3 tp2"."""
    family, _, name = case.partition(" ")
    layout, model = parse_layout(name), checkpoint(family)
    world = layout.world_size
    found: list[Any] = worker_pool.run(
        function, model, layout.strategy, world, world_size=world, init_process_group=False
    )
    return found


@pytest.mark.parametrize("case", by_default(DEFAULT, PUSHES))
def test_pushed_weights_are_the_exported_ones(worker_pool, checkpoint, case):
    expected = PUSHES[case]
    for planned, different, calls in run_case(worker_pool, checkpoint, case, push_twice):
        assert planned == (expected is not None)
        assert not different
        assert (calls == {"broadcast": expected}) if planned else (calls["conversion"] == 1)


def push_in_buckets(model: Path, strategy: dict[str, Any], bucket_bytes: int) -> tuple[list[str], list[int], list[int]]:
    """What differs; bytes of the memory that tensors of several lie in, and of messages, if one is about a bucket."""
    policy = train(model, strategy, 2)
    chunks = list(policy.model)
    views = policy.hf_model.plan_sharded_views(chunks, bucket_bytes)
    disturb(policy)
    with mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as broadcast:
        pushed = list(views.weights().tensors())  # all are held
    messages = [call.args[0].nbytes for call in broadcast.call_args_list]
    buckets = [views.weights(stays=True) for _ in range(2)]
    first, second = (
        [(bucket, bucket.views[0].view.untyped_storage()) for bucket in push.buckets()] for push in buckets
    )
    assert [bucket for bucket, _ in first] == [bucket for bucket, _ in second]
    places = [storage.data_ptr() for _, storage in first]
    assert all(place != following for place, following in pairwise(places)), "whoever reads one would read the next"
    memories = {bucket.memory: (storage.data_ptr(), storage.nbytes()) for bucket, storage in first}
    assert [memories[bucket.memory][0] for bucket, _ in first] == places
    largest = max(view.view.nbytes for bucket, _ in first for view in bucket.views)
    assert largest > bucket_bytes
    assert all((size <= bucket_bytes) == (memory < 2) for memory, (_, size) in memories.items())
    assert max(size for _, size in memories.values()) <= aligned(largest)
    held: dict[int, list[int]] = {}
    for _, tensor in pushed:
        held.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor.untyped_storage().nbytes())
    shared = [sizes[0] for sizes in held.values() if len(sizes) > 1]
    return differences(pushed, exported(policy)), shared, messages


@pytest.mark.parametrize("layout", ["tp2_sp", "ep2"])
def test_buckets_are_bounded(worker_pool, qwen3_moe_dir, layout):
    bound = 12_000  # smaller than the largest tensor
    for different, shared, messages in worker_pool.run(
        push_in_buckets, qwen3_moe_dir, parse_layout(layout).strategy, bound, world_size=2, init_process_group=False
    ):
        assert not different
        assert len(shared) > 2
        assert max(shared) <= bound
        assert len(messages) > 4
        assert max(messages) <= bound


def break_off(model: Path, strategy: dict[str, Any], by_buckets: bool) -> list[str]:
    """The leader's engine takes two tensors, or a bucket, and is gone; everybody pushes again."""
    from lightning_megatron_rl.models.hf.model import HFModel
    from lightning_megatron_rl.modules import sampling

    policy = train(model, strategy, 2)

    def update(weights: Any, version: int) -> Any:
        if by_buckets:
            next(weights.buckets())
        else:
            tensors = weights.tensors()
            next(tensors), next(tensors)
        raise sampling.WeightsLostError("gone")

    engine: Any = SimpleNamespace(update_weights=update)
    several = partialmethod(HFModel.plan_sharded_views, bucket_bytes=20_000)
    with mock.patch.object(HFModel, "plan_sharded_views", several):
        weights = policy.weights_to_push()
    report = policy.strategy.replica.run_on_leader(
        lambda: sampling.update_if_possible(engine, weights, 1), others=weights.finish_collectives
    )
    assert report is None
    return differences(one_by_one(policy.weights_to_push()), exported(policy))


@pytest.mark.parametrize("by_buckets", [False, True], ids=["tensors", "buckets"])
def test_a_push_that_breaks_off_leaves_nobody_waiting(worker_pool, qwen3_dir, by_buckets):
    strategy = {"tensor_model_parallel_size": 2}
    results = worker_pool.run(break_off, qwen3_dir, strategy, by_buckets, world_size=2, init_process_group=False)
    assert results == [[], []]


def push_other_chunks(model: Path, strategy: dict[str, Any]) -> list[str]:
    """What differs after the model was built anew."""
    policy = train(model, strategy, 2)
    list(in_buckets(policy.weights_to_push()))
    policy.model = torch.nn.ModuleList(policy.build_chunks())
    return differences(list(in_buckets(policy.weights_to_push())), exported(policy))


def test_other_chunks_are_planned_anew(worker_pool, qwen3_dir):
    strategy = {"tensor_model_parallel_size": 2}
    results = worker_pool.run(push_other_chunks, qwen3_dir, strategy, world_size=2, init_process_group=False)
    assert results == [[], []]


def push_dtypes(
    model: Path, strategy: dict[str, Any], precision: str, lora: LoRASettings | None
) -> tuple[bool, list[str], set[torch.dtype], set[torch.dtype]]:
    """Whether there is a plan, what differs, and dtypes: those that are pushed, and that of an export by default."""
    policy = train(model, strategy, 2, precision, lora)
    pushed = [(name, tensor.clone()) for name, tensor in policy.weights_to_push().tensors()]
    on_disk = {tensor.dtype for _, tensor in policy.export_weights()}
    planned = policy.planned_views.views is not None
    return planned, differences(pushed, exported(policy)), {tensor.dtype for _, tensor in pushed}, on_disk


def save_in_16_bits(source: Path, directory: Path) -> Path:
    """A copy of a checkpoint in bf16."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(directory)
    AutoTokenizer.from_pretrained(source).save_pretrained(directory)
    return directory


@pytest.mark.parametrize(("family", "lora"), [("qwen3", False), ("qwen3", True), ("gpt_oss", False)])
@pytest.mark.parametrize(("precision", "dtype"), [("32-true", torch.float32), ("bf16-mixed", torch.bfloat16)])
def test_the_precision_is_that_of_training(worker_pool, checkpoint, tmp_path, family, lora, precision, dtype):
    stored = torch.bfloat16 if dtype == torch.float32 else torch.float32
    model = save_in_16_bits(checkpoint(family), tmp_path) if stored == torch.bfloat16 else checkpoint(family)
    strategy = parse_layout("tp2_sp_etp1" if family == "gpt_oss" else "tp2_sp").strategy
    adapters = LoRASettings(rank=4, alpha=8) if lora else None
    for planned, different, pushed, on_disk in worker_pool.run(
        push_dtypes, model, strategy, precision, adapters, world_size=2, init_process_group=False
    ):
        assert planned == (family == "qwen3" and not lora)
        assert not different
        assert pushed == {dtype}
        assert on_disk == {stored}


def test_biases_that_balance_experts_stay_in_fp32(worker_pool, deepseek_dir):
    strategy = {"pipeline_model_parallel_size": 2}
    for planned, different, pushed, _ in worker_pool.run(
        push_dtypes, deepseek_dir, strategy, "bf16-mixed", None, world_size=2, init_process_group=False
    ):
        assert planned
        assert not different
        assert pushed == {torch.float32, torch.bfloat16}


# ---- conversions that Megatron-Bridge does not have -----------------------------------------------------------------


def test_a_piece_of_a_parameter():
    parameter = torch.arange(6 * 8).view(6, 2, 4)[1:]  # does not start where its memory does
    piece = Piece(source=0, rows=RowBlocks(start=1, size=1, step=2, count=2), first_column=2, width=5, row=0, column=0)
    assert torch.equal(piece.of(parameter)[:, 0], parameter.reshape(5, 8)[[1, 3], 2:7])
    assert piece.fits((5, 2, 4))
    assert piece.fits((4, 7))
    assert not piece.fits((3, 8))
    assert not piece.fits((5, 6))


def test_a_tensor_as_a_matrix():
    assert matrix_shape((6, 2, 4)) == (6, 8)
    assert matrix_shape((6,)) == (6, 1)
    assert matrix_shape(()) == (1, 1)
