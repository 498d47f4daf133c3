"""Overlapped gradient reduction and parameter gathering: the numbers of no overlap, and nobody reads stale weights."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron_rl.checkpoints.saving import Contents
from lightning_megatron_rl.data.packing import TokenSequence
from lightning_megatron_rl.models.layers.moe import MoESettings
from lightning_megatron_rl.modules.sft import SFTModule
from lightning_megatron_rl.modules.training import TrainingSettings
from lightning_megatron_rl.strategy import megatron
from tests.checkpoints.test_saving import OrderedDataModule
from tests.selection import by_default
from tests.strategy.test_megatron import assert_same_run
from tests.training import Recorder, Run, fit_sft, frozen_sequences, make_trainer

# The same sums in the same order, but for buckets: the order in which two replicas are added does not change.
SAME = 1e-6
# a bucket ends where it holds this many parameters: the output layer, with 8192, is one by itself
BUCKETS = {"overlap_grad_reduce": True, "bucket_size": 8_000}
GRADIENTS = {**BUCKETS, "overlap_param_gather": False}
BOTH = {**BUCKETS, "overlap_param_gather": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "tp2_dp2_sp": (4, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2_dp2": (4, {"pipeline_model_parallel_size": 2}),
    "pp2_vpp2_dp2": (4, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    "ep2_dp4": (4, {"expert_model_parallel_size": 2}),
}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def strategy_of(layout: str, ddp: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    from megatron.core.distributed import DistributedDataParallelConfig

    world_size, strategy = LAYOUTS[layout]
    return world_size, {**strategy, "ddp_config": DistributedDataParallelConfig(grad_reduce_in_fp32=True, **ddp)}


def fit(model: Path, layout: str, ddp: dict[str, Any], **options: Any) -> Run:
    """Four steps, the first of which Megatron does not overlap; weights are exported right after the last."""
    world_size, strategy = strategy_of(layout, ddp)
    return fit_sft(model, strategy, world_size, steps=4, batch_size=8, **options)


def on(pool: Any, model: Path, layout: str, ddp: dict[str, Any], **options: Any) -> Run:
    world_size = LAYOUTS[layout][0]
    return pool.run(fit, model, layout, ddp, world_size=world_size, init_process_group=False, **options)[0]


@pytest.mark.parametrize(
    ("layout", "ddp"),
    [
        ("dp2", GRADIENTS),
        ("dp2", BOTH),
        *(
            pytest.param(layout, ddp, marks=pytest.mark.slow)  # four processes each
            for layout, ddp in [
                ("tp2_dp2_sp", BOTH),
                ("tp2_dp2_sp", GRADIENTS),
                ("pp2_dp2", GRADIENTS),
                ("pp2_dp2", BOTH),
                ("pp2_vpp2_dp2", GRADIENTS),
                ("pp2_vpp2_dp2", BOTH),
            ]
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "both" if value == BOTH else "gradients",
)
def test_overlap_does_not_change_the_numbers(worker_pool, qwen3_dir, layout, ddp):
    """Several micro-batches. Fails without the gather before the output layer."""
    assert_same_run(on(worker_pool, qwen3_dir, layout, ddp), on(worker_pool, qwen3_dir, layout, {}), SAME)


@pytest.mark.slow
def test_overlap_of_gradients_without_sharding(worker_pool, qwen3_dir):
    worlds = {}
    for name, ddp in (("overlap", GRADIENTS), ("none", {})):
        _, strategy = strategy_of("dp2", ddp)
        worlds[name] = worker_pool.run(
            fit_sft,
            qwen3_dir,
            {**strategy, "use_distributed_optimizer": False},
            2,
            steps=4,
            world_size=2,
            init_process_group=False,
        )[0]
    assert_same_run(worlds["overlap"], worlds["none"], SAME)


@pytest.mark.slow
def test_overlap_with_recompute_and_tied_embeddings(worker_pool, qwen3_dir, tied_dir):
    """Layers whose forward runs again in backward; a weight that two stages hold."""
    module = {"model_config": RECOMPUTE}
    assert_same_run(on(worker_pool, qwen3_dir, "dp2", BOTH, module=module), on(worker_pool, qwen3_dir, "dp2", {}), SAME)
    assert_same_run(on(worker_pool, tied_dir, "pp2_dp2", BOTH), on(worker_pool, tied_dir, "pp2_dp2", {}), SAME)


class Reductions(pl.Callback):
    """Counts, by step, how often each bucket group sends its gradients."""

    def __init__(self) -> None:
        self.counts: list[list[int]] = []

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        groups = [
            group for chunk in module.model for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups
        ]
        self.sent = [0] * len(groups)
        for index, group in enumerate(groups):
            group.start_grad_sync = partial(self._start, index, group, group.start_grad_sync)

    def _start(self, index: int, group: Any, start: Any, *args: Any, **kwargs: Any) -> None:
        self.sent[index] += group.grad_reduce_handle is None  # otherwise on its way already
        start(*args, **kwargs)

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        self.counts.append(self.sent)
        self.sent = [0] * len(self.sent)


def fit_uneven_steps(model: Path, layout: str, ddp: dict[str, Any]) -> Run:
    """Four steps of one, two, one and two micro-batches on each replica (twice that under the interleaved schedule)."""
    world_size, strategy = strategy_of(layout, ddp)
    generator = torch.Generator().manual_seed(2)
    factor = 2 if "vpp2" in layout else 1
    tokens = [torch.randint(6, 100, (length,), generator=generator) for length in (40, 60, 40, 60) for _ in range(8)]
    sequences = [TokenSequence(ids, torch.arange(len(ids)) > 3, {}) for ids in tokens]
    reductions = Reductions()
    run = fit_sft(
        model,
        strategy,
        world_size,
        steps=4,
        batch_size=8,
        sequences=sequences,
        # 4 x 40 or 2 x 60 of the 4 sequences of a replica
        module={"max_tokens_per_microbatch": 160 // factor},
        callbacks=[reductions],
    )
    run.extra["counts"] = reductions.counts
    return run


@pytest.mark.parametrize("layout", by_default(["dp2"], ["dp2", "pp2_vpp2_dp2"]))
def test_gradients_leave_the_rank_once_after_the_last_micro_batch(worker_pool, qwen3_dir, layout):
    """Fails without `no_sync_func` of all chunks: Megatron would wait for as many gradients as in the first step."""
    runs = {}
    for name, ddp in (("overlap", GRADIENTS), ("none", {})):
        runs[name] = worker_pool.run(
            fit_uneven_steps, qwen3_dir, layout, ddp, world_size=LAYOUTS[layout][0], init_process_group=False
        )[0]
    assert_same_run(runs["overlap"], runs["none"], SAME)
    counts = runs["overlap"].extra["counts"]
    assert len(counts) == 4
    assert len(counts[0]) > 1
    assert all(count == 1 for step in counts for count in step), counts


@pytest.mark.slow
def test_overlap_with_experts(worker_pool, qwen3_moe_dir):
    """Two of the four replicas share each expert, whose gradients and weights travel in groups of their own."""
    runs = [
        on(
            worker_pool,
            qwen3_moe_dir,
            "ep2_dp4",
            ddp,
            module={"moe": MoESettings(z_loss_coeff=0.1, aux_loss_coeff=0.1)},
        )
        for ddp in (BOTH, {})
    ]
    assert_same_run(*runs, SAME)


class Readers(pl.Callback):
    """Reads the weights right after each step, in the ways of weight sync and of export; notes what differs by rank."""

    def __init__(self, force: bool) -> None:
        self.force = force  # whether the module may gather first
        self.exports: list[dict[str, torch.Tensor]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if not self.force:
            trainer.strategy.gather_parameters = lambda: None
        self.exports.append({name: weight.clone() for name, weight in module.export_weights()})


def fit_with_readers(model: Path, directory: Path, ddp: dict[str, Any], force: bool) -> dict[str, Any]:
    """Evaluate between steps, read weights and save right after each; then resume from the save."""
    from megatron.core.optimizer import OptimizerConfig

    world_size, strategy = strategy_of("dp2", ddp)

    def run(steps: int, ckpt_path: str | None = None) -> tuple[Recorder, Readers]:
        recorder, readers = Recorder(), Readers(force)
        keeper = ModelCheckpoint(directory, "{step}", every_n_train_steps=1, save_top_k=-1)
        trainer = make_trainer(
            strategy,
            world_size,
            max_steps=steps,
            val_check_interval=1,
            check_val_every_n_epoch=None,
            enable_checkpointing=True,
            callbacks=[readers, keeper, recorder],
        )
        policy = SFTModule(
            str(model),
            train=TrainingSettings(optimizer=OptimizerConfig(lr=1e-2, adam_eps=1e-3), max_tokens_per_microbatch=64),
        )
        data = frozen_sequences(24)
        if ckpt_path:  # this loader starts from its beginning
            data = data[16:] + data[:16]
        trainer.fit(policy, OrderedDataModule(data, 8), ckpt_path=ckpt_path)
        return recorder, readers

    recorder, readers = run(3)
    resumed, _ = run(3, str(directory / "step=2.ckpt"))
    return {"exports": readers.exports, "steps": recorder.steps, "resumed": resumed.steps}


@pytest.mark.slow
def test_readers_between_steps_see_the_gathered_weights(worker_pool, qwen3_dir, tmp_path):
    """Validation, weight sync and a checkpoint right after the step: each as without overlap, on each rank."""
    found = {}
    for name, ddp in (("overlap", BOTH), ("none", {})):
        directory = tmp_path / name
        found[name] = worker_pool.run(
            fit_with_readers, qwen3_dir, directory, ddp, True, world_size=2, init_process_group=False
        )
    for rank in range(2):
        mine, theirs = found["overlap"][rank], found["none"][rank]
        for ours, reference in zip(mine["exports"], theirs["exports"], strict=True):
            for name, weight in reference.items():
                torch.testing.assert_close(ours[name], weight, rtol=SAME, atol=1e-7)
        for part in ("steps", "resumed"):
            for ours, reference in zip(mine[part], theirs[part], strict=True):
                for name in ("policy/loss", "policy/grad_norm", "val/loss"):
                    assert ours[name] == pytest.approx(reference[name], rel=SAME), (part, name)
    assert len(found["overlap"][0]["resumed"]) == 1


@pytest.mark.slow
def test_the_gather_is_pending_after_a_step(worker_pool, qwen3_dir, tmp_path):
    """What the tests above guard: without the gather each rank reads its own shard's new values, and old ones."""
    ranks = worker_pool.run(fit_with_readers, qwen3_dir, tmp_path, BOTH, False, world_size=2, init_process_group=False)
    first, second = (rank["exports"][0] for rank in ranks)
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_saving_gathers(monkeypatch):
    """The state dict of a checkpoint is taken after the gather."""
    calls = []
    chunks = torch.nn.ModuleList([torch.nn.Linear(1, 1)])
    monkeypatch.setattr(megatron, "gather_parameters", lambda chunks: calls.append(chunks))
    monkeypatch.setattr(Contents, "weights", lambda contents: calls.append("state") or {})
    module = pl.LightningModule()
    module.model = chunks
    strategy = megatron.MegatronStrategy()
    strategy.connect(module)
    strategy.checkpoints.is_set_up = True
    monkeypatch.setattr(megatron.MegatronStrategy, "trainer", SimpleNamespace(lightning_module=module))
    strategy.lightning_module_state_dict()
    assert calls == [[*chunks], "state"]
