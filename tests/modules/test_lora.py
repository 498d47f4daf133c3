"""Training adapters: one number in every layout, a base left alone, small checkpoints, GRPO without a second model."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from lightning_megatron_rl.callbacks.hf_export import HFExport
from lightning_megatron_rl.data.loader import GlobalBatches, ResumableLoader
from lightning_megatron_rl.models.layers.lora import LoRASettings
from tests.distributed import WorkerError
from tests.models.lora_runs import exported_adapter
from tests.modules.runs import fit_grpo
from tests.selection import by_default
from tests.strategy.test_megatron import LAYOUTS, RELATIVE, assert_same_run
from tests.tiny_models import save_tiny_model
from tests.training import Run, SequenceDataModule, fit_sft, frozen_sequences

LORA = LoRASettings(rank=4, alpha=8)
SINGLE: tuple[int, dict[str, Any]] = (1, {})


class Adapters(Callback):
    """What is trained, and whether anything else changed."""

    def __init__(self) -> None:
        self.frozen: dict[str, Tensor] = {}
        self.found: dict[str, Any] = {}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.frozen = {n: p.detach().clone() for n, p in module.model.named_parameters() if not p.requires_grad}

    def on_train_end(self, trainer: Any, module: Any) -> None:
        now = dict(module.model.named_parameters())
        held = {id(p) for chunk in module.model for p in chunk.param_to_bucket_group}
        self.found = {
            "base unchanged": all(torch.equal(now[name], value) for name, value in self.frozen.items()),
            "frozen": sorted(self.frozen),
            "with gradient buffers": sorted(name for name, p in now.items() if id(p) in held),
            "adapter": exported_adapter(module.hf_model, list(module.model)),
        }


def fit_lora(model: Path, strategy: dict[str, Any], world_size: int, *, settings: Any = LORA, **kwargs: Any) -> Run:
    """`fit_sft` with adapters; what they are at the end is in `extra`."""
    notes = Adapters()
    callbacks = [notes, *kwargs.pop("callbacks", [])]
    module = {**kwargs.pop("module", {}), "lora": settings}
    run = fit_sft(model, strategy, world_size, module=module, callbacks=callbacks, **kwargs)
    run.extra = notes.found
    return run


def job(pool: Any, model: Path, layout: tuple[int, dict[str, Any]] = SINGLE, **kwargs: Any) -> list[Run]:
    world_size, strategy = layout
    return pool.run(fit_lora, model, strategy, world_size, world_size=world_size, init_process_group=False, **kwargs)


def grpo_job(pool: Any, model: Path, layout: tuple[int, dict[str, Any]], **kwargs: Any) -> Run:
    world_size, strategy = layout
    return pool.run(grpo, model, strategy, world_size, world_size=world_size, init_process_group=False, **kwargs)[0]


@pytest.fixture(scope="module")
def reference(worker_pool, qwen3_dir) -> Run:
    return job(worker_pool, qwen3_dir)[0]


@pytest.mark.parametrize(
    "layout",
    by_default(
        ["tp2_sp", "pp2", "dp2"],
        ["tp2", "tp2_sp", "pp2", "dp2", "dp2_plain", "tp2_dp2_sp", "tp2_pp2_sp", "cp2", "pp2_vpp2"],
    ),
)
def test_layout_gives_the_numbers_of_one_process(worker_pool, qwen3_dir, reference, layout):
    runs = job(worker_pool, qwen3_dir, LAYOUTS[layout])
    assert_same_run(runs[0], reference)
    for run in runs:
        assert run.steps == runs[0].steps, "a rank logged something else"
        assert run.extra["base unchanged"]
        for name, tensor in reference.extra["adapter"].items():
            error = (run.extra["adapter"][name] - tensor).norm() / tensor.norm()
            assert error <= RELATIVE, f"{name}: {error:.1e}"


@pytest.mark.slow
def test_tied_embeddings_on_two_stages(worker_pool, tied_dir):
    """Both copies are frozen: their gradients must not be looked for. The layers have biases, which stay as well."""
    alone = job(worker_pool, tied_dir)[0]
    assert_same_run(job(worker_pool, tied_dir, LAYOUTS["pp2"])[0], alone)


def test_only_adapters_are_trained(reference):
    assert reference.extra["base unchanged"]
    trained = reference.extra["with gradient buffers"]
    assert len(trained) == 4 * 4 * 2, "4 layers, 4 targets, A and B"
    assert all(".adapter." in name for name in trained)
    assert not any(".adapter." in name for name in reference.extra["frozen"])
    assert any("word_embeddings" in name for name in reference.extra["frozen"])


@pytest.mark.slow
def test_loss_goes_down(worker_pool, qwen3_dir):
    sequences = frozen_sequences(4) * 12
    run = job(worker_pool, qwen3_dir, steps=12, sequences=sequences, optimizer={"lr": 1e-2, "adam_eps": 1e-8})[0]
    assert run.steps[-1]["policy/loss"] < 0.7 * run.steps[0]["policy/loss"]


def test_bf16_trains_adapters_in_fp32_copies(worker_pool, qwen3_dir):
    run = job(worker_pool, qwen3_dir, LAYOUTS["tp2_sp"], trainer={"precision": "bf16-mixed"})[0]
    assert run.extra["base unchanged"]
    assert all(tensor.dtype == torch.bfloat16 for tensor in run.extra["adapter"].values())
    assert any(tensor.norm() > 0 for name, tensor in run.extra["adapter"].items() if "lora_B" in name)


# ---- checkpoints ---------------------------------------------------------------------------------------------------


class PositionedDataModule(SequenceDataModule):
    """With a loader whose position Lightning saves and restores."""

    def train_dataloader(self) -> Any:
        shard = self.trainer.distributed_sampler_kwargs
        return ResumableLoader(self.sequences, GlobalBatches(len(self.sequences), self.batch_size, **shard))


def keeper(directory: Path) -> ModelCheckpoint:
    return ModelCheckpoint(directory, "{step}", every_n_train_steps=1, save_top_k=-1)


def saving(directory: Path) -> dict[str, Any]:
    return {"callbacks": [keeper(directory)], "trainer": {"enable_checkpointing": True}}


def resuming(path: Path) -> dict[str, Any]:
    """The same run as `saved`, from its first checkpoint on; these data know where they were."""
    return {"steps": 3, "data": PositionedDataModule(frozen_sequences(12), 4), "ckpt_path": str(path)}


@pytest.fixture(scope="module")
def saved(worker_pool, qwen3_dir, tmp_path_factory) -> tuple[Path, Run]:
    """A checkpoint after step 1 of 3 under TP2, and the run that went on."""
    directory = tmp_path_factory.mktemp("saved")
    options = {**resuming(directory), **saving(directory), "ckpt_path": None}
    run = job(worker_pool, qwen3_dir, LAYOUTS["tp2_sp"], **options)[0]
    return directory / "step=1.ckpt", run


def test_checkpoint_holds_adapters_alone(saved):
    from megatron.core import dist_checkpointing

    path, run = saved
    tensors = dist_checkpointing.load_tensors_metadata(str(path / "sharded"))
    weights = {name: tensor for name, tensor in tensors.items() if not name.startswith("optimizer")}
    assert len(weights) == 4 * 2, "targets; all layers are in one tensor"
    assert all(".adapter." in name for name in tensors), list(tensors)
    numbers = sum(math.prod(tensor.global_shape) for tensor in weights.values())
    shared = sum(t.numel() for name, t in run.extra["adapter"].items() if re.search(r"\.(k|v|up)_proj\.lora_A", name))
    assert numbers == sum(tensor.numel() for tensor in run.extra["adapter"].values()) - shared
    state = sum(math.prod(tensor.global_shape) for name, tensor in tensors.items() if name.startswith("optimizer"))
    assert state == 3 * numbers, "fp32 copy and two moments"
    assert json.loads((path / "manifest.json").read_text())["trained_on_top_of"]["lora.rank"] == 4


@pytest.mark.parametrize("layout", by_default(["tp2_sp"], ["tp2_sp", "pp2", "single"]))
def test_resumed_run_is_the_uninterrupted_one(worker_pool, qwen3_dir, saved, layout):
    """Bitwise in the layout it was saved in, within rounding in others."""
    path, whole = saved
    resumed = job(worker_pool, qwen3_dir, {**LAYOUTS, "single": SINGLE}[layout], **resuming(path))[0]
    later = Run(whole.steps[1:], whole.weights)
    assert_same_run(resumed, later)
    assert resumed.extra["base unchanged"]
    if layout == "tp2_sp":
        for name, tensor in whole.extra["adapter"].items():
            assert torch.equal(resumed.extra["adapter"][name], tensor), name
        for mine, theirs in zip(resumed.steps, later.steps, strict=True):
            assert mine["policy/loss"] == theirs["policy/loss"]
            assert mine["policy/grad_norm"] == theirs["policy/grad_norm"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (LoRASettings(rank=8, alpha=8), r"lora\.rank: 4 in the checkpoint, 8 in this run"),
        (LoRASettings(rank=4, alpha=16), r"lora\.alpha: 8.* in the checkpoint, 16.* in this run"),
        (LoRASettings(rank=4, alpha=8, target_modules=["linear_qkv"]), r"lora\.target_modules: .*linear_fc1"),
        (None, r"holds adapters only, and this run trains a whole model"),
    ],
)
def test_checkpoint_of_other_adapters_is_refused(worker_pool, qwen3_dir, saved, settings, message):
    with pytest.raises(WorkerError, match=message):
        job(worker_pool, qwen3_dir, settings=settings, **resuming(saved[0]))


@pytest.mark.slow
def test_order_of_targets_seed_and_dropout_do_not_make_other_adapters(worker_pool, qwen3_dir, saved):
    settings = LoRASettings(rank=4, alpha=8, target_modules=LORA.target_modules[::-1], seed=7)
    resumed = job(worker_pool, qwen3_dir, LAYOUTS["tp2_sp"], settings=settings, **resuming(saved[0]))[0]
    for name, tensor in saved[1].extra["adapter"].items():
        assert torch.equal(resumed.extra["adapter"][name], tensor), name


def test_checkpoint_on_another_base_model_is_refused(worker_pool, saved, tmp_path):
    other = save_tiny_model(tmp_path / "other", "qwen3", seed=1)
    with pytest.raises(WorkerError, match=r"base model: \w+ in the checkpoint, \w+ in this run"):
        job(worker_pool, other, **resuming(saved[0]))


def test_checkpoint_of_a_whole_model_is_refused(worker_pool, qwen3_dir, tmp_path):
    options = {**saving(tmp_path), "steps": 1}
    job(worker_pool, qwen3_dir, settings=None, **options)
    with pytest.raises(WorkerError, match=r"holds a whole model, and this run trains adapters"):
        job(worker_pool, qwen3_dir, steps=2, ckpt_path=str(tmp_path / "step=1.ckpt"))


# ---- GRPO and exports ----------------------------------------------------------------------------------------------


class ReferenceScores(Callback):
    """Scores of the reference in the last step, of the base model built anew, and how many models there are."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def on_train_end(self, trainer: Any, module: Any) -> None:
        sequences = module.last_rollout.sequences
        settings = module.train_settings
        module.train_settings = replace(settings, lora=None)
        base = module.build_chunks()
        module.train_settings = settings
        self.found = {
            "copies": module.reference.chunks,
            "reference": [sequence.fields["ref_logprobs"] for sequence in sequences],
            "base": module.score(sequences, base).logprobs,
            "policy": module.score(sequences).logprobs,
        }


def grpo(model: Path, strategy: dict[str, Any], world_size: int, **kwargs: Any) -> Run:
    """`fit_grpo` with adapters; what the reference scored is in `extra`."""
    notes = ReferenceScores()
    callbacks = [notes, *kwargs.pop("callbacks", [])]
    module = {"lora": LORA, **kwargs.pop("module", {})}
    run = fit_grpo(model, strategy, world_size, module=module, callbacks=callbacks, **kwargs)
    run.extra |= notes.found
    return run


@pytest.mark.parametrize("layout", by_default(["single"], ["single", "tp2_sp", "pp2", "dp2"]))
def test_reference_is_the_policy_without_adapters(worker_pool, qwen3_dir, layout):
    run = grpo_job(worker_pool, qwen3_dir, {**LAYOUTS, "single": SINGLE}[layout], steps=3)
    assert run.extra["copies"] is None, "a second model was built"
    for reference, base, policy in zip(run.extra["reference"], run.extra["base"], run.extra["policy"], strict=True):
        assert torch.equal(reference, base)
        assert not torch.equal(reference, policy)
    assert run.extra["versions"] == [0, 1, 2, 3]


def test_engine_gets_merged_weights_under_the_model_s_names(worker_pool, qwen3_dir):
    run = grpo_job(worker_pool, qwen3_dir, LAYOUTS["tp2"], steps=1)
    assert run.extra["names"] == set(load_file(qwen3_dir / "model.safetensors"))


@pytest.mark.slow
def test_exports_of_a_run_load_and_agree(worker_pool, qwen3_dir, tmp_path):
    """`HFExport` verifies both itself; here PEFT loads the one, Transformers the other."""
    callbacks = [HFExport(str(tmp_path), adapter="both", every_n_steps=2)]
    run = job(worker_pool, qwen3_dir, LAYOUTS["tp2_pp2_sp"], callbacks=callbacks)[0]
    names = ["last", "last-adapter", "step-000002", "step-000002-adapter"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert sorted(path.name for path in (tmp_path / "last-adapter").iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert "library_name: peft" in (tmp_path / "last-adapter" / "README.md").read_text()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "last", dtype=torch.float32).eval()
    base = AutoModelForCausalLM.from_pretrained(qwen3_dir, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, tmp_path / "last-adapter").eval()
    tokens = frozen_sequences(1, seed=9)[0].token_ids[None]
    with torch.no_grad():
        one, two = (model(tokens).logits.log_softmax(-1) for model in (merged, adapted))
    assert (one - two).abs().max() <= 1e-4  # two matrix products in place of one, in fp32
    state = merged.state_dict()
    assert all(torch.equal(state[name], weight) for name, weight in run.weights.items())


def test_wrong_adapter_export_is_not_reported_as_done(worker_pool, qwen3_dir, tmp_path):
    with pytest.raises(WorkerError, match="is not the trained model"):
        job(
            worker_pool,
            qwen3_dir,
            callbacks=[BreakAdapter(), HFExport(str(tmp_path), adapter="peft", on_error="raise")],
        )
    assert [path.name for path in tmp_path.iterdir()] == ["last-adapter.failed"]


class BreakAdapter(Callback):
    """Changes adapters between the probe's scores and the export."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        original = pl_module.save_adapter

        def save(directory: Path) -> None:
            with torch.no_grad():
                for name, parameter in pl_module.model.named_parameters():
                    if ".adapter.linear_out" in name:
                        parameter.add_(0.05)
            original(directory)

        pl_module.save_adapter = save


def test_adapter_export_without_adapters_is_refused_before_training(worker_pool, qwen3_dir, tmp_path):
    with pytest.raises(WorkerError, match=r"HFExport\(adapter='peft'\): the model has no adapters"):
        job(worker_pool, qwen3_dir, settings=None, callbacks=[HFExport(str(tmp_path), adapter="peft")])


def test_rank_that_does_not_divide_is_refused(worker_pool, qwen3_dir):
    with pytest.raises(WorkerError, match=r"lora\.rank=3 .* 3 % 2 = 1"):
        job(worker_pool, qwen3_dir, LAYOUTS["tp2"], settings=LoRASettings(rank=3))
