"""`HFExport`: what is in an export, how it is proved, and what becomes of one that is not what it should be."""

import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Callback

from lightning_megatron_rl.callbacks import hf_export
from lightning_megatron_rl.callbacks.hf_export import HFExport
from lightning_megatron_rl.callbacks.rollout_samples import RolloutSamples
from lightning_megatron_rl.rollout.protocol import SamplingParams
from tests.distributed import WorkerError
from tests.full_disk import files_of_at_most
from tests.modules.runs import MAX_RESPONSE, fit_grpo
from tests.notices import LOGGER, Keeps
from tests.strategy.test_megatron import LAYOUTS


class BreakExport(Callback):
    """Changes the weights between the probe's scores and the export, as a wrong conversion would."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        original = pl_module.save_pretrained

        def save(directory: Path, *arguments: Any) -> None:
            with torch.no_grad():
                next(iter(pl_module.model.parameters())).mul_(1.5)
            original(directory, *arguments)

        pl_module.save_pretrained = save


class FlipBit(Callback):
    """Changes one bit of one number on disk, in the first export alone; the log-probs hardly notice."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        original = pl_module.save_pretrained
        exports = []

        def save(directory: Path, *arguments: Any) -> None:
            original(directory, *arguments)
            exports.append(directory)
            if trainer.is_global_zero and len(exports) == 1:
                file = directory / "model.safetensors"
                content = bytearray(file.read_bytes())
                content[-4] ^= 1  # the lowest bit of the last number's mantissa
                file.write_bytes(content)

        pl_module.save_pretrained = save


class KeepWarnings(Callback):
    """Writes down what was told about exports, and how far the run came."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_fit_start(self, *_: Any) -> None:
        self.keeps = Keeps()
        LOGGER.addHandler(self.keeps)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        LOGGER.removeHandler(self.keeps)
        told = [message for message in self.keeps.messages if "HFExport" in message]
        if trainer.is_global_zero:
            self.path.write_text(json.dumps({"told": told, "steps": trainer.global_step}))


def run(pool: Any, model: Path, layout: str = "single", **kwargs: Any) -> Any:
    world_size, strategy = {**LAYOUTS, "single": (1, {})}[layout]
    return pool.run(fit_grpo, model, strategy, world_size, world_size=world_size, init_process_group=False, **kwargs)


@pytest.fixture(scope="module")
def exported(worker_pool, qwen3_dir, tmp_path_factory) -> tuple[Path, Any]:
    """Exports of a run of two steps under TP2, in files of at most 200 kB, and the run."""
    directory = tmp_path_factory.mktemp("exported")
    callbacks = [HFExport(str(directory), every_n_steps=1, max_shard_size_gb=2e-4, on_error="raise")]
    return directory, run(worker_pool, qwen3_dir, "tp2_sp", steps=2, callbacks=callbacks)[0]


def test_export_loads_in_transformers_with_the_trained_weights(exported):
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    directory, result = exported
    assert sorted(path.name for path in directory.iterdir()) == ["last", "step-000001", "step-000002"]
    last = directory / "last"
    assert len(list(last.glob("model-*-of-*.safetensors"))) > 2
    model = AutoModelForCausalLM.from_pretrained(last, dtype=torch.float32)
    assert AutoTokenizer.from_pretrained(last).chat_template
    GenerationConfig.from_pretrained(last)
    state = model.state_dict()
    for name, weight in result.weights.items():
        assert torch.equal(state[name], weight), name


def test_card_tells_where_the_model_comes_from(exported, qwen3_dir):
    directory, result = exported
    text = (directory / "last" / "README.md").read_text()
    _, fields, body = text.split("---\n", 2)
    assert yaml.safe_load(fields) == {
        "base_model": str(qwen3_dir),
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["lightning-megatron-rl", "GRPOModule"],
    }
    rows = dict(line.strip("|").split("|", 1) for line in body.splitlines() if line.startswith("| "))
    cells = {name.strip(): value.strip() for name, value in rows.items()}
    assert cells["method"] == "GRPOModule"
    assert cells["step"].startswith("2 ")
    assert cells["data"].startswith("SequenceDataModule: batch_size=4")
    assert "tp 2" in cells["layout"]
    assert cells["layout"].endswith("2 processes")
    assert f"torch {torch.__version__.split('+')[0]}" in cells["versions"]
    assert cells["verified"].startswith("every tensor is the trainer's; loaded by Transformers, log-probs differ by at")
    assert len(cells["git commit"].split()[0]) == 40 or cells["git commit"] == "none"
    assert cells["num_generations"] == "4"
    assert cells["sampling.temperature"] == "0.8"
    assert cells["loss_config.kl_coef"] == "0.1"
    assert cells["train_settings.optimizer.lr"] == "0.001"
    assert cells["reward_weights"] == "[1.0, 0.5]"
    assert not {"synced_version", "last_rollout.num_generations"} & cells.keys(), "state of the run is no setting"
    last = result.steps[-1]
    assert float(cells["reward/mean"]) == pytest.approx(last["reward/mean"], rel=1e-5)  # six digits


@pytest.mark.parametrize(
    ("on_error", "ends_in"),
    [
        ("raise", r"FailedEverywhereError: .*last\.failed is not the trained model: loaded back"),
        ("fail", r"RunFailedError: the run ended, but 1 part\(s\) of it FAILED: .*last\.failed is not the trained"),
        ("warn", None),
    ],
)
def test_wrong_export_is_not_reported_as_done(worker_pool, qwen3_dir, tmp_path, on_error, ends_in):
    out = tmp_path / "out"
    callbacks = [BreakExport(), HFExport(str(out), on_error=on_error), KeepWarnings(tmp_path / "told")]
    with pytest.raises(WorkerError, match=ends_in) if ends_in else nullcontext():
        run(worker_pool, qwen3_dir, steps=1, callbacks=callbacks)
    if on_error != "raise":
        (told,) = json.loads((tmp_path / "told").read_text())["told"]
        assert told.startswith("HFExport FAILED, training goes on: the export ")
        assert "lightning-megatron-rl convert" in told
    assert sorted(path.name for path in out.iterdir()) == ["last.failed"]


def test_a_bf16_model_trained_in_fp32_is_exported_rounded(worker_pool, qwen3_dir, tmp_path):
    """Fails where outputs are held to fp32's tolerance: what is written is rounded."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = tmp_path / "model"
    AutoModelForCausalLM.from_pretrained(qwen3_dir, dtype=torch.bfloat16).save_pretrained(model)
    AutoTokenizer.from_pretrained(qwen3_dir).save_pretrained(model)
    result = run(worker_pool, model, steps=1, callbacks=[HFExport(str(tmp_path / "out"), on_error="raise")])[0]
    state = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "last").state_dict()
    for name, weight in result.weights.items():
        assert state[name].dtype == torch.bfloat16
        assert torch.equal(state[name], weight.to(torch.bfloat16)), name


def test_log_probs_at_a_low_temperature_differ_by_as_much_more(worker_pool, qwen3_dir, tmp_path):
    """Differences of logits are divided by it: in bf16 those of a right export are above the bound at 1."""
    module = {"sampling": SamplingParams(temperature=0.01, max_tokens=MAX_RESPONSE)}
    export = HFExport(str(tmp_path / "out"), on_error="raise")
    run(worker_pool, qwen3_dir, steps=1, module=module, trainer={"precision": "bf16-mixed"}, callbacks=[export])
    card = (tmp_path / "out" / "last" / "README.md").read_text()
    found = re.search(r"log-probs differ by at most (\S+) ", card)
    assert found is not None
    assert float(found[1]) > hf_export._TOLERANCE[torch.bfloat16]


def test_one_wrong_bit_is_found_and_the_run_goes_on(worker_pool, qwen3_dir, tmp_path):
    """Fails without the comparison of tensors: log-probs of the broken export are within their tolerance."""
    out = tmp_path / "out"
    callbacks = [FlipBit(), HFExport(str(out), every_n_steps=1), KeepWarnings(tmp_path / "told")]
    with pytest.raises(WorkerError, match=r"RunFailedError: .*step-000001\.failed"):
        run(worker_pool, qwen3_dir, "pp2", steps=2, callbacks=callbacks)
    told = json.loads((tmp_path / "told").read_text())
    assert told["steps"] == 2
    assert "1 tensors on disk are not the trainer's (model." in told["told"][0]
    assert "1 of " in told["told"][0]
    assert sorted(path.name for path in out.iterdir()) == ["last", "step-000001.failed", "step-000002"]


def test_full_disk_is_a_failed_export(worker_pool, qwen3_dir, tmp_path):
    """Nothing is left of it, and an export that was there before is untouched until a new one is proved."""
    out = tmp_path / "out"
    (out / "last").mkdir(parents=True)
    (out / "last" / "old").touch()
    callbacks = [SmallFiles(), HFExport(str(out), overwrite=True), KeepWarnings(tmp_path / "told")]
    with pytest.raises(WorkerError, match="RunFailedError"):
        run(worker_pool, qwen3_dir, steps=1, callbacks=callbacks)
    told = json.loads((tmp_path / "told").read_text())["told"]
    assert "File too large" in told[0]
    assert [path.name for path in out.rglob("*")] == ["last", "old"]


class SmallFiles(Callback):
    """Lets no file grow beyond 100 kB while the last export is written."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        original = pl_module.save_pretrained

        def save(directory: Path, *arguments: Any) -> None:
            with files_of_at_most(100_000):
                original(directory, *arguments)

        pl_module.save_pretrained = save


def test_export_directory_is_checked_before_training(worker_pool, qwen3_dir, tmp_path):
    (tmp_path / "last").mkdir()
    with pytest.raises(WorkerError, match="exists already"):
        run(worker_pool, qwen3_dir, callbacks=[HFExport(dirpath=str(tmp_path))])
    with pytest.raises(WorkerError, match=r"HFExport\(dirpath\)='/proc/export' cannot be written"):
        run(worker_pool, qwen3_dir, callbacks=[HFExport(dirpath="/proc/export")])
    callbacks = [HFExport(str(tmp_path / "new")), RolloutSamples(dirpath="/proc/samples")]
    with pytest.raises(WorkerError, match=r"RolloutSamples\(dirpath\)='/proc/samples' cannot be written: /proc: "):
        run(worker_pool, qwen3_dir, callbacks=callbacks)
    assert [path.name for path in tmp_path.iterdir()] == ["last"], "nothing is made for a run that does not begin"


def test_room_is_checked_before_training(worker_pool, qwen3_dir):
    """/proc/self/task is a file system without room; that it cannot be written is checked before."""
    with pytest.raises(WorkerError, match=r"needs 0\.00 GB \([\d,]+ weights of 4 bytes\), and its file system has 0"):
        worker_pool.run(check_room, qwen3_dir, world_size=1)


def check_room(model: Path) -> None:
    from types import SimpleNamespace

    from lightning_megatron_rl.models.hf.model import HFModel

    HFExport("/proc/export").on_fit_start(None, SimpleNamespace(hf_model=HFModel(str(model))))  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"every_n_steps": 0}, {"max_shard_size_gb": 0.0}])
def test_settings_are_checked(options):
    with pytest.raises(ValueError, match=r"at least 1|above 0"):
        HFExport("out", **options)


@pytest.mark.slow
def test_export_loads_in_vllm(exported):
    """A new engine on the export samples with the log-probs that Transformers computes from it."""
    from transformers import AutoModelForCausalLM

    from lightning_megatron_rl.rollout import SamplingParams
    from tests.rollout.conftest import make_engine, make_requests, max_logprob_error

    last = exported[0] / "last"
    engine = make_engine()
    engine.start(last)
    try:
        model = AutoModelForCausalLM.from_pretrained(last, dtype=torch.float32).eval()
        requests = make_requests(2)
        results = engine.generate(requests, SamplingParams(temperature=1.0, max_tokens=8))
        assert max_logprob_error(model, requests, results) < 1e-3  # fp32, other kernels
    finally:
        engine.close()
