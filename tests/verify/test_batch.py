"""The frozen batch: what a synthetic one holds, and which recorded ones are refused."""

from pathlib import Path
from typing import Any

import pytest

from lightning_megatron_rl.rollout.record import record_line
from lightning_megatron_rl.sample import Prompt, Sample
from lightning_megatron_rl.verify.batch import make_batch
from tests.verify.subjects import grpo, sft


def recording(path: Path, prompts: int, responses: int, **changes: Any) -> Path:
    lines = []
    for index in range(prompts):
        prompt = Prompt(token_ids=[10 + index, 11], text="p", index=index)
        for number in range(responses):
            sample = Sample(prompt, [20 + number] * (number + 1), [-1.0] * (number + 1), reward=float(number))
            lines.append(record_line(Sample(**{**vars(sample), **changes}), 5))
    path.write_text("".join(lines))
    return path


def test_synthetic_sequences_are_ragged_with_one_without_targets(qwen3_dir):
    module = sft(qwen3_dir, {}).module
    batch = make_batch(module, None, processes=4)
    targets = [int(sequence.loss_mask.sum()) for sequence in batch.sequences]
    assert targets[0] == 0
    assert all(targets[1:])
    assert len({len(sequence) for sequence in batch.sequences}) > 3
    assert len(batch.sequences) % 2, "replicas get unequal shares"
    tokens = {int(token) for sequence in batch.sequences for token in sequence.token_ids}
    assert 0 in tokens, "the padding token, whose gradient is a matter of the layout"
    assert tokens <= set(range(128))
    again = make_batch(module, None, processes=4)
    assert [s.token_ids.tolist() for s in again.sequences] == [s.token_ids.tolist() for s in batch.sequences]
    assert f"{batch.num_tokens} tokens" in batch.description


def test_synthetic_rollout_has_whole_groups_and_an_empty_response(qwen3_dir):
    module = grpo(qwen3_dir, {}).module
    batch = make_batch(module, None, processes=2)
    assert batch.samples is not None
    assert len(batch.prompts) == 2 * 2  # replicas x updates per rollout
    assert len(batch.samples) == 4 * 4
    lengths = [len(sample.response_ids) for sample in batch.samples]
    assert lengths[0] == 0
    assert 0 < max(lengths) <= 10
    assert len({tuple(prompt.token_ids) for prompt in batch.prompts}) == 4
    assert len({sample.reward for sample in batch.samples[:4]}) > 1


def test_synthetic_sequences_fit_the_budget(qwen3_dir):
    batch = make_batch(sft(qwen3_dir, {}, max_tokens_per_microbatch=16).module, None, processes=2)
    assert batch.longest <= 16


def test_recorded_rollout_becomes_a_batch(qwen3_dir, tmp_path):
    path = recording(tmp_path / "r.jsonl", prompts=2, responses=6)
    batch = make_batch(grpo(qwen3_dir, {}).module, path, processes=1)
    assert [len(sample.response_ids) for sample in batch.samples or []] == [1, 2, 3, 4] * 2
    assert [prompt.token_ids for prompt in batch.prompts] == [[10, 11], [11, 11]]
    supervised = make_batch(sft(qwen3_dir, {}).module, path, processes=1)
    assert len(supervised.sequences) == 12
    assert supervised.sequences[1].loss_mask.tolist() == [False, False, True, True]


@pytest.mark.parametrize(
    ("responses", "changes", "message"),
    [
        (3, {}, r"3 responses to prompt 0, the module compares num_generations=4"),
        (4, {"response_ids": [500], "response_logprobs": [-1.0]}, "has token 500, the vocabulary of .* has 128"),
        (
            4,
            {"response_ids": [5] * 9000, "response_logprobs": [-1.0] * 9000},
            "9002 tokens > train.max_tokens_per_microbatch",
        ),
    ],
)
def test_recording_that_does_not_fit_the_module_is_refused(qwen3_dir, tmp_path, responses, changes, message):
    path = recording(tmp_path / "r.jsonl", 2, responses, **changes)
    with pytest.raises(ValueError, match=message):
        make_batch(grpo(qwen3_dir, {}).module, path, processes=1)
