"""Training mixtures of experts: router losses and replayed routing, in every layout; see also test_expert_bias."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_megatron_rl.data.packing import TokenSequence
from lightning_megatron_rl.models.layers.moe import MoESettings
from tests.distributed import WorkerError
from tests.modules.runs import fit_grpo
from tests.selection import by_default
from tests.strategy.test_megatron import RELATIVE, assert_same_run
from tests.tiny_models import SPECIAL_TOKENS, VOCAB_SIZE
from tests.training import Run, fit_sft

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "dp2": (2, {}),
    "ep2": (2, {"expert_model_parallel_size": 2}),
    "tp2_sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "cp2": (2, {"context_parallel_size": 2}),
    "pp2_vpp2": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    "tp2_sp_pp2": (
        4,
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True},
    ),
    "ep2_cp2": (4, {"expert_model_parallel_size": 2, "context_parallel_size": 2}),  # experts over DP ranks
    "cp2_ep2": (2, {"expert_model_parallel_size": 2, "context_parallel_size": 2}),  # and over CP ranks
    "pp2_ep2": (4, {"expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    # expert tensor parallelism is that of the dense layers, unless it is given: tp2_sp above splits each expert
    "tp2_sp_etp1": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 1}),
    "tp2_sp_ep2_etp1": (
        2,
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
        },
    ),
    "tp2_sp_ep2": (4, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 2}),
}
BOTH_LOSSES = MoESettings(aux_loss_coeff=0.3, z_loss_coeff=0.1)
MOE_METRICS = ("moe/aux_loss", "moe/load_imbalance")


def long_sequences(count: int) -> list[TokenSequence]:
    """Ragged sequences of 21 to 40 tokens: with 40 per micro-batch, each is a micro-batch of its own in all layouts."""
    generator = torch.Generator().manual_seed(5)
    sequences = []
    for _ in range(count):
        length = int(torch.randint(21, 41, (), generator=generator))
        token_ids = torch.randint(len(SPECIAL_TOKENS), VOCAB_SIZE, (length,), generator=generator)
        sequences.append(TokenSequence(token_ids, torch.arange(length) >= length // 2, {}))
    return sequences


def sft(
    pool: Any,
    model: Any,
    layout: str = "single",
    batch_size: int = 4,
    steps: int = 2,
    fit: Any = fit_sft,
    **module: Any,
) -> list[Any]:
    world_size, strategy = LAYOUTS[layout]
    return pool.run(
        fit,
        model,
        strategy,
        world_size,
        steps=steps,
        batch_size=batch_size,
        module={"max_tokens_per_microbatch": 40, **module},
        sequences=long_sequences(steps * batch_size),
        world_size=world_size,
        init_process_group=False,
    )


def grpo(pool: Any, model: Any, layout: str = "single", **options: Any) -> list[Run]:
    world_size, strategy = LAYOUTS[layout]
    return pool.run(fit_grpo, model, strategy, world_size, world_size=world_size, init_process_group=False, **options)


@pytest.fixture(scope="module")
def reference(worker_pool, qwen3_moe_dir) -> Run:
    return sft(worker_pool, qwen3_moe_dir, moe=BOTH_LOSSES)[0]


@pytest.mark.parametrize("layout", by_default(["ep2", "tp2_sp"], [name for name in LAYOUTS if name != "single"]))
def test_router_losses_do_not_see_the_layout(worker_pool, qwen3_moe_dir, reference, layout):
    """Fails with Megatron's own losses: they count padding, and weigh with positions over target tokens."""
    runs = sft(worker_pool, qwen3_moe_dir, layout, moe=BOTH_LOSSES)
    assert_same_run(runs[0], reference)
    for mine, theirs in zip(runs[0].steps, reference.steps, strict=True):
        for name in MOE_METRICS:
            assert mine[name] == pytest.approx(theirs[name], rel=RELATIVE), name
    for run in runs[1:]:
        assert [step["moe/aux_loss"] for step in run.steps] == [step["moe/aux_loss"] for step in runs[0].steps]


def test_micro_batch_of_padding_has_no_router_loss(worker_pool, qwen3_moe_dir):
    """The interleaved schedule makes four micro-batches of three sequences; the empty one adds nothing, and no 0/0."""
    single, split = (
        sft(worker_pool, qwen3_moe_dir, layout, batch_size=3, steps=1, moe=BOTH_LOSSES)[0]
        for layout in ("single", "pp2_vpp2")
    )
    assert_same_run(split, single)


@pytest.mark.parametrize("module", [{"max_tokens_per_microbatch": 90}, {"packing": False}], ids=["packed", "padded"])
def test_z_loss_does_not_see_the_division_into_micro_batches(worker_pool, qwen3_moe_dir, module):
    """It is a sum over tokens; the balance loss is not linear in the micro-batch, so the two runs differ in it."""
    moe = MoESettings(aux_loss_coeff=0.0, z_loss_coeff=0.1)
    whole, split = (sft(worker_pool, qwen3_moe_dir, moe=moe, **options)[0] for options in ({}, module))
    assert_same_run(split, whole)
    for mine, theirs in zip(split.steps, whole.steps, strict=True):
        assert mine["moe/aux_loss"] == pytest.approx(theirs["moe/aux_loss"], rel=RELATIVE)  # of the mini-batch


def test_gradient_is_that_of_the_definition(qwen3_moe_dir, reference):
    """Mean token loss, plus the two router losses as `models.routers` defines them, by Transformers and autograd."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(qwen3_moe_dir, dtype=torch.float32)
    sequences = long_sequences(8)[:4]
    tokens, targets = sum(map(len, sequences)), sum(int(sequence.loss_mask.sum()) for sequence in sequences)
    objective = torch.zeros(())
    for sequence in sequences:
        output = model(sequence.token_ids[None], output_router_logits=True)
        chosen = output.logits[0, :-1].log_softmax(-1).gather(-1, sequence.token_ids[1:, None])[:, 0]
        objective = objective - (chosen * sequence.loss_mask[1:]).sum() / targets
        for logits in output.router_logits:  # of each layer, [tokens, experts]; every sequence is a micro-batch
            counts = torch.zeros_like(logits).scatter(1, logits.topk(2).indices, 1.0).sum(0)
            balance = 4 * (counts / (2 * len(sequence)) * logits.softmax(-1).mean(0)).sum()
            objective = objective + 0.3 * len(sequence) / tokens * balance
            objective = objective + 0.1 * logits.logsumexp(-1).square().sum() / tokens
    objective.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert reference.steps[0]["policy/grad_norm"] == pytest.approx(norm.item(), rel=RELATIVE)


class Scaled(pl.Callback):
    """Scales losses by 8 as Megatron's scaler for fp16 does, and nobody divides."""

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        module.routers.config.grad_scale_func = lambda loss: 8 * loss


def test_router_losses_follow_the_loss_scale(worker_pool, qwen3_moe_dir, reference):
    """Of fp16: a power of two, so that the norm is exactly 8 times as large."""
    module = {"max_tokens_per_microbatch": 40, "moe": BOTH_LOSSES}
    options = {"steps": 1, "module": module, "sequences": long_sequences(8)[:4], "callbacks": [Scaled()]}
    run = worker_pool.run(fit_sft, qwen3_moe_dir, {}, 1, **options, world_size=1, init_process_group=False)[0]
    assert run.steps[0]["policy/grad_norm"] == 8 * reference.steps[0]["policy/grad_norm"]


class MegatronsOwnLosses(pl.Callback):
    """Turns on Megatron's router losses, as a model's config would."""

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        module.routers.config.moe_aux_loss_coeff = 0.3
        module.routers.config.moe_z_loss_coeff = 0.1
        for router in module.routers.routers:
            router.routing_type = "aux_loss"


def test_megatrons_own_losses_weigh_with_positions_over_targets(worker_pool, qwen3_moe_dir, reference):
    """Trap 4: their gradient is another one already in one process, since half of the tokens are no targets."""
    off = MoESettings(aux_loss_coeff=0.0)
    run = worker_pool.run(
        fit_sft,
        qwen3_moe_dir,
        {},
        1,
        steps=1,
        module={"max_tokens_per_microbatch": 40, "moe": off},
        sequences=long_sequences(4),
        callbacks=[MegatronsOwnLosses()],
        world_size=1,
        init_process_group=False,
    )[0]
    plain = sft(worker_pool, qwen3_moe_dir, steps=1, moe=off)[0]
    norms = [other.steps[0]["policy/grad_norm"] for other in (run, plain)]
    assert norms[0] != pytest.approx(norms[1], rel=100 * RELATIVE), "the losses are on"
    assert norms[0] != pytest.approx(reference.steps[0]["policy/grad_norm"], rel=100 * RELATIVE)


def first_gradient_norm(model: Any, inherit: bool) -> float:
    """Of a GRPO step, with router settings of ours or with those that Megatron-Bridge gives the family."""
    from lightning_megatron_rl.modules.grpo import GRPOModule

    class Inheriting(GRPOModule):
        def build_chunks(self) -> list[Any]:
            in_force, self.moe_in_force = self.moe_in_force, None
            chunks = super().build_chunks()
            self.moe_in_force = in_force
            assert chunks[0].config.moe_aux_loss_coeff > 0
            return chunks

    run = fit_grpo(model, {}, 1, steps=1, make_module=Inheriting if inherit else GRPOModule)
    return run.steps[0]["policy/grad_norm"]


def test_rl_has_no_router_loss_that_nobody_asked_for(worker_pool, qwen3_moe_dir):
    """Trap 4: Megatron-Bridge turns an auxiliary loss on for this family; fails when it stays on."""
    ours, inherited = (
        worker_pool.run(first_gradient_norm, qwen3_moe_dir, inherit, world_size=1, init_process_group=False)[0]
        for inherit in (False, True)
    )
    assert inherited != pytest.approx(ours, rel=10 * RELATIVE)


# ---- replay ---------------------------------------------------------------------------------------------------------

R2 = MoESettings(router_replay="R2")


def assert_same_rollouts(run: Run, reference: Run, relative: float = RELATIVE) -> None:
    """Everything but times agrees in each step, and the final weights."""
    for mine, theirs in zip(run.steps, reference.steps, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            if not name.startswith(("time/", "perf/")):
                # KL and loss of a first update cancel to nearly nothing: compare those on the scale of a log-prob
                assert mine[name] == pytest.approx(value, rel=relative, abs=1e-6), name
    for name, weight in reference.weights.items():
        error = (run.weights[name] - weight).norm() / weight.norm()
        assert error <= relative, f"{name}: {error:.1e}"


@pytest.fixture(scope="module")
def replayed(worker_pool, qwen3_moe_dir) -> Run:
    return grpo(worker_pool, qwen3_moe_dir, module={"moe": R2})[0]


def test_replay_changes_nothing_when_nothing_changed(worker_pool, qwen3_moe_dir):
    """One update per rollout has the weights of the old log-probs; sums over a token's experts may change order."""
    with_replay, without = (
        grpo(worker_pool, qwen3_moe_dir, module={"updates_per_rollout": 1, "moe": moe})[0] for moe in (R2, None)
    )
    for step in with_replay.steps:
        assert step.pop("time/old_logp_s") > 0  # the pass whose routing is replayed
        assert step["policy/kl_old"] < 1e-8
    assert_same_rollouts(with_replay, without, relative=1e-6)


def test_second_update_replays_what_it_would_not_choose(replayed, worker_pool, qwen3_moe_dir):
    """The weights have moved; fails when the update ignores the routing."""
    free = grpo(worker_pool, qwen3_moe_dir)[0]
    assert free.steps[1]["moe/load_imbalance"] != replayed.steps[1]["moe/load_imbalance"]
    assert free.steps[1]["policy/grad_norm"] != pytest.approx(replayed.steps[1]["policy/grad_norm"], rel=RELATIVE)


@pytest.mark.parametrize(
    "layout", by_default(["ep2", "tp2_sp"], ["dp2", "ep2", "tp2_sp", "pp2", "cp2", "pp2_vpp2", "ep2_cp2"])
)
def test_replay_does_not_see_the_layout(worker_pool, qwen3_moe_dir, replayed, layout):
    runs = grpo(worker_pool, qwen3_moe_dir, layout, module={"moe": R2})
    assert_same_rollouts(runs[0], replayed)
    for run in runs:
        assert run.steps == runs[0].steps, "a rank logged something else"


def test_replay_in_padded_micro_batches(worker_pool, qwen3_moe_dir, replayed):
    """Routers see positions first and rows second."""
    assert_same_rollouts(grpo(worker_pool, qwen3_moe_dir, module={"moe": R2, "packing": False})[0], replayed)


@pytest.mark.slow
def test_replay_with_a_stage_of_dense_layers(worker_pool, deepseek_dir):
    single, split = (grpo(worker_pool, deepseek_dir, name, module={"moe": R2})[0] for name in ("single", "pp2"))
    assert_same_rollouts(split, single)


FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MOE_RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


@pytest.mark.parametrize("layout", by_default(["pp2_vpp2"], ["single", "pp2", "pp2_vpp2"]))
@pytest.mark.parametrize(
    "model_config",
    [FULL_RECOMPUTE, pytest.param(MOE_RECOMPUTE, marks=pytest.mark.slow)],
    ids=["full", "moe"],
)
def test_replay_with_recomputation(worker_pool, qwen3_moe_dir, replayed, layout, model_config):
    """Trap 16: in the pipeline, micro-batches are entered between a forward pass and its recomputation."""
    run = grpo(worker_pool, qwen3_moe_dir, layout, module={"moe": R2, "model_config": model_config})[0]
    assert_same_rollouts(run, replayed)


def replaying_others(model: Any, strategy: dict[str, Any], world_size: int, **options: Any) -> Run:
    """A run whose recomputation takes the micro-batch that was entered last: one cursor for both directions."""
    from lightning_megatron_rl.models.layers.routers import RouterHooks

    usual = RouterHooks._find_rows
    RouterHooks._find_rows = lambda self, current, layer, router: current.rows
    try:
        return fit_grpo(model, strategy, world_size, **options)
    finally:
        RouterHooks._find_rows = usual


@pytest.mark.slow
def test_recomputation_with_one_cursor_would_replay_another_micro_batch(worker_pool, qwen3_moe_dir, replayed):
    """Trap 16; under the interleaved schedule all micro-batches have one shape, so that it would go unnoticed."""
    world_size, strategy = LAYOUTS["pp2_vpp2"]
    run = worker_pool.run(
        replaying_others,
        qwen3_moe_dir,
        strategy,
        world_size,
        module={"moe": R2, "model_config": FULL_RECOMPUTE},
        world_size=world_size,
        init_process_group=False,
    )[0]
    assert run.steps[1]["policy/grad_norm"] != pytest.approx(replayed.steps[1]["policy/grad_norm"], rel=100 * RELATIVE)


def with_given_routing(model: Any, strategy: dict[str, Any], world_size: int, **module: Any) -> Run:
    """A run whose tokens all go to experts 0 and 1, as somebody else's record says."""
    from lightning_megatron_rl.modules.grpo import GRPOModule

    class Given(GRPOModule):
        def rollout(self, prompts: Any) -> Any:
            rollout = super().rollout(prompts)
            choice = torch.tensor([0, 1]).expand(4, 2)  # [expert layers of the model, topk]
            for sequence in rollout.sequences:
                sequence.routing = self.routers.stage_routing(choice.expand(len(sequence), 4, 2))
            old = [sequence.fields["old_logprobs"] for sequence in rollout.sequences]
            scores = self.score(rollout.sequences, routing="replay")
            self.change = max(
                (mine - theirs).abs().max().item() for mine, theirs in zip(scores.logprobs, old, strict=True)
            )
            return rollout

        def forward_backward(self, rollout: Any) -> Any:
            self.log("change", self.change)
            return super().forward_backward(rollout)

    return fit_grpo(model, strategy, world_size, steps=1, make_module=Given, module={"moe": R2, **module})


@pytest.mark.parametrize("layout", by_default(["pp2"], ["single", "pp2"]))
def test_routing_of_somebody_else_is_replayed(worker_pool, qwen3_moe_dir, layout):
    """Two of four experts get all tokens: exactly twice the mean load."""
    world_size, strategy = LAYOUTS[layout]
    run = worker_pool.run(
        with_given_routing, qwen3_moe_dir, strategy, world_size, world_size=world_size, init_process_group=False
    )[0]
    assert run.steps[0]["moe/load_imbalance"] == 2.0
    assert run.steps[0]["change"] > 1e-3, "the scoring pass replays it as well"


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ({"moe": R2, "model_config": {"moe_router_fusion": True}}, "fused top-k"),
        ({"model_config": {"moe_aux_loss_coeff": 0.1}}, r"set train\.moe\.aux_loss_coeff"),
        ({"moe": MoESettings(expert_bias_update_rate=1e-3)}, "no expert bias"),
    ],
    ids=["fused", "model_config", "no bias"],
)
def test_refused_settings_end_the_run_before_it_starts(worker_pool, qwen3_moe_dir, module, message):
    with pytest.raises(WorkerError, match=message):
        grpo(worker_pool, qwen3_moe_dir, module=module)
