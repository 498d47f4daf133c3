"""There and back: a converted model is the model, in every layout, and converts back to the files it came from."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.convert.jobs import assert_same_tensors, convert, must_convert, tensors
from tests.distributed import WorkerPool
from tests.selection import by_default
from tests.strategy.test_megatron import LAYOUTS
from tests.tiny_models import save_tiny_model
from tests.training import Run, SequenceDataModule, fit_arithmetic, fit_sft, frozen_sequences, make_trainer

FAMILIES = [
    "llama",
    "qwen2",
    "qwen2_tied",
    "qwen3",
    "qwen3_moe",
    "mistral",
    "mixtral",
    "deepseek_v3",
    "gemma3",
    "gpt_oss",
]
NOT_CONVERTED = {"deepseek_v3": "model.layers.4."}  # multi-token prediction, docs/models.md


@pytest.fixture(scope="module")
def converted(worker_pool: WorkerPool, qwen3_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Qwen3 as a distributed checkpoint."""
    path = tmp_path_factory.mktemp("converted") / "qwen3.ckpt"
    must_convert(worker_pool, qwen3_dir, path)
    return path


@pytest.mark.parametrize("family", by_default(["qwen2_tied", "deepseek_v3", "gpt_oss"], FAMILIES))
def test_every_family_comes_back_bit_for_bit(
    worker_pool: WorkerPool, checkpoint: Callable[[str], Path], tmp_path: Path, family: str
):
    """Fused projections, experts one by one and all in one tensor, expert biases, tied embeddings, biases, sinks."""
    source = checkpoint(family)
    shown = must_convert(worker_pool, source, tmp_path / "c.ckpt", "--verify")
    assert "verified: every tensor is the same" in shown
    must_convert(worker_pool, tmp_path / "c.ckpt", tmp_path / "hf", "--verify")
    left_out = NOT_CONVERTED.get(family, "-")
    expected = {name: tensor for name, tensor in tensors(source).items() if not name.startswith(left_out)}
    assert_same_tensors(tensors(tmp_path / "hf"), expected)
    old, new = (json.loads((directory / "config.json").read_text()) for directory in (source, tmp_path / "hf"))
    assert new == old
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").chat_template


def sft(pool: WorkerPool, model: Path, layout: str, **options: Any) -> list[Run]:
    world_size, strategy = {**LAYOUTS, "one": (1, {})}[layout]
    return pool.run(
        fit_sft, model, strategy, world_size, steps=1, world_size=world_size, init_process_group=False, **options
    )


@pytest.mark.parametrize("layout", ["tp2_sp", "pp2"])
def test_training_starts_from_it_in_any_layout(
    worker_pool: WorkerPool, qwen3_dir: Path, converted: Path, tmp_path: Path, layout: str
):
    """`model` has other weights here: those of the first step's loss are the checkpoint's."""
    other = save_tiny_model(tmp_path / "other", "qwen3", seed=1)
    want = sft(worker_pool, qwen3_dir, "one")[0].steps[0]["policy/loss"]
    have = sft(worker_pool, other, layout, module={"init_from": str(converted)})[0].steps[0]["policy/loss"]
    assert have == pytest.approx(want, rel=1e-5)  # sums in another order, in fp32
    assert sft(worker_pool, other, "one")[0].steps[0]["policy/loss"] != pytest.approx(want, rel=1e-2)


def validate(model: Path, path: Path) -> tuple[int, dict[str, torch.Tensor]]:
    from lightning_megatron_rl.modules.sft import SFTModule
    from lightning_megatron_rl.modules.training import TrainingSettings

    module = SFTModule(str(model), train=TrainingSettings(max_tokens_per_microbatch=64))
    trainer = make_trainer({}, 1)
    trainer.validate(module, ValidationData(frozen_sequences(4), 4), ckpt_path=str(path), verbose=False)
    return trainer.global_step, {name: tensor.clone() for name, tensor in module.export_weights()}


class ValidationData(SequenceDataModule):
    """The training batches again."""

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


def test_it_is_a_ckpt_path_but_no_place_to_resume_from(
    worker_pool: WorkerPool, qwen3_dir: Path, converted: Path, tmp_path: Path
):
    other = save_tiny_model(tmp_path / "other", "qwen3", seed=1)
    step, weights = worker_pool.run(validate, other, converted, world_size=1, init_process_group=False)[0]
    assert step == 0
    assert_same_tensors(weights, tensors(qwen3_dir))
    with pytest.raises(Exception, match="holds weights only"):
        sft(worker_pool, other, "one", ckpt_path=str(converted))


def arithmetic(pool: WorkerPool, model: Path, layout: str, directory: Path) -> Run:
    world_size, strategy = LAYOUTS[layout]
    return pool.run(
        fit_arithmetic,
        model,
        strategy,
        world_size,
        max_steps=1,
        checkpoints=directory,
        world_size=world_size,
        init_process_group=False,
    )[0]


@pytest.mark.parametrize("layout", by_default(["tp2_sp"], ["tp2_sp", "tp2_pp2_sp", "dp2_plain", "pp2_vpp2"]))
def test_trained_checkpoint_converts_without_the_model_it_came_from(
    worker_pool: WorkerPool, qwen3_dir: Path, tmp_path: Path, layout: str
):
    """Config, tokenizer and names of tensors are in the checkpoint; so is the optimizer, which is left where it is."""
    source = tmp_path / "source"
    shutil.copytree(qwen3_dir, source)
    run = arithmetic(worker_pool, source, layout, tmp_path)
    shutil.rmtree(source)
    must_convert(worker_pool, tmp_path / "step=1.ckpt", tmp_path / "hf", "--verify", "--max-shard-size", "200KB")
    assert_same_tensors(tensors(tmp_path / "hf"), run.weights)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in run.weights.items())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3_plain", "gpt_oss"])
def test_trained_experts_convert(
    worker_pool: WorkerPool, checkpoint: Callable[[str], Path], tmp_path: Path, family: str
):
    """Split over two ranks, which share the rest: one optimizer for each kind of parameter."""
    keeper = pl.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1)
    strategy = {"expert_model_parallel_size": 2}
    trained = worker_pool.run(
        fit_sft,
        checkpoint(family),
        strategy,
        2,
        steps=1,
        callbacks=[keeper],
        trainer={"enable_checkpointing": True},
        world_size=2,
        init_process_group=False,
    )[0]
    must_convert(worker_pool, tmp_path / "step=1.ckpt", tmp_path / "hf", "--verify")
    assert_same_tensors(tensors(tmp_path / "hf"), trained.weights)


def test_padding_of_the_vocabulary_is_left_out(worker_pool: WorkerPool, odd_vocabulary: Path, tmp_path: Path):
    """127 tokens are 128 under TP2; trap 8."""
    run = pl_fit_odd(worker_pool, odd_vocabulary, tmp_path)
    must_convert(worker_pool, tmp_path / "step=1.ckpt", tmp_path / "hf", "--verify")
    have = tensors(tmp_path / "hf")
    assert have["model.embed_tokens.weight"].shape[0] == 127
    assert_same_tensors(have, run.weights)


def pl_fit_odd(pool: WorkerPool, model: Path, directory: Path) -> Run:
    keeper = pl.callbacks.ModelCheckpoint(directory, "{step}", every_n_train_steps=1)
    trainer = {"enable_checkpointing": True}
    sequences = [s for s in frozen_sequences(24, seed=5) if int(s.token_ids.max()) < 127][:4]
    return sft(pool, model, "tp2_sp", callbacks=[keeper], trainer=trainer, sequences=sequences)[0]


def test_precision_is_chosen(worker_pool: WorkerPool, qwen3_dir: Path, tmp_path: Path):
    """Half the bytes; from bf16 a run in fp32 starts as well."""
    must_convert(worker_pool, qwen3_dir, tmp_path / "half.ckpt", "--dtype", "bfloat16", "--verify")
    must_convert(worker_pool, tmp_path / "half.ckpt", tmp_path / "hf", "--verify", "--dtype", "float16")
    rounded = {name: tensor.bfloat16().half() for name, tensor in tensors(qwen3_dir).items()}
    assert_same_tensors(tensors(tmp_path / "hf"), rounded)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "float16"
    _, weights = worker_pool.run(validate, qwen3_dir, tmp_path / "half.ckpt", world_size=1, init_process_group=False)[0]
    assert_same_tensors(weights, {name: tensor.bfloat16().float() for name, tensor in tensors(qwen3_dir).items()})


def test_difference_is_found_and_named(worker_pool: WorkerPool, qwen3_dir: Path, tmp_path: Path):
    """One bit of one number, on disk, after the conversion."""
    shown = worker_pool.run(flip_and_verify, qwen3_dir, tmp_path, world_size=1, init_process_group=False)[0]
    for found, name in zip(shown, ("model.norm.weight", "decoder.final_layernorm.weight"), strict=True):
        assert [line.partition(":")[0] for line in found] == [name], found
        assert "1 of 64 numbers differ, by up to" in found[0]


def flip_and_verify(model: Path, directory: Path) -> list[list[str]]:
    """Both ways: what `--verify` finds when the last number of the final norm is doubled."""
    from lightning_megatron_rl.compat.single_process import single_process
    from lightning_megatron_rl.convert.source import StoredModel, open_model
    from lightning_megatron_rl.convert.to_checkpoint import verify_checkpoint, write_checkpoint
    from lightning_megatron_rl.convert.to_hf import HFConversion

    norm = tensors(model)["model.norm.weight"].numpy().tobytes()
    found = []
    with single_process():
        checkpoint = directory / "c.ckpt"
        skeleton = write_checkpoint(open_model(str(model)), checkpoint)
        conversion = HFConversion(StoredModel.find(checkpoint))
        conversion.write(directory / "hf")
        for file in (next((checkpoint / "sharded").glob("*.distcp")), directory / "hf" / "model.safetensors"):
            content = bytearray(file.read_bytes())
            end = content.index(norm) + len(norm)
            content[end - 2] ^= 0x80  # the lowest bit of the exponent
            file.write_bytes(content)
            if file.suffix == ".distcp":
                found.append(verify_checkpoint(skeleton, checkpoint))
                content[end - 2] ^= 0x80
                file.write_bytes(content)
        found.append(conversion.verify(directory / "hf"))
    return found


def test_nothing_is_left_where_it_failed(worker_pool: WorkerPool, qwen3_dir: Path, tmp_path: Path):
    broken = tmp_path / "broken"
    shutil.copytree(qwen3_dir, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))
    out = tmp_path / "out"
    out.mkdir()
    code, shown = convert(worker_pool, broken, out / "c.ckpt")
    assert code == 1
    assert "weights and config do not belong together" in shown
    assert list(out.iterdir()) == []
