"""A real streamed run selects nothing: every response that the engine has drawn is trained on, once."""

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_megatron_rl.data.prompts import PromptDataModule
from lightning_megatron_rl.modules.streaming import StreamingSettings
from lightning_megatron_rl.rollout import SamplingParams, VLLMEngine
from lightning_megatron_rl.rollout.protocol import Progress, StreamRequest
from tests.modules.runs import fit_grpo, length

BATCH, ROWS, SHORT, LONG = 4, 24, 4, 72
Drawn = tuple[tuple[int, ...], tuple[int, ...]]  # tokens of a prompt and of a response


class Telling(VLLMEngine):
    """vLLM with one long response in four; keeps what it has drawn."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.prompts: dict[str, tuple[int, ...]] = {}  # by group and place
        self.drawn: dict[str, list[int]] = {}
        self.complete: set[str] = set()

    def submit(self, requests: list[StreamRequest], params: SamplingParams) -> None:
        """Take responses in; those of every fourth group are long."""
        cut = []
        for request in requests:
            who = self._who(request.name)
            if who not in self.prompts:
                self.prompts[who], self.drawn[who] = tuple(request.token_ids), []
            done = len(request.token_ids) - len(self.prompts[who])
            limit = LONG if int(who.split("/")[0]) % 4 == 0 else SHORT
            cut.append(StreamRequest(request.name, request.token_ids, request.seed, limit - done))
        super().submit(cut, params)

    def collect(self, wait_s: float, *, everything: bool = False) -> list[Progress]:
        """Sample; keep what is new."""
        return self._keep(super().collect(wait_s, everything=everything))

    def withdraw(self) -> list[Progress]:
        """Stop; keep what is new."""
        return self._keep(super().withdraw())

    def _keep(self, news: list[Progress]) -> list[Progress]:
        for progress in news:
            who = self._who(progress.name)
            self.drawn[who] += progress.token_ids
            if progress.finish_reason is not None:
                self.complete.add(who)
        return news

    def _who(self, name: str) -> str:
        return "/".join(name.split("/")[:2])


class Trained(pl.Callback):
    """What each step is trained on, with its rewards."""

    def __init__(self) -> None:
        self.steps: list[list[tuple[Drawn, float]]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        self.steps.append(
            [
                ((tuple(sample.prompt.token_ids), tuple(sample.response_ids)), sample.reward)
                for sample in module.last_rollout.samples
            ]
        )


def fit_told(model: Path, rows: Path) -> tuple[list[Drawn], list[list[tuple[Drawn, float]]]]:
    """Return what was drawn, and what was trained on by step."""
    engine, trained = Telling(max_model_len=96, kv_cache_memory_gb=0.25, num_threads=1), Trained()
    try:
        fit_grpo(
            model,
            {},
            1,
            steps=ROWS // BATCH,
            module={
                "engine": engine,
                "streaming": StreamingSettings(2, placement="separate"),
                "sampling": SamplingParams(max_tokens=LONG, ignore_eos=True),
                "updates_per_rollout": 1,
            },
            loss={"correction": "tis"},
            rewards=[length],
            callbacks=[trained],
            trainer={"logger": False, "max_epochs": 1},
            data=PromptDataModule(str(rows), str(model), batch_size=BATCH),
        )
    finally:
        engine.close()
    assert engine.complete == set(engine.prompts)
    return [(engine.prompts[who], tuple(tokens)) for who, tokens in engine.drawn.items()], trained.steps


def test_every_response_is_trained_on_once(worker_pool, qwen3_dir, tmp_path):
    rows = tmp_path / "rows.jsonl"
    letters = "abcdefghijklmnopqrstuvwxyz"
    lines = [{"prompt": letters[row] * (2 + row % 9), "answer": "7"} for row in range(ROWS)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for _ in range(5):  # on a busy machine the sampler may have drawn all before the trainer looks
        options = {"world_size": 1, "init_process_group": False, "timeout": 240.0}
        drawn, steps = worker_pool.run(fit_told, qwen3_dir, rows, **options)[0]
        trained = [sample for step in steps for sample in step]
        assert sorted(pair for pair, _ in trained) == sorted(drawn)
        assert len({prompt for prompt, _ in drawn}) == ROWS
        assert {len(response) for _, response in drawn} == {SHORT, LONG}
        assert all(reward == 1 / len(response) for (_, response), reward in trained)
        if [pair for pair, _ in trained] != drawn:
            return  # short groups have overtaken long ones, which were begun before
    pytest.fail("no short group has overtaken a long one")
