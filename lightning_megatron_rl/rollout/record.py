"""Samples as JSON lines and back: token ids out, token ids in, so that a recorded rollout can be trained on again."""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_megatron_rl.sample import Outcome, Prompt, Sample, Turn
from lightning_megatron_rl.utilities.text_files import parse_json, read_lines, user_path

STEP = re.compile(rb'\{"step": (\d+)[,}]')  # how each line begins


@dataclass(frozen=True)
class Origin:
    """What a run must start from for its record to be replayed."""

    model: str = ""  # fingerprint of the weights that the run was given
    seed: int | None = None


def record_line(sample: Sample, step: int, run_id: str = "", origin: Origin = Origin()) -> str:
    """Return one sample of `step` as a line of JSON."""
    record = {
        "step": step,  # first: `RecordFile` reads it without parsing the line
        "run": run_id,
        "model": origin.model,
        "seed": origin.seed,
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


class RecordedRun:
    """The rollouts of a run's training steps, as `RolloutSamples` wrote them.

    Args:
        path: File of the first replica, ``…/rollouts-dp0.jsonl``.
        replica: Whose rollouts they are.
        origin: What this run starts from.

    Raises:
        ValueError: The file is missing or empty, or is of another model or seed.
    """

    def __init__(self, path: str | Path, replica: int, origin: Origin) -> None:
        first = user_path(path)
        self.path = first.with_name(first.name.replace("-dp0", f"-dp{replica}"))
        if not self.path.is_file() or (replica and self.path == first):
            raise ValueError(
                f"{self.path}: no such file of replica {replica}. RolloutSamples writes rollouts-dp<replica>.jsonl for"
                " each replica of a run: name that of replica 0, and use the run's layout."
            )
        self._lines: dict[int, list[tuple[int, int, int]]] = {}  # by step: number, start and length of each line
        start = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if (found := STEP.match(line)) is not None:
                    self._lines.setdefault(int(found[1]), []).append((number, start, len(line)))
                start += len(line)
        if not self._lines:
            raise ValueError(f"{self.path} is empty: there is no rollout to replay.")
        self._check(origin)

    def _check(self, origin: Origin) -> None:
        (number, start, length), *_ = next(iter(self._lines.values()))
        record = _parse(self._read(start, length), f"{self.path}, line {number}")
        then = Origin(record.get("model", ""), record.get("seed"))
        if not then.model:
            raise ValueError(
                f"{self.path} does not say which model it is of: record the run with RolloutSamples of this version."
            )
        if then.model != origin.model:
            raise ValueError(
                f"{self.path} is of a model with the fingerprint {then.model[:12]}, this run's has {origin.model[:12]}:"
                " replay it with the model that the recorded run was given."
            )
        if then.seed != origin.seed:
            raise ValueError(
                f"{self.path} is of a run with seed {then.seed}, this run has {origin.seed}: set seed_everything to"
                f" {then.seed}."
            )

    def samples(self, step: int, count: int) -> list[Sample]:
        """Return the samples of the rollout that ended in `step`, in the order in which they were trained on.

        Raises:
            ValueError: There is none, or it has not `count` samples.
        """
        lines = self._lines.get(step, [])
        if not lines:
            steps = f"{min(self._lines)} to {max(self._lines)}"
            raise ValueError(
                f"{self.path} has no rollout of step {step}, it has those of steps {steps}: set max_steps."
            )
        if len(lines) != count:
            raise ValueError(
                f"{self.path} has {len(lines)} samples of step {step}, this run trains on {count} (data.batch_size /"
                " replicas x num_generations): use the run's settings, and record with max_samples_per_step=null and"
                " max_file_mb=null."
            )
        samples, prompts = [], dict[tuple[str, int], Prompt]()
        for number, start, length in lines:
            where = f"{self.path}, line {number}"
            sample = _sample(_parse(self._read(start, length), where), where)
            sample.prompt = prompts.setdefault((sample.prompt.dataset, sample.prompt.index), sample.prompt)
            samples.append(sample)
        return samples

    def _read(self, start: int, length: int) -> str:
        with self.path.open("rb") as file:
            file.seek(start)
            return file.read(length).decode()


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
