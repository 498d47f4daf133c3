"""What docs/extending.md says: parts of a user's own, found by their import path, from outside the package."""

import csv
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from transformers import AutoModelForCausalLM

from lightning_megatron_rl import GRPOModule, MegatronStrategy, Prompt, PromptDataModule, Sample
from lightning_megatron_rl.data.arithmetic import ArithmeticRows
from lightning_megatron_rl.environments import Action
from lightning_megatron_rl.modules.grpo_config import GRPOLossConfig
from lightning_megatron_rl.rollout.protocol import SamplingParams
from lightning_megatron_rl.weights.source import source_of
from tests.command_line import ROOT, build, changed
from tests.distributed import WorkerPool
from tests.rollout.conftest import make_engine, make_requests, max_logprob_error, random_weights

EXTENDING = ROOT / "examples" / "extending"


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The example's modules, under the names that a user gives."""
    monkeypatch.syspath_prepend(str(EXTENDING))
    names = [file.stem for file in EXTENDING.glob("*.py")]
    yield {name: importlib.import_module(name) for name in names}
    for name in names:
        sys.modules.pop(name, None)


def test_page_names_every_example():
    text = (ROOT / "docs" / "extending.md").read_text()
    assert set(re.findall(r"examples/extending/(\w+)\.py", text)) == {file.stem for file in EXTENDING.glob("*.py")}


def test_loss(parts):
    logprobs = torch.tensor([-1.0, -1.0, -0.1], requires_grad=True)
    old = torch.tensor([-1.0, -1.0, -5.0])
    loss, ratio = parts["loss"].one_sided(logprobs, old, torch.tensor([2.0, -3.0, 1.0]))
    assert loss.tolist() == [-2.0, 0.0, -2.0]
    assert ratio.tolist() == [1.0, 1.0, 2.0]
    loss.sum().backward()
    assert logprobs.grad.tolist() == [-2.0, 0.0, 0.0]
    assert GRPOLossConfig(policy_loss="loss.one_sided").policy_loss == "loss.one_sided"


def test_environment(parts):
    episode = parts["rewards"].SecondChance().start(Prompt([1], "1+1=", answer="2"), seed=0)
    assert episode.step(Action("3", [3])).text == "="
    assert episode.step(Action(" 2", [2])).done
    ending = episode.finish("done")
    assert (ending.reward, ending.success) == (0.5, True)


def test_transport(parts, qwen3_dir, tmp_path, monkeypatch):
    """What the file brought samples: log-probs are those of the new weights, and nothing of the file is left."""
    monkeypatch.setenv("PYTHONPATH", str(EXTENDING))  # for vLLM's workers
    engine = make_engine(weight_transfer=parts["transport"].FileTransport(str(tmp_path)))
    model = AutoModelForCausalLM.from_pretrained(qwen3_dir, dtype=torch.float32).eval()
    requests, params = make_requests(2), SamplingParams(max_tokens=4)
    try:
        engine.start(qwen3_dir)
        for version in (1, 2):
            report = engine.update_weights(source_of(random_weights(model, seed=version)), version)
            assert (report.transport, report.num_bytes) == ("files", sum(p.nbytes for p in model.parameters()))
            assert engine.weight_version == version
            assert max_logprob_error(model, requests, engine.generate(requests, params)) < 1e-4
    finally:
        engine.close()
    assert list(tmp_path.iterdir()) == []


def test_transport_in_a_config(parts, tmp_path):
    transport = {"class_path": "transport.FileTransport", "init_args": {"directory": "/dev/shm"}}
    key = "model.init_args.engine.init_args.weight_transfer"
    config = changed(ROOT / "configs" / "demo" / "grpo.yaml", tmp_path / "config.yaml", key, transport)
    found = build("fit", "--config", config).model.engine.weight_transfer
    assert isinstance(found, parts["transport"].FileTransport)
    assert found.directory == "/dev/shm"


def train(model: Path, directory: Path) -> int:
    """Two steps with nothing but parts of one's own; return the version of the weights that sampled last."""
    sys.path.insert(0, str(EXTENDING))
    callback, engine, rewards = (importlib.import_module(name) for name in ("callback", "engine", "rewards"))
    logger = CSVLogger(directory, name=None, version="run")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=MegatronStrategy(),
        max_steps=2,
        callbacks=[callback.LongestResponse()],
        logger=logger,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = GRPOModule(
        model=str(model),
        rewards=[rewards.ends_with_answer, brevity],
        num_generations=4,
        sampling=SamplingParams(max_tokens=6),
        loss=GRPOLossConfig(policy_loss="loss.one_sided"),
        engine=engine.TransformersEngine(max_model_len=32),
    )
    data = PromptDataModule(
        train=ArithmeticRows("train", size=16), tokenizer=str(model), batch_size=4, max_prompt_length=16
    )
    trainer.fit(module, data)
    sys.path.remove(str(EXTENDING))
    version: int = module.engine.weight_version
    return version


def test_run_with_own_engine_loss_reward_and_callback(worker_pool: WorkerPool, qwen3_dir: Path, tmp_path: Path):
    """fp32 on both sides: what the engine draws has the trainer's log-probs, after updates, too."""
    (version,) = worker_pool.run(train, qwen3_dir, tmp_path, world_size=1, init_process_group=False)
    assert version >= 1, "the second rollout is drawn with updated weights"
    steps = [row for row in read(tmp_path / "run" / "metrics.csv") if row.get("mismatch/abs_logp_diff")]
    assert len(steps) == 2
    for row in steps:
        assert float(row["mismatch/abs_logp_diff"]) < 1e-5  # 5e-7 is usual in fp32
        assert 1 <= float(row["rollout/longest"]) <= 6


def brevity(samples: list[Sample]) -> list[float]:
    """So that rewards differ."""
    return [1.0 / len(sample.response_ids) for sample in samples]


def read(path: Path) -> list[dict[str, Any]]:
    with path.open() as file:
        return list(csv.DictReader(file))
