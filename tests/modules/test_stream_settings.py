"""What a stream says of its settings before a run."""

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_megatron_rl.data.prompts import PromptDataModule
from lightning_megatron_rl.modules import streaming
from lightning_megatron_rl.modules.grpo_config import GRPOLossConfig
from lightning_megatron_rl.modules.grpo_loss import GRPOLoss
from lightning_megatron_rl.modules.streaming import StreamedRollouts, StreamingSettings
from lightning_megatron_rl.rollout import SamplingParams


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
