"""A plan holds what a run holds at its start: what fits here is not refused there, and the other way round."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from lightning_megatron_rl.data.preference import PreferenceDataModule
from lightning_megatron_rl.data.sft import SFTDataModule
from lightning_megatron_rl.modules.planning import Lengths, describe_work
from lightning_megatron_rl.parallel.layout import ParallelLayout
from lightning_megatron_rl.plan.config import FromConfig
from lightning_megatron_rl.planner.budget import MARGIN, choose
from lightning_megatron_rl.planner.divisibility import PipelineSplit
from lightning_megatron_rl.planner.hardware import GIB, HARDWARE
from lightning_megatron_rl.planner.moments import ACTIVATIONS
from lightning_megatron_rl.planner.report import as_text
from lightning_megatron_rl.planner.run import Run
from lightning_megatron_rl.planner.scaling import grown
from lightning_megatron_rl.planner.search import Candidate, search
from lightning_megatron_rl.planner.timing import DISK_BYTES_PER_S
from tests.command_line import ROOT

RECIPES = ROOT / "configs" / "recipes" / "qwen3-8b"
AWAKE = ("--model.engine.sleep_level=0", "--trainer.strategy.offload_while_sampling=null")


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Lightning sets variables when it is imported."""
    with patch.dict(os.environ):
        yield


def describe(name: str, *arguments: str, devices: int | None = None, nodes: int | None = None) -> Run:
    built = FromConfig(["--config", str(RECIPES / f"{name}.yaml"), *arguments])
    return built.describe(HARDWARE["h100"], devices=devices, nodes=nodes, lengths=Lengths())


@pytest.fixture(scope="module")
def grpo() -> Run:
    return describe("grpo", "--model.train.max_tokens_per_microbatch=8192", "--model.train.recompute=none")


def layout(tensor: int, pipeline: int) -> ParallelLayout:
    return ParallelLayout(
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline, sequence_parallel=tensor > 1
    )


def in_process(run: Run, tensor: int, *, layout: ParallelLayout) -> Run:
    """The run with a sampler in the trainer's processes."""
    assert run.sampling is not None
    needs = replace(run.sampling.needs, own_process=False, tensor_parallel_size=tensor, kv_cache_memory_gb=10.0)
    return replace(run, layout=layout, sampling=replace(run.sampling, needs=needs, sleeps=True))


def test_a_sampler_in_the_trainers_processes_has_a_worker_on_each_rank_of_a_replica(grpo: Run):
    """The start refuses anything else, and so does a plan; a search proposes nothing else."""
    in_process(grpo, 2, layout=layout(2, 1)).check()
    with pytest.raises(ValueError, match=r"engine.tensor_parallel_size=1 in .* = 2 rank\(s\).*: set it to 2, or use"):
        in_process(grpo, 1, layout=layout(2, 1)).check()
    with pytest.raises(ValueError, match="pipeline_model_parallel_size=2 and 4 replicas, whose ranks are not"):
        in_process(grpo, 2, layout=layout(1, 2)).check()
    found = search(in_process(grpo, 2, layout=layout(2, 1)))
    for candidate in found:
        engine = candidate.overlay(8)["model"]["init_args"]["engine"]
        assert engine["class_path"] == "ColocatedVLLMEngine"
        assert engine["init_args"]["tensor_parallel_size"] == candidate.run.layout.model_parallel_size
    assert search(grpo)[0].overlay(8)["model"]["init_args"]["engine"]["class_path"] == "VLLMEngine"


def test_engines_with_gpus_of_their_own_leave_the_trainers_theirs():
    own = ("--trainer.devices=4", "--model.engine.devices=[4,5]", "--model.engine.tensor_parallel_size=2", *AWAKE)
    tensor = ("--trainer.strategy.tensor_model_parallel_size=4", "--model.train.max_tokens_per_microbatch=8192")
    run = describe("grpo", *own, *tensor)
    (plan,) = (plan for _, plan in run.stages())
    assert plan.sampler == ()
    alone = run.samplers_alone()
    assert alone is not None
    assert alone.trainer == ()
    assert run.memory().needed == max(alone.needed, plan.needed)
    assert run.fits
    assert "samplers have GPUs without a trainer: 68.3 of 78.6 GiB" in as_text(run)
    assert run.samplers_alone() is not None
    two = replace(run, layout=layout(2, 1))  # the engine of each replica on the same GPUs
    assert two.engines_on_gpu == 2
    assert not two.fits


@pytest.mark.parametrize(
    ("tensor", "pipeline", "engine", "own_process", "per_stage"),
    [(2, 1, 2, True, [1]), (1, 1, 2, True, [2]), (1, 4, 4, True, [1, 1, 1, 1]), (2, 2, 4, False, [1, 1])],
)
def test_engines_are_on_the_gpus_of_every_stage_that_they_reach(
    grpo: Run, tensor: int, pipeline: int, engine: int, own_process: bool, per_stage: list[int]
):
    assert grpo.sampling is not None
    needs = replace(grpo.sampling.needs, tensor_parallel_size=engine, own_process=own_process)
    run = replace(
        grpo, world=4, layout=layout(tensor, pipeline), sampling=replace(grpo.sampling, needs=needs, sleeps=False)
    )
    assert [run._engines_on_stage(stage) for stage in range(pipeline)] == per_stage
    assert run.engines_on_gpu == max(per_stage)
    assert all(plan.sampler for _, plan in run.stages())


def test_memory_is_for_sequences_as_long_as_they_may_be():
    """Two sequences of up to 16,384 tokens on each replica are one micro-batch, whatever their mean is."""
    given = ("--data.batch_size=8", "--model.train.max_tokens_per_microbatch=32768", "--model.train.recompute=none")
    run = describe("sft", "--data.max_length=16384", *given)
    assert run.work.tokens == 1024
    assert run.full_microbatch == 32_768
    assert not run.fits
    assert describe("sft", "--data.max_length=2048", *given).full_microbatch == 4096


def test_stages_keep_no_more_micro_batches_than_there_can_be(grpo: Run):
    work = replace(grpo.work, prompts=1, sequences=4, longest=8192)
    few = replace(grpo, world=8, layout=layout(1, 8), sampling=None, work=work, microbatch_tokens=8192)
    assert few.most_microbatches == 4
    first, second = (next(few.stages())[1] for few in (few, replace(few, work=replace(work, sequences=8))))
    assert first.needed < second.needed


def test_last_of_stages_in_chunks_is_ahead_of_its_backward_passes(grpo: Run):
    """Two stages, two chunks each: the last computes three chunks before the first backward pass, one and a half."""
    work = replace(grpo.work, longest=8192)
    whole = replace(grpo, world=2, layout=layout(1, 2), sampling=None, work=work, size=replace(grpo.size, vocabulary=1))
    cut = replace(whole, layout=replace(whole.layout, virtual_pipeline_model_parallel_size=2))
    found = []
    for run in (whole, cut):
        *_, (stage, plan) = run.stages()
        assert stage == 1
        found.append(next(part.size for part in plan.trainer if part.name == ACTIVATIONS))
    assert found[1] == pytest.approx(1.5 * found[0], rel=1e-3)


def test_checkpoint_has_weights_and_optimizer_state_once(grpo: Run):
    """14 bytes per parameter, 16 in fp32 (docs/checkpoints.md), whatever the replicas; of adapters their own."""
    whole = grpo.size.parameters * 14 / DISK_BYTES_PER_S
    assert grpo.data_parallel == 4
    assert grpo.saving().seconds == pytest.approx(whole)
    assert replace(grpo, sharded=False).saving().seconds == pytest.approx(whole)
    assert replace(grpo, world=64).saving().seconds == pytest.approx(whole / 8)  # each node writes its share
    single = describe("grpo", "--trainer.precision=32-true", "--model.train.recompute=none")
    assert single.saving().seconds == pytest.approx(whole * 16 / 14)
    adapters = describe("grpo_lora")
    assert adapters.saving().seconds == pytest.approx(adapters.adapter_parameters * 14 / DISK_BYTES_PER_S)


def test_optimizer_that_is_not_sharded_moves_all_its_state_on_each_gpu(grpo: Run):
    """Gradients are summed by an all-reduce then: sent twice, and no parameters."""

    def found(run: Run) -> tuple[float, float]:
        (sent,) = [item.size for item in run.traffic() if item.what == "gradients and parameters"]
        return dict(run._training().update().parts)["optimizer"], sent

    sharded, whole = found(grpo), found(replace(grpo, sharded=False))
    assert whole[0] == pytest.approx(sharded[0] * 4)
    assert whole[1] == pytest.approx(sharded[1] * (4 + 4) / (4 + 2))  # bytes of gradients and weights


def test_averages_of_the_weights_are_counted(grpo: Run):
    more = describe("sft", "--trainer.callbacks+=WeightAverage", "--model.train.recompute=none")
    assert more.state.optimizer == grpo.state.optimizer + 4


def test_pairs_are_two_sequences_with_a_reference():
    data = PreferenceDataModule("pairs.jsonl", tokenizer="x", batch_size=64, max_length=512)
    for reference, scored in ((SimpleNamespace(kind="copy"), 1), (None, 0)):
        module: Any = SimpleNamespace(engine=None, reference=reference)
        work = describe_work(module, data, Lengths())
        assert (work.sequences, work.tokens, work.scored, work.batch) == (128, 512, scored, 64)
    assert grown(work, 16, 8).rows == 128


def test_batches_of_so_many_tokens_have_fewer_sequences():
    data = SFTDataModule("rows.jsonl", tokenizer="x", batch_size=512, max_tokens_per_batch=2**16)
    work = describe_work(SimpleNamespace(engine=None), data, Lengths())
    assert (work.sequences, work.batch) == (64, 512)


def test_what_auto_does_not_take_does_not_fit(grpo: Run):
    """The least takes 97 % of a GPU, and `auto` leaves 5 %."""
    trained = replace(grpo, sampling=None, offloads=())

    def chosen(memory_gib: float) -> Run:
        found = replace(trained, kind=replace(grpo.kind, memory_gib=memory_gib))
        return choose(found, tokens=True, recompute=True, least=4608)

    least = chosen(1.0).memory().needed
    for share, fits in ((0.97, False), (MARGIN, True)):
        found = chosen(least / share / GIB + 0.6001)  # the driver keeps some
        assert found.fits is fits
        assert found.memory().needed < found.memory().free
    with pytest.raises(ValueError, match="auto leaves 5% of the free memory while the trainer works"):
        chosen(least / 0.97 / GIB + 0.6).require()


def test_overlay_says_all_that_the_plan_is_for(grpo: Run):
    split = PipelineSplit(num_layers_in_last_pipeline_stage=3)
    given = {"layernorm_epsilon": 1e-5, "num_layers_in_first_pipeline_stage": 10, "recompute_granularity": "full"}
    for pipeline, wanted in ((split, {"num_layers_in_last_pipeline_stage": 3}), (PipelineSplit(), {})):
        overlay = Candidate(replace(grpo, pipeline_split=pipeline), 1.0).overlay(8, given)
        train = overlay["model"]["init_args"]["train"]
        assert train["model_config"] == {"layernorm_epsilon": 1e-5} | wanted
        strategy = overlay["trainer"]["strategy"]["init_args"]
        assert strategy["virtual_pipeline_model_parallel_size"] is None
    kept = {"layernorm_epsilon": 1e-5}
    assert "model_config" not in Candidate(grpo, 1.0).overlay(8, kept)["model"]["init_args"]["train"]


def test_overlay_takes_the_place_of_chunks_and_uneven_stages(tmp_path: Path, grpo: Run):
    uneven = ("--model.train.model_config={num_layers_in_last_pipeline_stage: 16, layernorm_epsilon: 1e-5}",)
    chunks = [f"--trainer.strategy.{name}=2" for name in ("pipeline_model_parallel_size",)]
    chunks.append("--trainer.strategy.virtual_pipeline_model_parallel_size=2")
    built = FromConfig(["--config", str(RECIPES / "sft.yaml"), *chunks, *uneven])
    file = tmp_path / "overlay.yaml"
    one = Candidate(replace(grpo, sampling=None, layout=layout(2, 1)), 1.0)
    file.write_text(yaml.safe_dump(one.overlay(8, built.model.train_settings.model_config)))
    written = tmp_path / "config.yaml"
    base = yaml.safe_load((RECIPES / "sft.yaml").read_text())
    base["trainer"]["strategy"]["init_args"] |= {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
    }
    base["model"]["init_args"]["train"]["model_config"] = dict(built.model.train_settings.model_config)
    written.write_text(yaml.safe_dump(base))
    both = FromConfig(["--config", str(written), "--config", str(file)])
    run = both.describe(HARDWARE["h100"], devices=8, nodes=1, lengths=Lengths())
    run.check()
    assert run.layout == one.run.layout
    assert both.model.train_settings.model_config == {"layernorm_epsilon": 1e-5}


def test_nodes_have_as_many_gpus_as_the_run_uses_of_them():
    run = describe("grpo", "--model.train.max_tokens_per_microbatch=8192", devices=4, nodes=2)
    assert run.cluster.link(8)[0] == "network"
    overlay = Candidate(run, 1.0).overlay(run.kind.per_node)
    assert (overlay["trainer"]["devices"], overlay["trainer"]["num_nodes"]) == (4, 2)
    alone = describe("grpo", "--model.train.max_tokens_per_microbatch=8192", devices=4, nodes=1)
    assert alone.kind.per_node == 8
