"""`ReplayEngine`: answers with recorded samples, so that a rollout is the same for every layout and run."""

import time
from pathlib import Path

from lightning_megatron_rl.planner.needs import EngineNeeds
from lightning_megatron_rl.rollout.protocol import (
    Generation,
    GenerationRequest,
    RolloutEngine,
    SamplingParams,
    SyncReport,
)
from lightning_megatron_rl.rollout.record import Origin, RecordedRun
from lightning_megatron_rl.sample import Sample
from lightning_megatron_rl.weights.source import WeightSource


class ReplayEngine(RolloutEngine):
    """Answers each prompt with its recorded responses, whatever the weights; or replays a whole run.

    It takes weights as any engine does and keeps none; nothing is started. A prompt is known by its token ids. An
    episode is answered whole, with the environment's recorded replies: the module has no environment then.

    With `path` each step gets the very rollout that the recorded run trained on, rewards included, also of a run that
    sampled ahead: the trainer then makes the same weights, bit for bit on the same machine and layout. The prompts of
    the data loader, the module's rewards and its environment are not used.

    Args:
        samples: Responses to replay; those to one prompt in the order in which they will be given.
        path: File that `RolloutSamples` wrote for the first replica of a run, instead.

    Raises:
        ValueError: Neither of them, or both; when sampling, for a prompt without (enough) responses.
    """

    def __init__(self, samples: list[Sample] | None = None, path: str | None = None) -> None:
        if (samples is None) == (path is None):
            raise ValueError("ReplayEngine takes either samples or path: the responses to prompts, or a run's record")
        self.weight_version = 0
        self.sleep_level = 0
        self.tensor_parallel_size = 1
        self.is_collective = False
        self.replays_run = path is not None
        self.path = path
        self._run: RecordedRun | None = None
        self.max_model_len = max(
            (len(sample.prompt.token_ids) + len(sample.response_ids) for sample in samples or ()), default=0
        )
        self._generations: dict[tuple[int, ...], list[Generation]] = {}
        for sample in samples or ():
            generation = Generation(
                sample.response_ids,
                sample.response_logprobs,
                sample.finish_reason,
                tuple(sample.turns),
                sample.outcome,
            )
            self._generations.setdefault(tuple(sample.prompt.token_ids), []).append(generation)

    def open_run(self, replica: int, origin: Origin) -> None:
        """Find the record of this replica and check that it is of the same start.

        Raises:
            ValueError: It is not there, or of another model or seed.
        """
        assert self.path is not None
        self._run = RecordedRun(self.path, replica, origin)

    def rollout(self, step: int, count: int) -> list[Sample]:
        """Return the rewarded samples that the recorded run trained on in the step from `step` to the next.

        Raises:
            ValueError: There are none, or not `count`.
        """
        assert self._run is not None, "open_run() was called"
        return self._run.samples(step + 1, count)

    def describe_needs(self) -> EngineNeeds | None:
        """It takes no GPU."""
        return EngineNeeds(device="cpu")

    def start(self, model_path: str | Path) -> None:
        """Nothing to load."""

    def wait_ready(self) -> None:
        """Ready at once."""

    def generate(self, requests: list[GenerationRequest], params: SamplingParams) -> list[list[Generation]]:
        """Return the first `num_generations` recorded responses to each prompt."""
        if self.replays_run:
            raise ValueError(
                f"ReplayEngine(path={self.path!r}) has the rollouts of training alone: leave validation out"
                " (trainer.limit_val_batches: 0)."
            )
        answers = []
        for number, request in enumerate(requests):
            known = self._generations.get(tuple(request.token_ids), [])
            if len(known) < request.num_generations:
                raise ValueError(
                    f"request {number}: {request.num_generations} responses asked for, {len(known)} were recorded for"
                    f" the prompt {request.token_ids[:8]}…: replay the prompts of the recorded rollout, with at most as"
                    " many generations."
                )
            answers.append(known[: request.num_generations])
        return answers

    def update_weights(self, source: WeightSource, version: int) -> SyncReport:
        """Run through the weights, whose export is a collective of the trainer's ranks, and take their version."""
        started = time.perf_counter()
        num_bytes = sum(tensor.numel() * tensor.itemsize for _, tensor in source.tensors())
        self.weight_version = version
        return SyncReport(num_bytes, time.perf_counter() - started, extra_bytes=0, transport="none")

    def let_go(self) -> None:
        """Nothing is read later."""

    def sleep(self, level: int = 1) -> int:
        """Nothing to free."""
        return 0

    def wake(self, tags: list[str] | None = None) -> None:
        """Awake at all times."""

    def close(self) -> None:
        """Nothing to end."""


class RecordedReward:
    """Gives each replayed sample the reward that was recorded for it.

    Args:
        samples: The samples that `ReplayEngine` answers with.
    """

    def __init__(self, samples: list[Sample]) -> None:
        self._rewards = {_key(sample): sample.reward for sample in reversed(samples)}

    def __call__(self, samples: list[Sample]) -> list[float]:
        """Look up the rewards by token ids."""
        return [self._rewards[_key(sample)] for sample in samples]


def _key(sample: Sample) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(sample.prompt.token_ids), tuple(sample.response_ids)
