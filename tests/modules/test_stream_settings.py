"""What a stream says of its settings before a run."""

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_megatron_rl.data.prompts import PromptDataModule
from lightning_megatron_rl.modules import streaming
from lightning_megatron_rl.modules.grpo import GRPOModule
from lightning_megatron_rl.modules.grpo_config import GRPOLossConfig
from lightning_megatron_rl.modules.grpo_loss import GRPOLoss
from lightning_megatron_rl.modules.streaming import StreamedRollouts, StreamingSettings
from lightning_megatron_rl.parallel.layout import ParallelLayout
from lightning_megatron_rl.rollout import SamplingParams
from lightning_megatron_rl.rollout.stream import state_of_rows
from tests.modules.runs import ReplayEngine, length


@pytest.mark.parametrize(
    ("bound", "loss", "warns"),
    [(2, {"correction": None}, True), (2, {"correction": None, "bypass": True}, False), (2, {}, False)],
)
def test_old_policies_that_nothing_weighs_are_warned_about(monkeypatch, bound: int, loss: dict[str, Any], warns: bool):
    """With `bypass` the ratio of the policy loss is to the policy that sampled."""
    told: list[str] = []
    monkeypatch.setattr(streaming, "tell_loss", told.append)
    module: Any = SimpleNamespace(
        engine=SimpleNamespace(streams=True, sleep_level=0, is_apart=True, describe_needs=lambda: None),
        trainer=SimpleNamespace(datamodule=PromptDataModule("rows.jsonl", "model", batch_size=4), overfit_batches=0),
        sampling=SamplingParams(),
        loss=GRPOLoss(GRPOLossConfig(**loss)),
        hf_model=SimpleNamespace(config=None),
        close_engine=lambda: None,
    )
    StreamedRollouts(StreamingSettings(bound)).prepare(module)
    assert [message.split(":")[0] for message in told] == ["streaming.max_staleness=2 without loss.correction"] * warns


def test_the_table_counts_the_prompts_of_a_step_where_a_run_goes_on_without_its_stream(monkeypatch):
    """The last batches of the epoch bring no prompts: they were read before."""
    monkeypatch.setattr(GRPOModule, "strategy", SimpleNamespace(layout=ParallelLayout()))
    module: Any = GRPOModule("model", [length], engine=ReplayEngine())
    module._trainer = SimpleNamespace(datamodule=SimpleNamespace(batch_size=8), world_size=2, state=None)
    module.backlog.load([state_of_rows([0, 1, 2, 3])])
    monkeypatch.setattr("lightning_megatron_rl.modules.grpo.describe_unplanned", lambda *_: [])
    assert ("prompts per rollout", "4 per replica x 2 replicas = 8") in module.describe_batch([])
