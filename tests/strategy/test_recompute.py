"""Activation recompute changes memory and time only: losses, gradient norms and weights are those without it."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_megatron_rl.models.layers.moe import MoESettings
from tests.distributed import WorkerError
from tests.modules.runs import fit_grpo
from tests.selection import by_default
from tests.strategy.test_megatron import assert_same_run
from tests.training import Run, fit_sft

# The same operations on the same numbers: bitwise on a CPU but for a thread's share of a sum.
SAME = 1e-6
RECOMPUTES: dict[str, dict[str, Any]] = {
    "uniform": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "uniform_2": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    "core_attn": {"recompute_granularity": "selective"},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "both": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2_sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
}


DENSE_PARTS = {"core_attn": "0.self_attention.core_attention", "mlp": "0.mlp"}


class ForwardCalls(pl.Callback):
    """Counts forward passes of parts of the layers, given as paths below them: once more for each recompute."""

    def __init__(self, parts: dict[str, str]) -> None:
        self.parts = parts
        self.calls = dict.fromkeys(parts, 0)

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        from megatron.core.utils import unwrap_model

        layers = unwrap_model(module.model[0]).decoder.layers
        for name, path in self.parts.items():
            layers.get_submodule(path).register_forward_hook(lambda *_, name=name: self._count(name))

    def _count(self, name: str) -> None:
        self.calls[name] += 1


def fit_each(model: Path, strategy: dict[str, Any], world_size: int) -> dict[str, Run]:
    """Two SFT steps, packed, several micro-batches, without recompute and with each kind."""
    runs = {}
    for name, overrides in {"none": {}, **RECOMPUTES}.items():
        counter = ForwardCalls(DENSE_PARTS)
        runs[name] = fit_sft(
            model,
            strategy,
            world_size,
            module={"model_config": overrides},
            callbacks=[counter],
            trainer={"limit_val_batches": 0},
        )
        runs[name].extra = counter.calls
    return runs


@pytest.mark.deadline(300)
@pytest.mark.parametrize("layout", by_default(["tp2_sp"], LAYOUTS))
def test_sft_is_the_same_with_every_recompute(worker_pool, qwen3_dir, layout):
    """Fails for a kind that is not recomputed at all: its forward would run once per micro-batch."""
    world_size, strategy = LAYOUTS[layout]
    ranks = worker_pool.run(
        fit_each, qwen3_dir, strategy, world_size, world_size=world_size, init_process_group=False, timeout=280
    )
    runs = ranks[0]
    once = runs["none"].extra
    for name in RECOMPUTES:
        assert_same_run(runs[name], runs["none"], SAME)
        recomputed = {"core_attn": ("core_attn",), "mlp": ("mlp",)}.get(name, ("core_attn", "mlp"))
        for part, calls in once.items():
            assert runs[name].extra[part] == calls * (2 if part in recomputed else 1), (name, part)


def fit_grpo_each(model: Path, strategy: dict[str, Any], world_size: int, names: list[str]) -> list[Run]:
    return [fit_grpo(model, strategy, world_size, module={"model_config": RECOMPUTES.get(name, {})}) for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2_sp", "pp2"])
def test_grpo_is_the_same_with_recompute(worker_pool, qwen3_dir, layout):
    """Old log-probs, clipped objective, KL and entropy; two updates per rollout."""
    world_size, strategy = LAYOUTS[layout]
    names = ["none", "uniform", "both"]
    arguments = (qwen3_dir, strategy, world_size, names)
    runs = worker_pool.run(fit_grpo_each, *arguments, world_size=world_size, init_process_group=False)[0]
    for run in runs[1:]:
        assert_same_run(run, runs[0], SAME)


def fit_with_dropout(model: Path, overrides: list[dict[str, Any]]) -> list[Run]:
    runs = []
    for override in overrides:
        pl.seed_everything(3)
        dropout = {"hidden_dropout": 0.3, "attention_dropout": 0.2}
        runs.append(fit_sft(model, {}, 1, module={"model_config": {**dropout, **override}}))
    return runs


def test_recompute_draws_the_same_dropout(worker_pool, qwen3_dir):
    """Dropout that was asked for: recomputed activations are those of the first forward, and not those without it."""
    cases = [{}, RECOMPUTES["uniform"], RECOMPUTES["core_attn"], RECOMPUTES["mlp"]]
    runs = worker_pool.run(fit_with_dropout, qwen3_dir, cases, world_size=1, init_process_group=False)[0]
    plain = worker_pool.run(fit_sft, qwen3_dir, {}, 1, world_size=1, init_process_group=False)[0]
    for run in runs[1:]:
        assert_same_run(run, runs[0], SAME)
    assert runs[0].steps[0]["policy/loss"] != pytest.approx(plain.steps[0]["policy/loss"], rel=1e-3)
    assert all(torch.isfinite(weight).all() for weight in runs[0].weights.values())


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


# what is recomputed -> its settings and the parts that then run twice
MOE_PARTS = {"core_attn": "0.self_attention.core_attention", "norm": "0.pre_mlp_layernorm", "router": "0.mlp.router"}
MOE_RECOMPUTES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "none": ({}, set()),
    "uniform": (RECOMPUTES["uniform"], {"core_attn", "norm", "router"}),
    "moe": (selective("moe"), {"router"}),
    "layernorm": (selective("layernorm"), {"norm"}),
    "all": (selective("core_attn", "layernorm", "moe"), {"core_attn", "norm", "router"}),
}
# of four layers, the first two (of one process) or one (of two stages) are dense
LATENT_PARTS = {
    "core_attn": "0.self_attention.core_attention",
    "up_proj": "0.self_attention.linear_kv_up_proj",
    "norm": "0.input_layernorm",
    "mlp": "0.mlp",
    "router": "3.mlp.router",
    "shared": "3.mlp.shared_experts",
}
LATENT_RECOMPUTES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "none": ({}, set()),
    "uniform": (RECOMPUTES["uniform"], set(LATENT_PARTS)),
    "core_attn": (selective("core_attn"), {"core_attn"}),
    "mla_up_proj": (selective("mla_up_proj"), {"up_proj"}),
    "layernorm": (selective("layernorm"), {"norm"}),
    "mlp": (selective("mlp"), {"mlp"}),
    "shared_experts": (selective("shared_experts"), {"shared"}),
    "moe": (selective("moe"), {"router", "shared"}),
    "all": (selective("core_attn", "mla_up_proj", "layernorm", "mlp", "moe"), set(LATENT_PARTS)),
}
MODELS: dict[str, tuple[dict[str, tuple[dict[str, Any], set[str]]], dict[str, str], MoESettings]] = {
    # with everything that routers do in a pass: losses of their own, and counts for their biases
    "qwen3_moe_dir": (MOE_RECOMPUTES, MOE_PARTS, MoESettings(0.3, 0.1)),
    "deepseek_dir": (LATENT_RECOMPUTES, LATENT_PARTS, MoESettings(0.3, 0.1, expert_bias_update_rate=0.01)),
}


def fit_experts_each(model: Path, strategy: dict[str, Any], world_size: int, family: str) -> dict[str, Run]:
    """A step, packed, several micro-batches, with each kind of recompute that the family has; the parts' calls."""
    recomputes, parts, moe = MODELS[family]
    runs = {}
    for name, (overrides, _) in recomputes.items():
        counter = ForwardCalls(parts if world_size == 1 else {})
        runs[name] = fit_sft(
            model,
            strategy,
            world_size,
            steps=1,
            module={"model_config": overrides, "moe": moe},
            callbacks=[counter],
            trainer={"limit_val_batches": 0},
        )
        runs[name].extra = counter.calls
    return runs


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3_moe_dir", "one"),
        pytest.param("deepseek_dir", "pp2", marks=pytest.mark.slow),
        pytest.param("deepseek_dir", "one", marks=pytest.mark.slow),
        pytest.param("deepseek_dir", "tp2_sp", marks=pytest.mark.slow),
    ],
)
def test_experts_and_latent_attention_are_the_same_with_every_recompute(worker_pool, request, family, layout):
    """Router losses and expert biases included; in the pipeline, a router's second call comes after other ones'."""
    world_size, strategy = LAYOUTS[layout]
    model = request.getfixturevalue(family)
    arguments = (model, strategy, world_size, family)
    runs = worker_pool.run(fit_experts_each, *arguments, world_size=world_size, init_process_group=False)[0]
    once = runs["none"].extra
    for name, (_, twice) in MODELS[family][0].items():
        assert_same_run(runs[name], runs["none"], SAME)
        for part, calls in once.items():
            assert runs[name].extra[part] == calls * (2 if part in twice else 1), (name, part)


@pytest.mark.parametrize(
    ("modules", "message"),
    [(["moe_act"], "'moe_act' in recompute_modules .*use 'moe'"), (["shared_experts"], "none that all tokens share")],
)
def test_what_torch_layers_do_not_recompute_is_refused(worker_pool, qwen3_moe_dir, modules, message):
    module = {"model_config": selective(*modules)}
    with pytest.raises(WorkerError, match=f"model_config: .*{message}"):
        worker_pool.run(fit_sft, qwen3_moe_dir, {}, 1, module=module, world_size=1, init_process_group=False)
