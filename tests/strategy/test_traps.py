"""Traps of Megatron's gradients and passes: each test fails when the line it guards is taken out."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_megatron_rl.strategy.schedule import forward_backward
from tests.distributed import WorkerError
from tests.selection import by_default
from tests.strategy.test_megatron import LAYOUTS, RELATIVE
from tests.training import SequenceDataModule, fit_sft, frozen_sequences, make_trainer


class WithoutFinalGradients(pl.Callback):
    """Leaves gradients as each rank computed them, as Megatron does where nobody sets `finalize_model_grads_func`."""

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        from megatron.core.utils import get_model_config

        for chunk in module.model:
            get_model_config(chunk).finalize_model_grads_func = lambda *args, **kwargs: None


class ForgetsLastChunk(pl.Callback):
    """Puts Megatron's default back on the last chunk."""

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        from megatron.core.utils import get_model_config

        get_model_config(module.model[-1]).finalize_model_grads_func = None


def first_norms(model: Path, strategy: dict[str, Any], world_size: int) -> tuple[float, float]:
    """Gradient norm of the first step, with final gradients and without."""
    norms = []
    for callbacks in ([], [WithoutFinalGradients()]):
        run = fit_sft(model, strategy, world_size, steps=1, callbacks=callbacks)
        norms.append(run.steps[0]["policy/grad_norm"])
    return norms[0], norms[1]


@pytest.mark.parametrize(
    ("layout", "family"), [("dp2", "qwen3_dir"), ("tp2_sp", "qwen3_dir"), ("pp2", "tied_dir")], ids=lambda value: value
)
def test_gradients_that_never_leave_their_rank_show_in_the_norm(worker_pool, request, layout, family):
    """Without `finalize_model_grads` the layout's gradient is not that of one process; with it, it is.

    A single process lacks only the division by the number of tokens then, so what differs is the missing reduction.
    """
    model = request.getfixturevalue(family)
    world_size, strategy = LAYOUTS[layout]
    options = {"init_process_group": False}
    single = worker_pool.run(first_norms, model, {}, 1, world_size=1, **options)[0]
    split = worker_pool.run(first_norms, model, strategy, world_size, world_size=world_size, **options)[0]
    assert split[0] == pytest.approx(single[0], rel=RELATIVE)
    assert split[1] != pytest.approx(single[1], rel=100 * RELATIVE)


def test_missing_finalize_function_stops_the_run(worker_pool, qwen3_dir):
    """Fails without the assertion in the schedule: the run would go on with other gradients."""
    with pytest.raises(WorkerError, match="AssertionError") as caught:
        worker_pool.run(
            fit_sft, qwen3_dir, {}, 1, callbacks=[ForgetsLastChunk()], world_size=1, init_process_group=False
        )
    assert "finalize_model_grads_func is not None" in str(caught.value)


def set_up(model: Path, strategy: dict[str, Any], world_size: int, sharded_in_ddp_config: bool) -> dict[str, Any]:
    """Set a fit up without a step, and return what the strategy made of it on this rank."""
    from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.utils import get_model_config

    from lightning_megatron_rl.modules.sft import SFTModule
    from lightning_megatron_rl.modules.training import TrainingSettings

    policy = SFTModule(
        str(model),
        # flags of the user's that contradict each other, and perhaps the strategy
        train=TrainingSettings(optimizer=OptimizerConfig(lr=1e-3, use_distributed_optimizer=not sharded_in_ddp_config)),
    )
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=sharded_in_ddp_config, check_for_nan_in_grad=True
    )
    trainer = make_trainer({**strategy, "ddp_config": ddp_config}, world_size, max_steps=0)
    trainer.fit(policy, SequenceDataModule(frozen_sequences(4), 4))
    configs = [get_model_config(chunk) for chunk in policy.model]
    optimizer = trainer.strategy.optimizers[0]
    return {
        "chunks": len(configs),
        "final": [config.finalize_model_grads_func is finalize_model_grads for config in configs],
        "ddp_flags": [chunk.ddp_config.use_distributed_optimizer for chunk in policy.model],
        "optimizer_flag": optimizer.megatron.config.use_distributed_optimizer,
        "kept": all(chunk.ddp_config.check_for_nan_in_grad for chunk in policy.model),
        "dropout": {value for config in configs for value in (config.hidden_dropout, config.attention_dropout)},
        "megatron_default_dropout": TransformerConfig.hidden_dropout,
        "sampler": trainer.distributed_sampler_kwargs,
    }


def test_every_chunk_of_a_virtual_pipeline_is_set(worker_pool, qwen3_dir):
    """Fails when only the first chunk's config gets `finalize_model_grads_func`."""
    strategy = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    for facts in worker_pool.run(set_up, qwen3_dir, strategy, 2, False, world_size=2, init_process_group=False):
        assert facts["chunks"] == 2
        assert facts["final"] == [True, True]
        assert facts["sampler"] == {"num_replicas": 1, "rank": 0}


@pytest.mark.parametrize("sharded", [True, False])
def test_flags_of_the_distributed_optimizer_agree(worker_pool, qwen3_dir, sharded):
    """Fails when the user's `ddp_config` is taken as it is: gradients would be reduced one way and read another."""
    strategy = {"use_distributed_optimizer": sharded}
    facts = worker_pool.run(set_up, qwen3_dir, strategy, 2, not sharded, world_size=2, init_process_group=False)
    for mine in facts:
        assert mine["ddp_flags"] == [sharded]
        assert mine["optimizer_flag"] is sharded
        assert mine["kept"], "the rest of the user's config is lost"
        assert mine["dropout"] == {0.0}
        assert mine["megatron_default_dropout"] > 0, "Megatron has dropout on: it must be turned off"
    assert [mine["sampler"] for mine in facts] == [{"num_replicas": 2, "rank": rank} for rank in (0, 1)]


def test_ranks_of_a_replica_read_the_same_data(worker_pool, qwen3_dir):
    """Fails with sampler arguments of the world: tensor-parallel ranks would mix activations of other prompts."""
    layout = {"tensor_model_parallel_size": 2}
    facts = worker_pool.run(set_up, qwen3_dir, layout, 4, False, world_size=4, init_process_group=False)
    assert [mine["sampler"]["rank"] for mine in facts] == [0, 0, 1, 1]
    assert {mine["sampler"]["num_replicas"] for mine in facts} == {2}


def score_with_dropout(model: Path) -> dict[str, Any]:
    """Score before and after dropout is turned on in the layers, and compute the loss of a training pass with it."""
    from lightning_megatron_rl.modules.sft import SFTModule, token_nll

    policy = SFTModule(str(model))
    trainer = make_trainer({}, 1, max_steps=0)
    sequences = frozen_sequences(4)
    trainer.fit(policy, SequenceDataModule(sequences, 4))
    policy.model.train()
    without = policy.score(sequences)
    for layer in policy.model[0].module.decoder.layers:
        layer.hidden_dropout = 0.5
    scored = policy.score(sequences)
    training = all(module.training for module in policy.model.modules())
    mask = torch.cat([sequence.loss_mask for sequence in sequences])
    return {
        "without": torch.cat(without.logprobs),
        "scored": torch.cat(scored.logprobs),
        "scored_loss": float(-torch.cat(scored.logprobs)[mask].mean()),
        "training_loss": policy.update(sequences, token_nll)["policy/loss"],
        "still_training": training,
    }


def test_score_has_no_dropout(worker_pool, qwen3_dir):
    """Fails without `.eval()` in `score`, and without the return to training mode after it."""
    found = worker_pool.run(score_with_dropout, qwen3_dir, world_size=1, init_process_group=False)[0]
    assert torch.equal(found["scored"], found["without"])
    assert found["still_training"]
    assert abs(found["training_loss"] - found["scored_loss"]) > 0.01, "dropout was off: this test shows nothing"


def update_with_idle_replicas(model: Path, strategy: dict[str, Any], world_size: int) -> dict[str, Any]:
    """Two updates on three micro-batches of one sequence each, all brought by the first replica."""
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.utils import get_model_config

    from lightning_megatron_rl.modules.sft import SFTModule, token_nll
    from lightning_megatron_rl.modules.training import TrainingSettings

    policy = SFTModule(
        str(model),
        train=TrainingSettings(optimizer=OptimizerConfig(lr=1e-3, adam_eps=1e-3), max_tokens_per_microbatch=40),
    )
    trainer = make_trainer(strategy, world_size, max_steps=0)
    sequences = frozen_sequences(8)
    trainer.fit(policy, SequenceDataModule(sequences, 8))
    calls = []
    for config in {id(config): config for config in map(get_model_config, policy.model)}.values():
        finalize = config.finalize_model_grads_func

        def counting(*args: Any, finalize: Any = finalize, **kwargs: Any) -> None:
            calls.append(1)
            finalize(*args, **kwargs)

        config.finalize_model_grads_func = counting
    brings_all = trainer.distributed_sampler_kwargs["rank"] == 0
    norms, idle = [], []
    optimizer = trainer.strategy.optimizers[0]
    for part in (sequences[:3], sequences[3:4]):
        mine = part if brings_all else []
        idle.append(not any(batch.mask.any() for batch in policy._share(mine).microbatches))
        policy.update(mine, token_nll)
        optimizer.step()
        norms.append(optimizer.grad_norm)
    return {"calls": len(calls), "norms": norms, "idle": idle}


@pytest.mark.parametrize("layout", by_default(["dp2", "pp2_vpp2"], ["dp2", "cp2_dp2", "pp2_vpp2"]))
def test_gradients_become_final_once_per_step_on_every_rank(worker_pool, qwen3_dir, layout):
    """A replica without a sequence, or with padding alone, still takes part, and exactly once.

    Fails (hangs, or a norm too large) when such a replica leaves the schedule out, or calls it per micro-batch.
    """
    world_size, strategy = LAYOUTS[layout]
    options = {"init_process_group": False, "timeout": 60.0}
    (single,) = worker_pool.run(update_with_idle_replicas, qwen3_dir, {}, 1, world_size=1, **options)
    ranks = worker_pool.run(
        update_with_idle_replicas, qwen3_dir, strategy, world_size, world_size=world_size, **options
    )
    for mine in ranks:
        assert mine["calls"] == 2
        assert mine["norms"] == pytest.approx(single["norms"], rel=RELATIVE)
    if "dp2" in layout:
        assert any(mine["idle"][1] for mine in ranks), "one sequence, two replicas"


def test_interleaved_schedule_refuses_what_its_stages_do_not_divide():
    """Megatron goes wrong or stops with an assertion; callers of `strategy.forward_backward` learn why before that."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    chunk = torch.nn.Module()
    chunk.config = TransformerConfig(  # type: ignore[assignment]
        num_layers=8, hidden_size=8, num_attention_heads=1, pipeline_model_parallel_size=4, pipeline_dtype=torch.float32
    )
    with pytest.raises(ValueError, match=r"6 micro-batches with 2 chunks on each of 4 .*multiple of 4 \(6 % 4 = 2\)"):
        forward_backward([chunk, chunk], range(6), lambda *_: None, sequence_length=8, micro_batch_size=1)  # type: ignore[arg-type, return-value]
