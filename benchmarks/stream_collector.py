"""What collecting a stream of rollouts costs the trainer: ``python benchmarks/stream_collector.py``.

A sampler works all the time in a process of its own (placement "separate"). The same update of the tiny model on a CPU
is timed by turns with and without the thread that hands out prompts, takes in tokens and rewards groups. The sampler
goes on in both, and what it has drawn meanwhile waits for the thread. In the end everything is taken out of the sampler
and the update is timed alone. Trainer and sampler have a thread each. The goal: at most 2 % of the update.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import (
    RESULTS,
    SHAPES,
    TokenPrompts,
    facts,
    make_optimizer,
    make_trainer,
    run_child,
    summary,
    token_reward,
    write_json,
    write_model,
)

GOAL = 0.02
PROMPT_TOKENS, TOKENS, GENERATIONS = 16, 1024, 8
CONDITIONS = ("collected", "not collected")


class Beside:
    """A stream that samples beside the trainer and is never short of prompts.

    Args:
        model: Its directory.
        groups: Groups under way.
    """

    def __init__(self, model: Path, groups: int) -> None:
        from transformers import AutoTokenizer

        from lightning_megatron_rl.rollout import SamplingParams, VLLMEngine
        from lightning_megatron_rl.rollout.protocol import StreamMode
        from lightning_megatron_rl.rollout.stream import StreamPlan
        from lightning_megatron_rl.rollout.streaming import RolloutStream
        from lightning_megatron_rl.sample import Prompt

        tokenizer = AutoTokenizer.from_pretrained(model)
        self.engine = VLLMEngine(
            max_model_len=PROMPT_TOKENS + TOKENS + 1,
            max_num_seqs=groups * GENERATIONS,
            kv_cache_memory_gb=1.0,
            num_threads=1,
            device="cpu",
        )
        self.engine.stream_mode = StreamMode(background=True)
        self.engine.start(model)
        self.engine.wait_ready()
        bound = 10_000  # of groups: nothing takes them, they only become more
        self.stream = RolloutStream(
            self.engine,
            StreamPlan(1, bound, groups, GENERATIONS),
            SamplingParams(max_tokens=TOKENS),  # random weights end a response with one token in 512
            tokenizer=tokenizer,
            seed=1,
            reward=_reward,
            background=True,
        )
        rows = TokenPrompts(bound, PROMPT_TOKENS, SHAPES["tiny"]["vocab_size"])()
        self._prompts = [
            Prompt(tokenizer.encode(row["prompt"], add_special_tokens=False), row["prompt"], index=index)
            for index, row in enumerate(rows)
        ]

    def begin(self) -> None:
        """Wait for the first group; from then on the thread works."""
        self.stream.next_batch(self._prompts, 0)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let the thread do nothing; it is not in the middle of anything when this begins."""
        with self.stream._lock:
            self.stream._is_held = True
        try:
            yield
        finally:
            self.stream._is_held = False

    def close(self) -> None:
        """End both."""
        self.stream.close()
        self.engine.close()


def _reward(samples: list[Any]) -> None:
    for sample in samples:
        sample.reward = token_reward(sample.response_ids)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of updates by condition."""
    import torch

    from lightning_megatron_rl.data.packing import TokenSequence
    from lightning_megatron_rl.modules.sft import SFTModule, token_nll
    from lightning_megatron_rl.modules.training import TrainingSettings

    found: dict[str, Any] = {}

    class Measured(SFTModule):
        """Times its update instead of training."""

        def training_step(self, sequences: list[TokenSequence], batch_idx: int) -> torch.Tensor:
            def timed(name: str) -> None:
                began, worked = time.perf_counter(), time.process_time()
                self.update(sequences, token_nll)
                cpu_seconds[name].append(time.process_time() - worked)  # of all threads
                seconds[name].append(time.perf_counter() - began)

            for _ in range(2):
                self.update(sequences, token_nll)
            beside.begin()
            seconds: dict[str, list[float]] = {name: [] for name in (*CONDITIONS, "alone")}
            cpu_seconds: dict[str, list[float]] = {name: [] for name in seconds}
            plan = beside.stream.plan
            first = plan.num_born
            for pair in range(options.pairs):
                for name in CONDITIONS[:: 1 if pair % 2 else -1]:  # whoever comes first is no better off
                    if name == CONDITIONS[0]:
                        timed(name)
                    else:
                        with beside.held():
                            timed(name)
            found["groups_begun"], found["groups_ready"] = plan.num_born - first, len(plan.ready)
            found["under_way"] = len(plan.under_way)
            beside.stream.put_away()
            for _ in range(options.pairs):
                timed("alone")
            found["seconds"], found["cpu_seconds"] = seconds, cpu_seconds
            return super().training_step(sequences, batch_idx)

    with tempfile.TemporaryDirectory() as directory:
        model = write_model(Path(directory) / "model", "tiny")
        beside = Beside(model, options.groups)
        try:
            generator = torch.Generator().manual_seed(0)
            sequences = [
                TokenSequence(
                    torch.randint(3, SHAPES["tiny"]["vocab_size"], (options.length,), generator=generator),
                    torch.arange(options.length) >= PROMPT_TOKENS,
                    {},
                )
                for _ in range(options.sequences)
            ]
            train = TrainingSettings(optimizer=make_optimizer(1e-6, "fp32"), max_tokens_per_microbatch=2048)
            trainer = make_trainer("cpu", max_steps=1, callbacks=[], precision="32-true")
            loader = torch.utils.data.DataLoader(sequences, batch_size=len(sequences), collate_fn=list)  # type: ignore[arg-type]
            trainer.fit(Measured(str(model), train=train), loader)
        finally:
            beside.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=12, help="updates of each condition")
    parser.add_argument("--groups", type=int, default=8, help=f"under way at a time, of {GENERATIONS} responses each")
    parser.add_argument("--sequences", type=int, default=8, help="of an update")
    parser.add_argument("--length", type=int, default=512, help="of each of them, in tokens")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS / "stream_collector_cpu.json")
    options = parser.parse_args()
    if options.run:
        print(json.dumps(measure(options)))
        return
    os.environ["OMP_NUM_THREADS"] = "1"  # a core for each of them; torch reads it when it is imported
    given = ("pairs", "groups", "sequences", "length")
    arguments = [f"--{name}={getattr(options, name)}" for name in given]
    found = run_child("stream_collector.py", ["--run", *arguments], options.timeout)
    with_it, without = (found["seconds"][name] for name in CONDITIONS)
    # pairs stand next to each other in time: what else the machine does is in both
    more = [one / other - 1 for one, other in zip(with_it, without, strict=True)]
    # what other processes take from the machine is not in this one
    cpu_with_it, cpu_without = (statistics.median(found["cpu_seconds"][name]) for name in CONDITIONS)
    cost = {
        "median_of_pairs": statistics.median(more),
        "of_medians": statistics.median(with_it) / statistics.median(without) - 1,
        "cpu": cpu_with_it / cpu_without - 1,
    }
    result = {
        **facts("cpu"),
        "benchmark": "cost of collecting a stream",
        "goal": GOAL,
        "cost": cost,
        "pairs": more,
        **found,
        **{kind: {name: summary(v) for name, v in found[kind].items()} for kind in ("seconds", "cpu_seconds")},
    }
    write_json(options.out, result)
    print({name: f"{value:.2%}" for name, value in cost.items()}, f"goal {GOAL:.0%}")


if __name__ == "__main__":
    main()
