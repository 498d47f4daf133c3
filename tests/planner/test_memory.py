"""The memory plan: each formula by hand, and refusals with the arithmetic and what to lower."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches

from lightning_megatron_rl.planner.memory import (
    ModelSize,
    Split,
    StateBytes,
    activation_bytes,
    output_bytes,
    parameters_per_gpu,
    sampler_parts,
    state_bytes,
    trainer_parts,
)
from lightning_megatron_rl.planner.moments import COMPUTING, GIB, PUSHING, SAMPLING, MemoryPlan

SMALL = ModelSize(
    dense=440_000_000,
    experts=0,
    embeddings=151_936 * 1024,
    hidden=1024,
    layers=28,
    query_width=2048,
    key_value_width=2048,
    ffn_width=3072,
    vocabulary=151_936,
)
MIXTURE = replace(SMALL, experts=4_000_000_000)


def size_of(parts, name: str) -> float:
    (found,) = [part.size for part in parts if part.name == name]
    return found


def test_parameters_are_divided_by_the_layout():
    assert parameters_per_gpu(SMALL, Split()) == (SMALL.dense + SMALL.embeddings, 0)
    untied = replace(SMALL, embeddings=2 * SMALL.embeddings)
    dense, _ = parameters_per_gpu(untied, Split(tensor=2, pipeline=2))
    assert dense == (SMALL.dense / 2 + SMALL.embeddings) / 2  # each stage has one of the two embeddings
    _, experts = parameters_per_gpu(MIXTURE, Split(tensor=2, pipeline=2, expert=4, expert_tensor=1))
    assert experts == MIXTURE.experts / 8


@pytest.mark.parametrize(
    ("precision", "sharded", "replicas", "total"),
    [
        # the table of docs/precision.md
        ("32-true", True, 1, 16),
        ("bf16-mixed", True, 1, 18),
        ("16-mixed", False, 4, 18),
        ("bf16-mixed", True, 4, 6 + 12 / 4),
        ("32-true", True, 8, 8 + 8 / 8),
        ("bf16-true", False, 4, 8),
    ],
)
def test_bytes_per_parameter_are_those_of_the_documents(precision, sharded, replicas, total):
    assert sum(state_bytes(precision, sharded=sharded, replicas=replicas)) == total


def test_activations_by_hand():
    # 4 x 1024 + 3 x 2048 + 2 x 2048 + 3 x 3072 = 23552 numbers per token and layer
    whole = activation_bytes(SMALL, Split(), tokens=8192, element_bytes=2, recompute=False)
    assert whole == 28 * 23552 * 2 * 8192
    recomputed = activation_bytes(SMALL, Split(), tokens=8192, element_bytes=2, recompute=True)
    assert recomputed == (28 * 1024 + 23552) * 2 * 8192
    some = activation_bytes(SMALL, Split(), tokens=8192, element_bytes=2, recompute=7 / 28)
    assert some == (7 * 1024 + 21 * 23552) * 2 * 8192  # what is recomputed has the room of a layer that was
    nearly_all = activation_bytes(SMALL, Split(), tokens=8192, element_bytes=2, recompute=27 / 28)
    assert nearly_all == (27 * 1024 + 23552) * 2 * 8192
    unfused = activation_bytes(SMALL, Split(), tokens=8192, element_bytes=2, recompute=False, fused_activation=False)
    assert unfused == 28 * (23552 + 2 * 3072) * 2 * 8192
    over_ranks = activation_bytes(SMALL, Split(tensor=2, context=2), tokens=8192, element_bytes=2, recompute=False)
    assert over_ranks == 28 * (4096 + 19456 / 2) * 2 * 4096


def test_tokens_on_their_way_to_experts_by_hand():
    routed = replace(MIXTURE, routed_width=8 * 1024)
    whole = activation_bytes(routed, Split(expert=4), tokens=8192, element_bytes=2, recompute=False)
    assert whole == (28 * (23552 + 8192) + 4 * 8192) * 2 * 8192
    recomputed = activation_bytes(routed, Split(tensor=4), tokens=8192, element_bytes=2, recompute=True)
    assert recomputed == (28 * 1024 + 4096 + (19456 + 5 * 8192) / 4) * 2 * 8192
    gathered = activation_bytes(routed, Split(tensor=4, expert_tensor=4), tokens=8192, element_bytes=2, recompute=True)
    assert gathered == (28 * 1024 + 4096 + 19456 / 4 + 5 * 8192) * 2 * 8192


def test_output_layer_by_hand():
    scored = output_bytes(SMALL, Split(tensor=2), chunk=2048, element_bytes=2, trained=False)
    assert scored == 2048 * 151_936 * 2 / 2
    trained = output_bytes(SMALL, Split(tensor=2), chunk=2048, element_bytes=2, trained=True)
    assert trained == (2048 * 2 + 1024 * (4 + 2)) * 151_936 / 2


def test_trainer_and_sampler_that_fit_pass():
    plan = MemoryPlan(
        trainer_parts(SMALL, Split(), precision="bf16-mixed", tokens=8192, logprob_chunk=1024),
        sampler_parts(SMALL, tensor=1, total=80 * GIB, utilization=0.4, cache_bytes=None, element_bytes=2),
        free=79 * GIB,
    )
    plan.check()
    assert size_of(plan.sampler, "sampler: weights and cache") == 0.4 * 80 * GIB
    assert size_of(plan.trainer, "trainer: weights") == 2 * (SMALL.dense + SMALL.embeddings)


def test_plan_that_does_not_fit_is_refused_with_its_arithmetic():
    plan = MemoryPlan(
        trainer_parts(SMALL, Split(), precision="bf16-mixed", tokens=65_536, logprob_chunk=1024),
        sampler_parts(SMALL, tensor=1, total=80 * GIB, utilization=0.5, cache_bytes=None, element_bytes=2),
        free=79 * GIB,
    )
    with pytest.raises(ValueError, match=r"needs 1\d\d\.\d GiB of a GPU that has 79\.0 GiB free") as error:
        plan.check()
    text = str(error.value)
    assert "65536 tokens, 28 layers" in text
    assert "gpu_memory_utilization 0.5 x 80.0 GiB" in text
    assert "0.596e9 parameters x 12 bytes (1 replicas share it)" in text
    remedies = text[text.index("What lowers it") :]
    assert remedies.index("max_tokens_per_microbatch") < remedies.index("gpu_memory_utilization")  # the largest first


def test_optimizer_state_is_shared_by_the_replicas():
    alone, shared = (
        trainer_parts(SMALL, Split(replicas=n), precision="bf16-mixed", tokens=1, logprob_chunk=1) for n in (1, 8)
    )
    assert size_of(alone, "trainer: optimizer state") == 8 * size_of(shared, "trainer: optimizer state")
    assert size_of(alone, "trainer: gradients") == size_of(shared, "trainer: gradients")


def test_state_of_experts_is_shared_by_their_own_replicas():
    # 4 GPUs, EP 4, DP 4: four replicas of the dense part, one of each expert: world / (PP * EP * ETP) = 4 / 4
    split = Split(expert=4, replicas=4, expert_replicas=1)
    parts = trainer_parts(MIXTURE, split, precision="bf16-mixed", tokens=1, logprob_chunk=1)
    assert size_of(parts, "trainer: optimizer state") == (SMALL.dense + SMALL.embeddings) * 12 / 4
    assert size_of(parts, "trainer: optimizer state, experts") == 1_000_000_000 * 12
    (line,) = [part.arithmetic for part in parts if part.name == "trainer: optimizer state, experts"]
    assert line == "1.000e9 parameters of experts x 12 bytes (1 replicas share it)"
    on_two_nodes = replace(split, replicas=8, expert_replicas=2)
    parts = trainer_parts(MIXTURE, on_two_nodes, precision="bf16-mixed", tokens=1, logprob_chunk=1)
    assert size_of(parts, "trainer: optimizer state, experts") == 1_000_000_000 * 12 / 2
    whole = replace(on_two_nodes, sharded=False)
    parts = trainer_parts(MIXTURE, whole, precision="bf16-mixed", tokens=1, logprob_chunk=1)
    assert size_of(parts, "trainer: optimizer state, experts") == 1_000_000_000 * 12


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), [(4, 2, 8), (4, 2, 4), (2, 3, 4), (4, 1, 8), (4, 1, 2)])
def test_stages_keep_as_many_micro_batches_as_megatrons_schedule_has_ahead(stages, chunks, microbatches):
    virtual = chunks if chunks > 1 else None
    for stage in range(stages):
        group: Any = SimpleNamespace(size=lambda: stages, rank=lambda stage=stage: stage)
        ranks: Any = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=virtual)
        every, _, ahead, _ = get_pp_rank_microbatches(microbatches, chunks, stages, p2p_communicator=ranks)
        kept = Split(pipeline=stages, chunks=chunks).kept_microbatches(stage, microbatches)
        assert kept * chunks == min(ahead + 1, every)  # one more pass, then the first backward pass


def test_settings_of_the_user_replace_the_bytes_of_the_precision():
    halved = StateBytes(weights=2, gradients=2, optimizer=6, step=4)
    split = Split(replicas=2, expert=4, expert_replicas=1)
    parts = trainer_parts(MIXTURE, split, precision="bf16-mixed", tokens=1, logprob_chunk=1, state=halved)
    dense, experts = SMALL.dense + SMALL.embeddings, 1_000_000_000
    assert size_of(parts, "trainer: gradients") == (dense + experts) * 2
    assert size_of(parts, "trainer: optimizer state") == dense * 6 / 2
    assert size_of(parts, "trainer: optimizer state, experts") == experts * 6
    # each of the two optimizers makes its own copies: the experts' are more than 0.6e9 * 4 / 2
    assert size_of(parts, "trainer: copies for the step") == experts * 4


def test_weights_are_there_twice_while_megatron_lays_them_out():
    dense, experts = SMALL.dense + SMALL.embeddings, 1_000_000_000
    options = {"precision": "bf16-mixed", "tokens": 1, "logprob_chunk": 1}
    second = "trainer: weights, old and new"
    assert size_of(trainer_parts(SMALL, Split(), **options), second) == dense * 2
    assert size_of(trainer_parts(SMALL, Split(pipeline=2, chunks=2), **options), second) == (
        (SMALL.dense / 2 + SMALL.embeddings) * 2 / 2
    )
    # the experts' block comes last, when everything else is as it stays
    assert size_of(trainer_parts(MIXTURE, Split(expert=4), **options), second) == experts * 2
    unsharded = trainer_parts(SMALL, Split(sharded=False), **options)
    assert second not in {part.name for part in unsharded}  # parameters stay where they are


def test_push_keeps_buckets_a_larger_tensor_and_a_message():
    options: dict[str, Any] = {"precision": "bf16-mixed", "tokens": 1, "logprob_chunk": 1}
    push = "trainer: weight push"
    assert push not in {part.name for part in trainer_parts(SMALL, Split(), **options)}
    embedding, whole = 151_936 * 1024 * 2, (SMALL.dense + SMALL.embeddings) * 2
    in_small = trainer_parts(SMALL, Split(tensor=2), **options, push_bucket=GIB // 4)
    assert size_of(in_small, push) == 2 * GIB / 4 + embedding + embedding / 2
    in_large = trainer_parts(SMALL, Split(tensor=2), **options, push_bucket=GIB)
    assert size_of(in_large, push) == min(2 * GIB, whole) + GIB / 2
    in_one = trainer_parts(SMALL, Split(pipeline=2), **options, push_bucket=2 * GIB)
    assert size_of(in_one, push) == 2 * whole

    def there(*offloads: str) -> set[str]:
        sampler = sampler_parts(SMALL, tensor=1, total=80 * GIB, utilization=0.4, cache_bytes=None, element_bytes=2)
        plan = MemoryPlan(in_small, sampler, free=79 * GIB, apart=True, offloads=offloads)
        return {moment for moment, found in plan.moments.items() for part in found if part.name == push and found[part]}

    assert there() == there("optimizer") == {COMPUTING, PUSHING, SAMPLING}
    assert there("parameters") == {PUSHING}


def test_messages_to_servers_take_their_buckets_or_twice_what_the_rank_holds():
    options: dict[str, Any] = {"precision": "bf16-mixed", "tokens": 1, "logprob_chunk": 1}
    push = "trainer: weight push"
    assert size_of(trainer_parts(SMALL, Split(), **options, message_bytes=GIB // 2), push) == GIB / 2
    half = trainer_parts(SMALL, Split(tensor=2), **options, message_bytes=64 * GIB)
    assert size_of(half, push) == 2 * size_of(half, "trainer: weights")


def test_adapters_and_scoring_need_no_state_of_the_model():
    for options in ({"adapters": True}, {"training": False}):
        parts = trainer_parts(SMALL, Split(), precision="bf16-mixed", tokens=8192, logprob_chunk=1024, **options)
        assert {part.name for part in parts} == {"trainer: process", "trainer: weights", "trainer: activations"}
    scoring = size_of(parts, "trainer: activations")
    assert scoring == 2 * 1024 * SMALL.vocabulary  # one chunk of logits


def test_reference_is_a_second_set_of_weights():
    parts = trainer_parts(SMALL, Split(), precision="bf16-mixed", tokens=1, logprob_chunk=1, frozen_copies=1)
    assert size_of(parts, "trainer: reference") == size_of(parts, "trainer: weights")


def test_cache_of_a_given_size_counts_beside_the_weights():
    parts = sampler_parts(SMALL, tensor=2, total=80 * GIB, utilization=0.9, cache_bytes=4 * GIB, element_bytes=2)
    assert size_of(parts, "sampler: key/value cache") == 4 * GIB
    assert size_of(parts, "sampler: weights") == SMALL.dense + SMALL.embeddings


def test_sampler_has_its_weights_alone_while_they_are_pushed():
    weights = 2 * (SMALL.dense + SMALL.embeddings)
    for cache_bytes in (4 * GIB, None):
        options = {"tensor": 1, "total": 80 * GIB, "utilization": 0.4, "element_bytes": 2}
        plan = MemoryPlan((), sampler_parts(SMALL, cache_bytes=cache_bytes, **options), free=80 * GIB, apart=True)
        whole = 0.4 * 80 * GIB if cache_bytes is None else weights + cache_bytes
        assert plan.totals == {SAMPLING: GIB + whole, PUSHING: GIB + weights, COMPUTING: GIB}


@pytest.mark.parametrize("cache_bytes", [4 * GIB, None])
def test_engines_that_share_a_gpu_are_counted_each(cache_bytes):
    options = {"tensor": 2, "total": 80 * GIB, "utilization": 0.3, "element_bytes": 2, "cache_bytes": cache_bytes}
    plan = MemoryPlan((), sampler_parts(SMALL, **options), free=0, apart=True)
    two = MemoryPlan((), sampler_parts(SMALL, **options, engines=2), free=0, apart=True)
    assert two.totals == {moment: 2 * size for moment, size in plan.totals.items()}
    assert all("x 2 engines" in part.arithmetic for part in two.sampler)
    with pytest.raises(ValueError, match="keep the engines of several replicas on GPUs of their own") as error:
        two.check()
    assert "raise the engine's tensor_parallel_size" not in str(error.value)
    assert "lower the engine's " in str(error.value)


def test_sampler_in_the_trainers_process_has_no_context_of_its_own():
    options = {"tensor": 1, "total": 80 * GIB, "utilization": 0.9, "cache_bytes": 4 * GIB, "element_bytes": 2}
    apart = sampler_parts(SMALL, **options)
    within = sampler_parts(SMALL, own_process=False, **options)
    assert apart[1:] == within
    assert apart[0].name == "sampler: process"
