"""Directories of runs as a run leaves them, written by the code that writes them in one, for tests."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.loggers.csv_logs import ExperimentWriter

from lightning_megatron_rl.rollout.record import record_line
from lightning_megatron_rl.sample import Prompt, Sample
from tests.tiny_models import SPECIAL_TOKENS, make_tokenizer

RUN_ID = "0123456789ab"


def healthy(step: int) -> dict[str, float]:
    """The metrics of a step of a run that nothing is wrong with."""
    return {
        "reward/mean": 0.3 + 0.3 * min(step / 50, 1.0) + 0.01 * (step % 3),
        "reward/min": 0.0,
        "reward/max": 1.0,
        "reward/zero_spread_frac": 0.2,
        "rollout/response_len_mean": 100.0 + step % 5,
        "rollout/response_len_max": 180.0 + step % 7,
        "rollout/truncated_frac": 0.01,
        "rollout/staleness_mean": 0.0,
        "mismatch/abs_logp_diff": 0.002,
        "mismatch/token_mult_prob_error": 1.002,
        "policy/entropy": 0.5 - 0.001 * min(step, 100),
        "policy/kl_ref": 0.0005 * min(step, 100),
        "policy/kl_old": 0.001,
        "time/rollout_s": 1.0 + 0.1 * (step % 4),
        "time/update_s": 2.0,
        "time/step_s": 3.5 + 0.1 * (step % 4),
        "time/start_s": 20.0 if step == 1 else 0.0,
        "perf/trainer_idle_frac": 0.3,
        "perf/sampler_idle_frac": 0.6,
        "perf/peak_mem_gb": 10.7,
    }


def write_run(
    directory: Path, num_steps: int = 30, metrics: Callable[[int], Mapping[str, float]] = healthy, **settings: Any
) -> Path:
    """Write metrics and settings of a run and return its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    writer = ExperimentWriter(str(directory))
    for step in range(1, num_steps + 1):
        writer.log_metrics(dict(metrics(step)), step)
    writer.log_hparams({"run_id": RUN_ID, "trainer": {"max_steps": num_steps}, "versions": {"torch": "2.11.0"}})
    writer.log_hparams(settings)
    writer.save()
    return directory


def write_samples(directory: Path, samples: Mapping[int, Sequence[Sample]], run_id: str = RUN_ID) -> Path:
    """Write samples by step as `RolloutSamples` does, and the tokenizer where a checkpoint has it."""
    file = directory / "samples" / "rollouts-dp0.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = (record_line(sample, step, run_id) for step, found in samples.items() for sample in found)
    file.write_text("".join(lines))
    make_tokenizer().save_pretrained(directory / "checkpoints" / "step-1.ckpt" / "hf")
    return file


def sample(text: str, reward: float = 0.0, *, cut: bool = False, prompt: str = "1+1=") -> Sample:
    """A response of printable characters, a token for each."""
    tokenizer = make_tokenizer()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    logprobs = [-0.1 * (place % 30) for place in range(len(ids))]
    return Sample(
        Prompt([len(SPECIAL_TOKENS)], prompt, answer="2", index=7),
        ids,
        logprobs,
        response=tokenizer.decode(ids, skip_special_tokens=True),
        finish_reason="length" if cut else "stop",
        rewards={"exact": reward},
        reward=reward,
    )


def write_facts(directory: Path, **facts: Any) -> None:
    """Write ``run.json``."""
    (directory / "run.json").write_text(json.dumps({"run": RUN_ID, **facts}))


def write_config(directory: Path, config: Any) -> None:
    """Write ``config.yaml``."""
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
