"""Samples as JSON lines and back: token ids out, token ids in, so that a recorded rollout can be trained on again."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_megatron_rl.sample import Outcome, Prompt, Sample, Turn
from lightning_megatron_rl.utilities.text_files import parse_json, read_lines, user_path


def record_line(sample: Sample, step: int, run_id: str = "") -> str:
    """Return one sample of `step` as a line of JSON."""
    record = {
        "step": step,  # first: `RecordFile` reads it without parsing the line
        "run": run_id,
        "dataset": sample.prompt.dataset,
        "index": sample.prompt.index,
        "prompt": sample.prompt.text,
        "response": sample.response,
        "answer": sample.prompt.answer,
        "reward": sample.reward,
        "rewards": sample.rewards,
        "reward_errors": sample.reward_errors,
        "advantage": sample.advantage,
        "finish_reason": sample.finish_reason,
        "num_tokens": len(sample.policy_ids),
        "weight_version": sample.weight_version,
        "segments": sample.segments,
        "prompt_ids": sample.prompt.token_ids,
        "response_ids": sample.response_ids,
        "response_logprobs": sample.response_logprobs,
        "turns": [asdict(turn) for turn in sample.turns],
        "outcome": None if sample.outcome is None else asdict(sample.outcome),
    }
    return json.dumps(record) + "\n"


def read_first_step(path: str | Path) -> list[Sample]:
    """Return the samples of the first step that a file of such lines holds, in their order.

    Raises:
        ValueError: The file is missing or empty, or a line is not a sample: with its number and what is wrong.
    """
    if not user_path(path).exists():
        raise ValueError(f"{path}: no such file. RolloutSamples writes rollouts-dp<replica>.jsonl while a run trains.")
    samples: list[Sample] = []
    first_step: Any = None
    for number, line in read_lines(path):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        record = _parse(line, where)
        if first_step is None:
            first_step = record["step"]
        if record["step"] != first_step:
            break
        samples.append(_sample(record, where))
    if not samples:
        raise ValueError(f"{path} is empty: there is no rollout to replay.")
    return samples


def _parse(line: str, where: str) -> dict[str, Any]:
    record = parse_json(line, where)
    if not isinstance(record, dict):
        raise ValueError(f"{where}: {type(record).__name__} where an object with the columns of a sample was expected.")
    needed = ("step", "index", "prompt_ids", "response_ids", "response_logprobs", "reward")
    if missing := [name for name in needed if name not in record]:
        raise ValueError(
            f"{where}: no {', '.join(missing)}; there are {', '.join(record) or 'no columns'}. Record the rollout with"
            " the RolloutSamples callback of this version."
        )
    return record


def _sample(record: dict[str, Any], where: str) -> Sample:
    for name, kinds in (("prompt_ids", (int,)), ("response_ids", (int,)), ("response_logprobs", (int, float))):
        values = record[name]
        if not isinstance(values, list) or not all(type(value) in kinds for value in values):
            what = "log-probs" if float in kinds else "token ids"
            raise ValueError(f"{where}: {name} is not a list of {what}: {str(values)[:60]}")
    if not record["prompt_ids"]:
        raise ValueError(f"{where}: prompt_ids is empty, but nothing would predict the first token of the response.")
    if len(record["response_ids"]) != len(record["response_logprobs"]):
        raise ValueError(
            f"{where}: {len(record['response_ids'])} response_ids, but {len(record['response_logprobs'])}"
            " response_logprobs: there is one for each token."
        )
    if type(record["reward"]) not in (int, float):
        raise ValueError(f"{where}: reward is {record['reward']!r}, not a number.")
    prompt = Prompt(
        token_ids=record["prompt_ids"],
        text=record.get("prompt", ""),
        answer=record.get("answer"),
        index=record["index"],
        dataset=record.get("dataset", "train"),
    )
    return Sample(
        prompt=prompt,
        response_ids=record["response_ids"],
        response_logprobs=record["response_logprobs"],
        response=record.get("response", ""),
        finish_reason=record.get("finish_reason", "stop"),
        weight_version=record.get("weight_version", 0),
        rewards=record.get("rewards", {}),
        reward_errors=record.get("reward_errors", {}),
        reward=float(record["reward"]),
        advantage=record.get("advantage", 0.0),
        turns=_turns(record.get("turns", []), len(record["response_ids"]), where),
        outcome=_outcome(record.get("outcome"), where),
        segments=_segments(record.get("segments", []), len(record["response_ids"]), where),
    )


def _turns(rows: Any, num_tokens: int, where: str) -> list[Turn]:
    """Return the turns of an episode, which follow each other within the response."""
    try:
        turns = [Turn(**row) for row in rows]
        borders = [border for turn in turns for border in (turn.start, turn.stop)]
        ordered = borders == sorted(borders) and all(type(border) is int for border in borders)
        if not ordered or not all(0 <= border <= num_tokens for border in borders):
            raise ValueError(f"turns at {borders} of {num_tokens} tokens")
        return turns
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: turns is not a list of turns that follow each other: {error}.") from error


def _segments(rows: Any, num_tokens: int, where: str) -> list[tuple[int, int]]:
    """Return the versions of the weights that drew a response, end to end."""
    try:
        segments = [(version, count) for version, count in rows]
        counts = [count for _, count in segments]
        if segments and sum(counts) != num_tokens:
            raise ValueError(f"{counts} tokens of {num_tokens}")
        return segments
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: segments is not a list of versions with their tokens: {error}.") from error


def _outcome(row: Any, where: str) -> Outcome | None:
    try:
        return None if row is None else Outcome(**row)
    except TypeError as error:
        raise ValueError(f"{where}: outcome is not that of an episode: {error}.") from error
