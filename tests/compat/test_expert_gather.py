"""Experts that gather the tokens of all ranks: the numbers of one process, whatever number of tokens each rank has."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron_rl.models.layers.moe import MoESettings
from lightning_megatron_rl.models.overrides import check_dispatcher, default_dispatcher
from lightning_megatron_rl.parallel.layout import ParallelLayout
from lightning_megatron_rl.verify.runner import verify_layouts
from tests.distributed import WorkerError, WorkerPool
from tests.models import workers
from tests.models.conftest import TOLERANCE, hf_logprobs, worst_difference
from tests.modules import test_expert_bias, test_lora_moe
from tests.modules.test_moe import (
    BOTH_LOSSES,
    FULL_RECOMPUTE,
    MOE_METRICS,
    MOE_RECOMPUTE,
    R2,
    assert_same_rollouts,
    grpo,
    sft,
    with_given_routing,
)
from tests.selection import by_default
from tests.strategy.test_invariance import assert_same, ragged_batch
from tests.strategy.test_megatron import RELATIVE, assert_same_run
from tests.tiny_models import save_without_numbers
from tests.training import Run, fit_sft
from tests.verify import subjects

GATHER = {"moe_token_dispatcher_type": "allgather"}
LAYOUTS = ["ep2", "tp2_sp_ep2_etp1", "pp2_ep2", "cp2_ep2", "ep2_cp2"]  # of tests.modules.test_moe
UNEQUAL = [[9, 17, 23], [5, 4, 40, 22]]  # tokens of each rank's sequences: 26 and 23 in micro-batches, 9 and 62
SHARED, BIASED = "deepseek_v3", "gpt_oss"  # with shared experts; with biases in experts
OTHERS = ["glm4_moe", "olmoe", "minimax_m2", "hy_v3", "mixtral", "deepseek_v3_plain"]


@pytest.fixture(scope="module")
def reference(worker_pool: WorkerPool, qwen3_moe_dir: Path) -> Run:
    return sft(worker_pool, qwen3_moe_dir, moe=BOTH_LOSSES)[0]


@pytest.mark.parametrize("layout", by_default(["ep2", "tp2_sp_ep2_etp1"], LAYOUTS))
def test_training_gives_the_numbers_of_one_process(worker_pool, qwen3_moe_dir, reference, layout):
    """Each sequence is a micro-batch of another length, so the replicas of ep2, pp2_ep2 and ep2_cp2 pad them."""
    run = sft(worker_pool, qwen3_moe_dir, layout, moe=BOTH_LOSSES, model_config=GATHER)[0]
    assert_same_run(run, reference)
    for mine, theirs in zip(run.steps, reference.steps, strict=True):
        for name in MOE_METRICS:
            assert mine[name] == pytest.approx(theirs[name], rel=RELATIVE), name


@pytest.mark.parametrize("layout", by_default(["ep2"], ["ep2", "tp2_ep2_etp1_sp", "pp2_ep2", "cp2_ep2", "ep4"]))
def test_layouts_verify(worker_pool, qwen3_moe_dir, layout):
    """Log-probs and each gradient, too; the reference in one process sends no tokens and needs no dispatcher."""
    moe = MoESettings(aux_loss_coeff=0.0)  # depends on the division into micro-batches
    build = partial(subjects.sft, qwen3_moe_dir, max_tokens_per_microbatch=184, moe=moe, model_config=GATHER)
    options = {"batch": ragged_batch(), "pool": worker_pool, "processes": 4, "tolerance": RELATIVE}
    assert_same(verify_layouts(build, [f"{layout}@40"], **options))


# ---- against Megatron's all-to-all ---------------------------------------------------------------------------------


def ragged(lengths: list[int], seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 128, (length + 1,), generator=generator).tolist() for length in lengths]


def logprobs_and_gradients(directories: dict[str, str], overrides: dict[str, Any]) -> dict[str, Any]:
    """Of each model on two ranks that have other sequences: log-probs, gradients, its dispatchers and what they saw."""
    import torch.distributed as dist

    from lightning_megatron_rl.models.forward import microbatch_forward
    from lightning_megatron_rl.models.layers.logprobs import logprob_processor

    workers.start_megatron(ep=2)
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    rank, results = dist.get_rank(), {}
    for name, directory in directories.items():
        model, [chunk] = workers.build(directory, config_overrides=overrides)
        chunk.train()
        processor = logprob_processor(vocab_size=model.config.vocab_size, with_entropy=True, cap=model.logit_cap)
        found: list[Tensor] = []
        for batch in workers.batches(ragged(UNEQUAL[rank], rank), packed=True):
            arguments = (batch["tokens"], batch["positions"], batch["labels"], batch["cu"], batch["longest"])
            output = microbatch_forward(chunk, *arguments, output_processor=processor)
            found += [output[:, row, start:end].detach().clone() for row, start, end in batch["places"]]
            output.sum().backward()
        gradients = {key: parameter.grad.clone() for key, parameter in chunk.named_parameters()}
        dispatchers = [layer.token_dispatcher for layer in chunk.modules() if hasattr(layer, "token_dispatcher")]
        kinds = {type(dispatcher).__name__ for dispatcher in dispatchers}
        rows = {len(dispatcher.local_map) for dispatcher in dispatchers} if overrides else set()
        results[name] = (found, gradients, kinds, rows)
    MoEAuxLossAutoScaler.main_loss_backward_scale = None  # of a shape that the schedule of a later job cannot write to
    return results


@pytest.mark.parametrize("models", [["qwen3_moe", SHARED, BIASED], pytest.param(OTHERS, marks=pytest.mark.slow)])
def test_ranks_with_other_lengths_get_what_all_to_all_gives(worker_pool, checkpoint, models):
    directories = {name: str(checkpoint(name)) for name in models}
    gathered, sent = (
        worker_pool.run(logprobs_and_gradients, directories, overrides, world_size=2) for overrides in (GATHER, {})
    )
    for rank, name in ((rank, name) for rank in range(2) for name in models):
        (ours, gradients, kinds, rows), (theirs, expected, others, _) = gathered[rank][name], sent[rank][name]
        assert (kinds, others) == ({"GatheringDispatcher"}, {"MoEAlltoAllTokenDispatcher"})
        assert rows == {2 * 62}, "the longer of the last micro-batches, from both ranks"
        assert worst_difference(ours, theirs) <= TOLERANCE
        assert worst_difference(ours, hf_logprobs(checkpoint(name), ragged(UNEQUAL[rank], rank))) <= TOLERANCE
        for key, gradient in expected.items():
            assert (gradients[key] - gradient).norm() <= RELATIVE * gradient.norm(), f"{name}, rank {rank}: {key}"


def add_up_in_bf16() -> tuple[Tensor, Tensor]:
    """The sum over four ranks of 256 and three ones, and the gradient of gathered rows with the same gradients."""
    import torch.distributed as dist

    from lightning_megatron_rl.compat import expert_gather

    rank, group = dist.get_rank(), dist.group.WORLD
    own = torch.full((1, 3), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
    rows = torch.zeros(1, 3, dtype=torch.bfloat16, requires_grad=True)
    expert_gather._Gather.apply(rows, 1, group).backward(own.repeat(4, 1))
    assert rows.grad is not None
    return expert_gather._AddUp.apply(own.repeat(4, 1), 1, group, True), rows.grad


def test_results_of_ranks_are_added_in_fp32(worker_pool):
    """bf16 has 8 bits: 256 + 1 is 256, once for each rank, and 259 is nearest to 260."""
    for result in worker_pool.run(add_up_in_bf16, world_size=4):
        assert all((tensor == 260).all() for tensor in result)


# ---- with other settings -------------------------------------------------------------------------------------------


RECOMPUTES = {  # whether what experts return is added up once more, and whether ranks agree once more
    "full": (FULL_RECOMPUTE, False, False),
    "moe": (MOE_RECOMPUTE, False, True),
    "some layers": ({**FULL_RECOMPUTE, "recompute_method": "block", "recompute_num_layers": 3}, False, False),
    "two layers at once": ({**FULL_RECOMPUTE, "recompute_num_layers": 2}, True, False),
}


def counting(*arguments: Any, **options: Any) -> tuple[Run, dict[str, int]]:
    """`fit_sft`, and how often the ranks' results were added up, and ranks agreed on the number of rows."""
    from lightning_megatron_rl.compat import expert_gather

    originals = {name: getattr(expert_gather, name) for name in ("_add_up", "_largest")}
    counts = dict.fromkeys(originals, 0)

    def counted(name: str, *given: Any) -> Any:
        counts[name] += 1
        return originals[name](*given)

    for name in originals:
        setattr(expert_gather, name, partial(counted, name))
    try:
        return fit_sft(*arguments, **options), counts
    finally:
        for name, original in originals.items():
            setattr(expert_gather, name, original)


@pytest.mark.parametrize("name", by_default(["full", "moe", "two layers at once"], RECOMPUTES))
def test_recomputed_layers_gather_again(worker_pool, qwen3_moe_dir, reference, name):
    """What experts return is added up again only where a layer behind it in the same recomputation needs it.

    Ranks agree once for each micro-batch, and again only where experts are recomputed without their layer.
    """
    recompute, sums_again, agree_again = RECOMPUTES[name]
    options = {"pool": worker_pool, "model": qwen3_moe_dir, "layout": "ep2", "moe": BOTH_LOSSES, "fit": counting}
    _, once = sft(**options, model_config=GATHER)[0]
    run, counts = sft(**options, model_config={**GATHER, **recompute})[0]
    assert_same_run(run, reference)
    assert counts["_add_up"] > once["_add_up"] if sums_again else counts["_add_up"] == once["_add_up"]
    assert counts["_largest"] > once["_largest"] if agree_again else counts["_largest"] == once["_largest"]


def test_ranks_agree_once_for_a_micro_batch(worker_pool, qwen3_moe_dir):
    """Each of four layers adds up in each forward and backward pass; two steps have two backward passes each."""
    options = {"pool": worker_pool, "model": qwen3_moe_dir, "layout": "ep2", "fit": counting}
    _, counts = sft(**options, model_config=GATHER)[0]
    assert counts["_add_up"] == 4 * (counts["_largest"] + 2 * 2)


@pytest.mark.parametrize("name", by_default(["moe"], ["full", "moe"]))
def test_micro_batches_overlap_in_a_pipeline(worker_pool, qwen3_moe_dir, reference, name):
    """The backward pass of one, which recomputes, comes after the forward pass of the next, of another length."""
    recompute, *_ = RECOMPUTES[name]
    run = sft(worker_pool, qwen3_moe_dir, "pp2_ep2", moe=BOTH_LOSSES, model_config={**GATHER, **recompute})[0]
    assert_same_run(run, reference)


def test_sum_that_is_left_out_is_nobody_s(worker_pool, qwen3_moe_dir):
    """Its numbers are NaN: a layer with a norm behind its experts, taken for one without, has no finite gradient."""
    (finite,), (broken,) = (
        set(worker_pool.run(gradient_is_finite, str(qwen3_moe_dir), ends_layer, world_size=2))
        for ends_layer in (False, True)
    )
    assert (finite, broken) == (True, False)


def gradient_is_finite(directory: str, ends_layer: bool) -> bool:
    """Of a recomputed layer of experts that something multiplies behind it."""
    from megatron.core.tensor_parallel import checkpoint

    workers.start_megatron(ep=2)
    _, [chunk] = workers.build(directory, config_overrides=GATHER)
    layer = next(module for module in chunk.modules() if hasattr(module, "token_dispatcher"))
    layer.token_dispatcher.ends_recomputation = ends_layer
    rows = torch.randn(5, 1, chunk.config.hidden_size, requires_grad=True)
    checkpoint(lambda hidden: layer(hidden)[0] ** 2, False, rows).sum().backward()
    assert rows.grad is not None
    return bool(rows.grad.isfinite().all())


@pytest.mark.parametrize("layout", by_default(["ep2"], ["ep2", "pp2_ep2"]))
def test_replayed_routing_in_recomputed_layers(worker_pool, qwen3_moe_dir, layout):
    single = grpo(worker_pool, qwen3_moe_dir, module={"moe": R2})[0]
    module = {"moe": R2, "model_config": {**GATHER, **FULL_RECOMPUTE}}
    assert_same_rollouts(grpo(worker_pool, qwen3_moe_dir, layout, module=module)[0], single)


def test_rank_whose_experts_get_no_token(worker_pool, qwen3_moe_dir):
    """All tokens go to experts 0 and 1, which are the first rank's."""
    single, split = (
        worker_pool.run(
            with_given_routing,
            qwen3_moe_dir,
            {"expert_model_parallel_size": ranks},
            ranks,
            model_config=GATHER if ranks > 1 else {},
            world_size=ranks,
            init_process_group=False,
        )[0]
        for ranks in (1, 2)
    )
    assert split.steps[0]["moe/load_imbalance"] == 2.0
    for run in (single, split):
        run.steps[0].pop("change")  # of a rank's own sequences
    assert_same_rollouts(split, single)


def test_expert_bias_counts_no_padding(worker_pool, deepseek_dir):
    """DeepSeek's, which has shared experts."""
    counts, single = test_expert_bias.update(worker_pool, deepseek_dir)
    split_counts, split = test_expert_bias.update(worker_pool, deepseek_dir, "ep2", model_config=GATHER)
    assert torch.equal(split_counts, counts)
    assert torch.equal(test_expert_bias.biases(split), test_expert_bias.biases(single))
    assert_same_run(split, single)


def test_adapters_of_experts(worker_pool, qwen3_moe_dir):
    single = test_lora_moe.job(worker_pool, qwen3_moe_dir)[0]
    run = test_lora_moe.job(worker_pool, qwen3_moe_dir, "ep2", module={"model_config": GATHER})[0]
    assert_same_run(run, single)
    test_lora_moe.assert_same_adapters(run, single)


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "layout", "changed", "message"),
    [
        ("qwen3_moe_dir", {"ep": 2}, {"moe_token_dispatcher_type": "flex"}, "='flex' is none of 'alltoall', 'allg"),
        ("qwen3_dir", {}, {}, "='allgather' does nothing: the model has no experts"),
        ("qwen3_moe_dir", {}, {}, "='allgather' with expert_model_parallel_size=1 does nothing"),
        ("qwen3_moe_dir", {"tp": 2, "ep": 2}, {}, "with expert_tensor_parallel_size=2 .by default tensor_model"),
        ("qwen3_moe_dir", {"ep": 2}, {"moe_expert_capacity_factor": 1.5}, "moe_expert_capacity_factor=1.5 was not tr"),
    ],
)
def test_refused_before_a_weight_is_read(worker_pool, request, tmp_path, model, layout, changed, message):
    """Reading this model's weights would raise another error."""
    directory = str(save_without_numbers(request.getfixturevalue(model), tmp_path / "model"))
    world_size, sp = layout.get("tp", 1) * layout.get("ep", 1), "tp" in layout
    with pytest.raises(WorkerError, match=f"ValueError: train.model_config: moe_token_dispatcher_type.*{message}"):
        worker_pool.run(build, directory, layout, {**GATHER, **changed}, sp, world_size=world_size)


def build(directory: str, layout: dict[str, int], overrides: dict[str, Any], sp: bool) -> None:
    workers.start_megatron(**layout)
    workers.build(directory, sp=sp, config_overrides=overrides)


@pytest.mark.parametrize(
    ("layout", "changed", "dispatcher"),
    [
        ({"expert_model_parallel_size": 4}, {}, "allgather"),
        ({"expert_model_parallel_size": 8}, {}, "alltoall"),  # as many ranks as experts of a token
        ({}, {}, "alltoall"),
        ({"expert_model_parallel_size": 4, "tensor_model_parallel_size": 2}, {}, "alltoall"),  # which splits experts
        (
            {
                "expert_model_parallel_size": 4,
                "tensor_model_parallel_size": 2,
                "expert_tensor_parallel_size": 1,
            },
            {},
            "allgather",
        ),
        ({"expert_model_parallel_size": 4}, {"moe_shared_expert_overlap": True}, "alltoall"),
        ({"expert_model_parallel_size": 4}, {"fp8": "hybrid"}, "alltoall"),
        ({"expert_model_parallel_size": 4}, {"num_moe_experts": None}, "alltoall"),
    ],
)
def test_the_way_that_sends_less_is_the_default(layout, changed, dispatcher):
    given = {"num_moe_experts": 128, "moe_router_topk": 8, **changed}
    assert default_dispatcher(given, ParallelLayout(**layout)) == dispatcher


@pytest.mark.parametrize(("topk", "kind"), [(3, "GatheringDispatcher"), (2, "MoEAlltoAllTokenDispatcher")])
def test_models_are_built_with_the_default(worker_pool, tmp_path, qwen3_moe_dir, topk, kind):
    """On two ranks; by itself the tiny model sends each token to two experts."""
    directory = tmp_path / "model"
    shutil.copytree(qwen3_moe_dir, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "num_experts_per_tok": topk}))
    assert worker_pool.run(dispatchers, str(directory), world_size=2) == [{kind}] * 2


def dispatchers(directory: str) -> set[str]:
    workers.start_megatron(ep=2)
    _, [chunk] = workers.build(directory)
    layers = [module for module in chunk.modules() if hasattr(module, "token_dispatcher")]
    return {type(layer.token_dispatcher).__name__ for layer in layers}


def test_refused_on_the_way_to_a_gpu():
    """What a CPU drops or refuses for another reason."""
    given = {
        "num_moe_experts": 4,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
        "tensor_model_parallel_size": 1,
    }
    check_dispatcher("allgather", {**given, "moe_shared_expert_overlap": True}, {})  # a family's default
    for name, value in (("moe_shared_expert_overlap", True), ("fp8", "hybrid"), ("moe_router_padding_for_fp8", True)):
        with pytest.raises(ValueError, match=rf"'allgather' with {name}={value!r}.* Remove one of the two"):
            check_dispatcher("allgather", {**given, name: value}, {name: value})
