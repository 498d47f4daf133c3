"""Validation of supervised fine-tuning: loss and perplexity of all sets and of each, over all replicas."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron_rl.modules.sft import perplexity
from tests.strategy.test_megatron import LAYOUTS, RELATIVE

ROWS = {
    "sums": [{"messages": [{"role": "user", "content": f"{n}+1="}, {"role": "assistant", "content": f"{n + 1}"}]}
             for n in range(5)],
    "talk": [{"messages": [
        {"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"},
        {"role": "user", "content": "and 2+2?"}, {"role": "assistant", "content": "it is 4"},
    ]}],
}  # fmt: skip


def validate(model: Path, strategy: dict[str, Any], world_size: int) -> tuple[dict[str, float], dict[str, float]]:
    """Metrics of a validation on both sets, and the sets' losses by Transformers."""
    from transformers import AutoModelForCausalLM

    from lightning_megatron_rl.data.sft import SFTDataModule
    from lightning_megatron_rl.modules.sft import SFTModule
    from tests.training import make_trainer

    data = SFTDataModule(
        train=lambda: ROWS["sums"],
        val={name: lambda rows=rows: rows for name, rows in ROWS.items()},
        tokenizer=str(model),
        messages_column="messages",
        batch_size=4,
    )
    trainer = make_trainer(strategy, world_size)
    trainer.validate(SFTModule(model=str(model)), data, verbose=False)
    twin = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    losses = {}
    for name in ROWS:
        values = []
        for sequence in data._sets[name]:
            table = twin(sequence.token_ids[None]).logits[0, :-1].log_softmax(-1)
            chosen = -table.gather(-1, sequence.token_ids[1:, None])[:, 0]
            values.append(chosen[sequence.loss_mask[1:]].detach())
        losses[name] = torch.cat(values)
    expected = {name: float(values.mean()) for name, values in losses.items()}
    expected["all"] = float(torch.cat(list(losses.values())).mean())
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, expected


@pytest.mark.parametrize("layout", ["tp2_sp", "dp2"])
def test_loss_and_perplexity_of_each_set(worker_pool, qwen3_dir, layout):
    """One set has a single conversation, of which the second replica gets nothing."""
    world_size, strategy = LAYOUTS[layout]
    runs = worker_pool.run(validate, qwen3_dir, strategy, world_size, world_size=world_size, init_process_group=False)
    for metrics, expected in runs:
        for name, prefix in (("sums", "val/sums"), ("talk", "val/talk"), ("all", "val")):
            assert metrics[f"{prefix}/loss"] == pytest.approx(expected[name], rel=RELATIVE), name
            assert metrics[f"{prefix}/perplexity"] == pytest.approx(math.exp(expected[name]), rel=1e-4), name


def test_perplexity_of_what_is_no_language():
    assert perplexity(0.0) == 1.0
    assert perplexity(1e4) == math.inf
    assert math.isnan(perplexity(math.nan))


def train_by_tokens(model: Path, strategy: dict[str, Any], world_size: int) -> tuple[list[float], list[int]]:
    """Losses of an epoch in batches of at most 24 tokens, and the sequences that this rank brought to each."""
    from lightning_megatron_rl.data.sft import SFTDataModule
    from lightning_megatron_rl.modules.sft import SFTModule
    from tests.training import make_trainer

    losses, counts = [], []

    class Recording(SFTModule):
        def training_step(self, sequences, batch_idx):
            loss = super().training_step(sequences, batch_idx)
            losses.append(float(loss))
            counts.append(len(sequences))
            return loss

    rows = [{"prompt": f"{n}+{n}=", "completion": str(10**n)} for n in range(9)]
    options = {"batch_size": 8, "max_tokens_per_batch": 24, "seed": 0}  # in this order one batch is a single sequence
    data = SFTDataModule(train=lambda: rows, tokenizer=str(model), **options)
    make_trainer(strategy, world_size, max_epochs=1, max_steps=-1).fit(Recording(model=str(model)), data)
    return losses, counts


def test_batches_of_tokens_are_the_same_on_two_replicas(worker_pool, qwen3_dir):
    """A batch may hold one long sequence alone: the other replica then brings none."""
    world_size, strategy = LAYOUTS["dp2"]
    (alone,) = worker_pool.run(train_by_tokens, qwen3_dir, {}, 1, world_size=1, init_process_group=False)
    both = worker_pool.run(
        train_by_tokens, qwen3_dir, strategy, world_size, world_size=world_size, init_process_group=False
    )
    losses, counts = alone
    assert len(set(counts)) > 1
    assert 1 in counts
    assert [sum(pair) for pair in zip(*(counts for _, counts in both), strict=True)] == counts
    for theirs, _ in both:
        assert theirs == pytest.approx(losses, rel=RELATIVE)
