"""Streams of rollouts on CUDA: every token under the weights that its record names, in both placements."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from tests.gpu.engines import make_engine
from tests.gpu.machine import needs_gpus
from tests.gpu.test_engine import BF16_LOGPROB, ONE

pytestmark = pytest.mark.deadline(600)
BATCH, STEPS, BOUND = 4, 6, 2


@dataclass
class Ages:
    """Which rows were trained on, and how far the trainer's log-probs are from the sampler's, by the tokens' age."""

    rows: list[int] = field(default_factory=list)
    off: dict[int, list[float]] = field(default_factory=dict)
    partial: int = 0  # responses with tokens of several versions


class AgeLog(pl.Callback):
    """Fills in `ages` after each step."""

    def __init__(self) -> None:
        self.ages = Ages()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        rollout, step, ages = pl_module.last_rollout, trainer.global_step - 1, self.ages
        ages.rows += [sample.prompt.index for sample in rollout.samples[:: rollout.num_generations]]
        for sample, sequence in zip(rollout.samples, rollout.sequences, strict=True):
            old, drawn = (sequence.fields[name].cpu() for name in ("old_logprobs", "rollout_logprobs"))
            off = (old - drawn).abs()[sequence.loss_mask.cpu().bool()].tolist()
            segments = sample.segments or [(sample.weight_version, len(sample.response_ids))]
            ages.partial += len(segments) > 1
            for version, count in segments:
                ages.off.setdefault(step - version, []).extend(off[:count])
                off = off[count:]


def fit_stream(model: Path, rows: Path, placement: str, parts: int, devices: list[int] | None) -> Ages:
    """GRPO on a stream, whose sampler has room for five groups of four at a time."""
    from megatron.core.optimizer import OptimizerConfig

    from lightning_megatron_rl.data.prompts import PromptDataModule
    from lightning_megatron_rl.modules.grpo import GRPOModule
    from lightning_megatron_rl.modules.streaming import StreamingSettings
    from lightning_megatron_rl.modules.training import TrainingSettings
    from lightning_megatron_rl.rollout.protocol import SamplingParams
    from tests.modules.runs import parity
    from tests.training import make_trainer

    class ScoresFirst(GRPOModule):
        scores_first = True  # so that the log keeps the trainer's log-probs

    settings: Any = {"max_staleness": BOUND, "placement": placement, "batch_parts": parts}
    policy = ScoresFirst(
        str(model),
        rewards=[parity],
        num_generations=4,
        sampling=SamplingParams(max_tokens=40),
        engine=make_engine("child", max_num_seqs=20, devices=devices),
        streaming=StreamingSettings(**settings),
        train=TrainingSettings(
            optimizer=OptimizerConfig(lr=3e-3, weight_decay=0.0, adam_eps=1e-3), max_tokens_per_microbatch=512
        ),
    )
    log = AgeLog()
    trainer = make_trainer(
        {"timeout_s": 120.0}, 1, max_steps=STEPS, callbacks=[log], precision="bf16-mixed", accelerator="cuda"
    )
    trainer.fit(policy, PromptDataModule(str(rows), str(model), batch_size=BATCH))
    policy.close_engine()
    return log.ages


@pytest.mark.parametrize(
    ("placement", "parts"),
    [("shared", 1), *(pytest.param("separate", parts, marks=needs_gpus(2)) for parts in (1, 2))],
)
def test_tokens_are_drawn_with_the_weights_that_are_named(gpu_pool, models, tmp_path, placement, parts):
    """Weights come by IPC or NCCL while responses are under way; those of this step give the trainer's log-probs."""
    rows = tmp_path / "rows.jsonl"
    texts = [chr(ord("a") + row) * (2 + row % 9) for row in range(BATCH * STEPS)]
    rows.write_text("".join(json.dumps({"prompt": text, "answer": "7"}) + "\n" for text in texts))
    devices = [1] if placement == "separate" else None
    ages = gpu_pool.run(fit_stream, models["dense"], rows, placement, parts, devices, **ONE)[0]
    assert sorted(ages.rows) == list(range(BATCH * STEPS))
    assert ages.partial > 0 or placement == "separate"  # where all may be complete when weights come
    assert max(ages.off) <= BOUND
    means = {age: sum(off) / len(off) for age, off in ages.off.items()}
    assert means[0] < BF16_LOGPROB
    assert means[1] > 1.5 * means[0]  # what is older was drawn with other weights
