"""`init_from`: a run begins with the weights of another run's distributed checkpoint, whatever layout that had."""

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig

from lightning_megatron_rl.models.layers.lora import LoRASettings
from lightning_megatron_rl.modules.grpo import GRPOModule
from lightning_megatron_rl.modules.ppo import PPOModule
from lightning_megatron_rl.modules.sft import SFTModule
from lightning_megatron_rl.modules.training import TrainingSettings
from tests.distributed import WorkerError
from tests.modules.runs import ReplayEngine, fit_grpo, length
from tests.strategy.test_megatron import LAYOUTS
from tests.training import Run, fit_arithmetic

STILL = {"optimizer": OptimizerConfig(lr=1e-12, weight_decay=0.0)}  # what comes out is what went in


def grpo(pool: Any, model: Path, layout: str, **kwargs: Any) -> Run:
    world_size, strategy = {**LAYOUTS, "single": (1, {})}[layout]
    return pool.run(fit_grpo, model, strategy, world_size, world_size=world_size, init_process_group=False, **kwargs)[0]


@pytest.fixture(scope="module")
def tuned(worker_pool, qwen3_dir, tmp_path_factory) -> tuple[Path, Run]:
    """A checkpoint of supervised fine-tuning on two tensor-parallel ranks, and its weights."""
    directory = tmp_path_factory.mktemp("tuned")
    world_size, strategy = LAYOUTS["tp2_sp"]
    options: dict[str, Any] = {"max_steps": 2, "checkpoints": directory, "every_n_steps": 2}
    runs = worker_pool.run(
        fit_arithmetic, qwen3_dir, strategy, world_size, world_size=world_size, init_process_group=False, **options
    )
    return directory / "step=2.ckpt", runs[0]


@pytest.mark.parametrize("layout", ["single", "pp2_vpp2"])
def test_policy_and_reference_start_from_the_checkpoint(worker_pool, qwen3_dir, tuned, layout):
    """GRPO from SFT, in another layout: not the weights of the model directory, for neither of both."""
    path, sft = tuned
    module = {"init_from": str(path), "updates_per_rollout": 1, **STILL}
    run = grpo(worker_pool, qwen3_dir, layout, steps=1, module=module)
    plain = grpo(worker_pool, qwen3_dir, "single", steps=1, module={"updates_per_rollout": 1, **STILL})
    for name, weight in sft.weights.items():
        torch.testing.assert_close(run.weights[name], weight, rtol=1e-6, atol=1e-7)
    assert any((plain.weights[name] - weight).abs().max() > 1e-4 for name, weight in sft.weights.items())
    assert run.steps[0]["policy/kl_ref"] == 0  # the reference is the policy
    assert run.steps[0]["mismatch/abs_logp_diff"] != plain.steps[0]["mismatch/abs_logp_diff"]
    assert run.extra["versions"][0] == 0  # the engine began with the directory's weights and got these


def test_checkpoints_that_cannot_be_are_refused(worker_pool, qwen3_dir, tmp_path):
    with pytest.raises(WorkerError, match=r"nothing\.ckpt does not exist"):
        grpo(worker_pool, qwen3_dir, "single", module={"init_from": str(tmp_path / "nothing.ckpt")})
    with pytest.raises(WorkerError, match="is not a checkpoint of this strategy"):
        grpo(worker_pool, qwen3_dir, "single", module={"init_from": str(qwen3_dir)})


def test_checkpoint_of_another_model_is_refused(worker_pool, tied_dir, tuned):
    with pytest.raises(WorkerError, match="is of another model"):
        grpo(worker_pool, tied_dir, "single", module={"init_from": str(tuned[0])})


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"init_from='x\.ckpt' with lora"):
        SFTModule("nothing", train=TrainingSettings(lora=LoRASettings()), init_from="x.ckpt")
    options: dict[str, Any] = {"model": "nothing", "rewards": [length], "engine": ReplayEngine(), "init_from": "x.ckpt"}
    with pytest.raises(ValueError, match=r"init_from='x\.ckpt' without critic\.model"):
        PPOModule(**options)
    assert GRPOModule(**options).init_from == "x.ckpt"
