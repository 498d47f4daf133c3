"""Chooses samples of a run for the report, within limits, and cuts them into tokens."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from lightning_megatron_rl.report.embedding import embed
from lightning_megatron_rl.report.run import Run

if TYPE_CHECKING:
    from tokenizers import Tokenizer

KINDS = {"rollouts": "training", "evaluation": "validation"}  # by the beginning of the file's name
_STEP = re.compile(rb'\{"step": (\d+)[,}]')  # how each line begins
_MOST_STEPS = 60  # of each kind
_MOST_PER_STEP = 64
_MOST_PARSED = 64_000_000  # bytes of lines, of each kind
_HEAD, _TAIL = 3_072, 1_024  # tokens of a longer response that are shown
_LONGEST_TEXT = 20_000  # characters of a prompt or answer


@dataclass
class Samples:
    """Samples of one kind that were read.

    Attributes:
        kind: "training" or "validation".
        records: Of the chosen steps, as `RolloutSamples` wrote them.
        num_written: Samples that the files have.
        num_steps: Steps of these.
        notes: What was not read, and why.
    """

    kind: str
    records: list[dict[str, Any]] = field(default_factory=list)
    num_written: int = 0
    num_steps: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def steps(self) -> list[int]:
        """The steps that have samples here."""
        return sorted({record["step"] for record in self.records})


def read_samples(run: Run) -> list[Samples]:
    """Read samples of a run: of at most 60 evenly spread steps the first 64, fewer if they are long."""
    return [_read_kind(kind, find_files(run, prefix)) for prefix, kind in KINDS.items()]


def find_files(run: Run, prefix: str) -> list[Path]:
    """Return the run's files of samples: in ``samples``, or where its facts or its config say that they are."""
    told = run.facts.get("samples")
    others = [*(told if isinstance(told, list) else []), *_directories(run.config)]
    for directory in (run.path / "samples", *(Path(str(other)) for other in others)):
        files = sorted(directory.glob(f"{prefix}-dp*.jsonl"))
        found = [file for file in files if "superseded" not in file.name and _is_of(file, run.run_id)]
        if found:
            return found
    return []


def _directories(config: str) -> list[str]:
    """Return each `dirpath` of a config, with `~` expanded; none of one that cannot be read."""
    try:
        waiting = [yaml.safe_load(config)]
    except (yaml.YAMLError, RecursionError):
        return []
    found = []
    while waiting:
        settings = waiting.pop()
        if isinstance(settings, dict):
            found += [value for key, value in settings.items() if key == "dirpath" and isinstance(value, str)]
            waiting += settings.values()
        elif isinstance(settings, list):
            waiting += settings
    return [os.path.expanduser(directory) for directory in found]


def _is_of(file: Path, run_id: str) -> bool:
    """Whether a file is a run's, by its first line."""
    with file.open("rb") as lines:
        found = re.match(rb'\{"step": \d+, "run": "([^"]*)"', lines.readline(4_096))
    return not run_id or found is None or found[1].decode() == run_id


def _read_kind(kind: str, files: Sequence[Path]) -> Samples:
    found, lines = Samples(kind), dict[int, list[tuple[Path, int, int]]]()
    broken = 0
    for file in files:
        start = 0
        with file.open("rb") as stream:
            for line in stream:
                if (begin := _STEP.match(line)) and line.endswith(b"\n"):
                    lines.setdefault(int(begin[1]), []).append((file, start, len(line)))
                else:
                    broken += 1
                start += len(line)
    sizes = [size for places in lines.values() for _, _, size in places]
    found.num_written, found.num_steps = len(sizes), len(lines)
    chosen = spread(sorted(lines), _MOST_STEPS)
    room = _MOST_PARSED / max(len(chosen), 1)
    for step in chosen:
        read = 0
        for file, start, size in lines[step][:_MOST_PER_STEP]:
            read += size
            if read > room and read > size:
                break
            try:
                found.records.append(_parse(file, start, size))
            except (ValueError, KeyError, TypeError, RecursionError):
                broken += 1
    if broken:
        found.notes.append(f"{broken} line(s) of {kind} samples cannot be read, as after a write that was cut short.")
    return found


def spread(values: Sequence[int], most: int) -> list[int]:
    """Return at most `most` of the values, first and last among them, as evenly as it goes."""
    if len(values) <= most:
        return list(values)
    return [values[place] for place in np.linspace(0, len(values) - 1, most).astype(int)]


def _parse(file: Path, start: int, size: int) -> dict[str, Any]:
    with file.open("rb") as stream:
        stream.seek(start)
        record = json.loads(stream.read(size))
    float(record["reward"])
    if len(record["response_ids"]) != len(record["response_logprobs"]):
        raise ValueError("there is one log-prob for each token")
    return dict(record)


# ---- what the page shows ------------------------------------------------------------------------------------------


def show_samples(
    samples: Samples, run: int, tokenizer: "Tokenizer | None", most_bytes: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return samples as the page shows them, and what was left out.

    Each step has its first sample before any has its second.

    Args:
        samples: What was read.
        run: Number of the run on the page.
        tokenizer: Cuts responses into the texts of their tokens; without it these are numbers.
        most_bytes: Of JSON, as it is embedded.
    """
    ranks, order = dict[int, int](), []
    for place, record in enumerate(samples.records):
        ranks[record["step"]] = ranks.get(record["step"], -1) + 1
        order.append((ranks[record["step"]], place))
    shown, cut, room = [], 0, most_bytes
    for _, place in sorted(order):
        row = _show(samples.records[place], tokenizer)
        room -= len(embed(row).encode(errors="replace"))
        if room < 0:
            break
        cut += "cut" in row
        shown.append((place, {"run": run, "kind": samples.kind, **row}))
    notes = list(samples.notes)
    if len(shown) < samples.num_written:
        steps = len({row["step"] for _, row in shown})
        notes.append(
            f"{len(shown):,} of {samples.num_written:,} {samples.kind} samples are here, those of {steps:,} of"
            f" {samples.num_steps:,} steps: the first of each step, as many as the report has room for."
        )
    if cut:
        notes.append(
            f"{cut:,} {samples.kind} sample(s) are cut: of long responses the first {_HEAD:,} and the last {_TAIL:,}"
            f" tokens are here, of long prompts and answers {_LONGEST_TEXT:,} characters."
        )
    return [row for _, row in sorted(shown, key=lambda item: item[0])], notes


def _show(record: dict[str, Any], tokenizer: "Tokenizer | None") -> dict[str, Any]:
    ids, logprobs = record["response_ids"], record["response_logprobs"]
    pieces = cut_tokens(ids, tokenizer)
    row = {
        "step": record["step"],
        "name": f"{record.get('dataset', '')} {record.get('index', '')}".strip(),
        "reward": record["reward"],
        "rewards": record.get("rewards", {}),
        "errors": record.get("reward_errors", {}),
        "advantage": record.get("advantage", 0.0),
        "size": record.get("num_tokens", len(ids)),
        "finish": record.get("finish_reason", ""),
        "version": record.get("weight_version", 0),
        "prompt": _short(record.get("prompt")),
        "answer": _short(record.get("answer")),
        "response": record.get("response", ""),
        "turns": [[turn["start"], turn["stop"]] for turn in record.get("turns", [])],
        "outcome": record.get("outcome"),
    }
    if len(ids) > _HEAD + _TAIL:
        row["cut"] = [_HEAD, len(ids) - _TAIL]
        pieces, logprobs = [*pieces[:_HEAD], *pieces[-_TAIL:]], [*logprobs[:_HEAD], *logprobs[-_TAIL:]]
        row["response"] = row["response"][:_LONGEST_TEXT]
    elif row["prompt"] != (record.get("prompt") or "") or row["answer"] != (record.get("answer") or ""):
        row["cut"] = []
    if tokenizer is not None and tokenizer.decode(ids) == record.get("response"):
        del row["response"]  # the page puts it together
    return {**row, "pieces": pieces, "logprobs": [round(float(logprob), 2) for logprob in logprobs]}


def _short(text: Any) -> str:
    return str(text or "")[:_LONGEST_TEXT]


def cut_tokens(ids: Sequence[int], tokenizer: "Tokenizer | None") -> list[str]:
    """Return the text of each token; of those that share a character the last one has it.

    Without a tokenizer these are the numbers of the tokens.
    """
    if tokenizer is None:
        return [f"[{number}]" for number in ids]
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=False)
    try:
        return [stream.step(tokenizer, number) or "" for number in ids]
    except Exception:  # of the library's own kind: a tokenizer that is not the run's
        return [f"[{number}]" for number in ids]


def find_tokenizer(run: Run) -> "Tokenizer | None":
    """Return the tokenizer that a run names, or has beside its weights; None if there is no such file here."""
    from huggingface_hub import try_to_load_from_cache
    from tokenizers import Tokenizer

    model, data = (run.settings.get(name) or {} for name in ("model", "data"))
    names = [data.get("tokenizer_name"), model.get("model_path")]
    files = [Path(os.path.expanduser(name)) / "tokenizer.json" for name in names if isinstance(name, str)]
    for name in names:
        if isinstance(name, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", name):
            cached = try_to_load_from_cache(name, "tokenizer.json")
            files += [Path(cached)] if isinstance(cached, str) else []
    files += sorted(file for pattern in ("*/*", "*/*/hf") for file in run.path.glob(f"{pattern}/tokenizer.json"))
    for file in files:
        if file.is_file():
            try:
                return Tokenizer.from_file(str(file))
            except Exception:  # of the library's own kind
                continue
    return None
