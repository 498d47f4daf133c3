"""One side of B4: GRPO on prompts whose responses have given lengths, synchronous or with a stream of rollouts.

Used by long_tail.py, in a process of its own; prints one line of JSON.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
from common import (
    RECOMPUTE,
    SHAPES,
    StepLog,
    TokenPrompts,
    add_model_arguments,
    default_device,
    make_optimizer,
    make_trainer,
    model_arguments,
    model_directory,
    own_device,
    prepare,
    summary,
    synchronize,
    token_reward,
    write_model,
)
from gpus import visible
from lightning.pytorch.utilities import rank_zero_only
from response_lengths import Group, LongTail, work
from servers import serve

from lightning_megatron_rl.rollout import Generation, GenerationRequest, SamplingParams, VLLMEngine
from lightning_megatron_rl.rollout.protocol import StreamRequest
from lightning_megatron_rl.rollout.servers.engine import VLLMServers

NUMBERS = ("device", "shape", "precision", "steps", "warmup", "drain", "groups", "generations", "prompt_tokens")
NUMBERS += ("longest", "max_tokens", "cache_gb")
PHASES = ("rollout", "weight_sync", "reward", "old_logp", "update")
START_S = 600  # deadline of a sampler's start
CORES = "LIGHTNING_MEGATRON_RL_BENCHMARK_CORES"  # variable with the CPU cores of all ranks


class LengthsByPrompt:
    """How long responses are.

    Args:
        lengths: Of responses, by their prompts.
        prompt_tokens: Of each prompt; what a request has besides was sampled before.
    """

    def __init__(self, lengths: LongTail, prompt_tokens: int) -> None:
        self.lengths, self.prompt_tokens = lengths, prompt_tokens

    def limit(self, requests: list[StreamRequest]) -> list[StreamRequest]:
        """Return requests for what is left of each response's length."""
        return [self._limit(request) for request in requests]

    def _limit(self, request: StreamRequest) -> StreamRequest:
        prompt, place = request.token_ids[: self.prompt_tokens], int(request.name.split("/")[1])
        left = self.lengths(prompt, place) - (len(request.token_ids) - self.prompt_tokens)
        return StreamRequest(request.name, request.token_ids, request.seed, min(left, request.max_tokens))


class LongTailServers(VLLMServers):
    """Servers, whose responses end at given lengths.

    Args:
        given: The lengths.
        **settings: Of `VLLMServers`.
    """

    def __init__(self, given: LengthsByPrompt, **settings: Any) -> None:
        super().__init__(**settings)
        self.given = given

    def submit(self, requests: list[StreamRequest], params: SamplingParams) -> None:
        """Take responses in, each with what is left of its length."""
        super().submit(self.given.limit(requests), params)


class LongTailEngine(VLLMEngine):
    """vLLM, whose responses end at given lengths.

    Args:
        given: The lengths.
        core: CPU core of the process; None: those of the trainer.
        **settings: Of `VLLMEngine`.
    """

    def __init__(self, given: LengthsByPrompt, core: int | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.given, self.core = given, core

    def start(self, model_path: str | Path) -> None:
        """Start the process, on its core."""
        own = os.sched_getaffinity(0)
        if self.core is not None:
            os.sched_setaffinity(0, {self.core})  # which the process inherits
        try:
            super().start(model_path)
        finally:
            os.sched_setaffinity(0, own)

    def submit(self, requests: list[StreamRequest], params: SamplingParams) -> None:
        """Take responses in, each with what is left of its length."""
        super().submit(self.given.limit(requests), params)

    def generate(self, requests: list[GenerationRequest], params: SamplingParams) -> list[list[Generation]]:
        """Sample responses that have their lengths, with the seeds that they would have had."""
        alone = [
            GenerationRequest(request.token_ids, request.seed + place, 1, self.given.lengths(request.token_ids, place))
            for request in requests
            for place in range(request.num_generations)
        ]
        sampled = iter(super().generate(alone, params))
        return [[next(sampled)[0] for _ in range(request.num_generations)] for request in requests]


class Rate(pl.Callback):
    """Measures before the first step how fast the engine samples, for the simulation.

    Args:
        sequences: Numbers of sequences that are sampled at a time.
        vocab_size: Of the prompts' tokens.
    """

    def __init__(self, sequences: Sequence[int], vocab_size: int) -> None:
        self.sequences, self.vocab_size = sequences, vocab_size
        self.token_s: list[float] = []
        self._calls = 0
        self.context_token_s = 0.0
        self.prefill_tokens_per_s = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.engine.wait_ready()
        pl_module.sampler.sync(0)
        engine: LongTailEngine = pl_module.engine
        longest, prompt = engine.given.lengths.longest, engine.given.prompt_tokens
        few, many = max(2, longest // 24), max(6, longest // 6)
        self._seconds(engine, max(self.sequences), prompt, few)
        for count in self.sequences:
            started = self._seconds(engine, count, prompt, few)
            self.token_s.append((self._seconds(engine, count, prompt, many) - started) / (many - few))
        # as many sequences as before with half of the longest response behind each prompt
        count = self.sequences[len(self.sequences) // 2]
        behind = longest // 2
        started = self._seconds(engine, count, prompt + behind, few)
        token_s = (self._seconds(engine, count, prompt + behind, many) - started) / (many - few)
        self.context_token_s = max(0.0, token_s - self.token_s[self.sequences.index(count)]) / (count * behind)
        had = prompt + (few + many) / 2  # of each sequence, while its tokens were timed
        self.token_s = [
            seconds - self.context_token_s * number * had
            for number, seconds in zip(self.sequences, self.token_s, strict=True)
        ]
        tokens = prompt + longest // 4
        self.prefill_tokens_per_s = 16 * tokens / self._seconds(engine, 16, tokens, 1)
        pl_module.report.phase_seconds.clear()  # the first step's own

    def _seconds(self, engine: LongTailEngine, count: int, prompt_tokens: int, tokens: int) -> float:
        self._calls += 1  # the cache of prompts that came before would be used again
        generator = torch.Generator().manual_seed(self._calls)
        prompts = torch.randint(3, self.vocab_size, (count, prompt_tokens), generator=generator).tolist()
        requests = [GenerationRequest(prompt, place, max_tokens=tokens) for place, prompt in enumerate(prompts)]
        params = SamplingParams(max_tokens=engine.given.lengths.longest, ignore_eos=True)
        started = time.perf_counter()
        VLLMEngine.generate(engine, requests, params)
        return time.perf_counter() - started


class Steps(pl.Callback):
    """Takes the time at each step's end, and what was trained on; refuses responses of other lengths."""

    def __init__(self, lengths: LongTail, device: torch.device) -> None:
        self.lengths, self.device = lengths, device
        self.ends: list[float] = []
        self.response_tokens: list[int] = []  # by step; of all replicas in the end
        self.groups: list[Group] = []  # of all replicas in the end

    def on_train_start(self, *_: Any) -> None:
        self._take_time()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self._take_time()
        samples, count = pl_module.last_rollout.samples, pl_module.num_generations
        self.response_tokens.append(sum(len(sample.response_ids) for sample in samples))
        for start in range(0, len(samples), count):
            group = samples[start : start + count]
            prompt, found = group[0].prompt.token_ids, [len(sample.response_ids) for sample in group]
            wanted = [self.lengths(prompt, place) for place in range(count)]
            if found != wanted:
                raise RuntimeError(f"responses of {found} tokens, which should have {wanted}")
            self.groups.append((prompt, found))

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        parts: list[Any] = [None] * trainer.world_size
        torch.distributed.all_gather_object(parts, (self.groups, self.response_tokens))
        self.groups = [group for groups, _ in parts for group in groups]
        self.response_tokens = [sum(tokens) for tokens in zip(*(tokens for _, tokens in parts), strict=True)]

    def _take_time(self) -> None:
        synchronize(self.device)
        self.ends.append(time.perf_counter())


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run an epoch, on servers if there are to be some, and return its times and the work that was done."""
    on_cuda, cores = options.device == "cuda", cores_of_all_ranks()
    own = cores  # before torch starts threads
    if not on_cuda and options.placement == "separate":
        own = cores[:1]
    elif not on_cuda and options.devices > 1:  # of a replica's trainer and sampler
        place = int(os.environ.get("LOCAL_RANK", 0))
        own = cores[place :: options.devices] or cores
    os.sched_setaffinity(0, own)
    prepare(options.device, options.shape)
    directory = model_directory(options.model, Path(tempfile.mkdtemp()))
    write_model(directory, options.shape)
    if on_cuda:
        torch.cuda.empty_cache()
    samplers = cores[1:] if not on_cuda and options.placement == "separate" else None
    if not options.servers:
        return run_epoch(options, directory, make_engine(options, [], samplers))
    sizes = [f"--device={options.device}", f"--max-model-len={longest(options)}"]
    sizes += [f"--max-num-seqs={options.most_in_flight * options.generations}"]
    sizes += [f"--kv-cache-memory-gb={options.cache_gb / options.servers}", *([] if on_cuda else ["--num-threads=1"])]
    os.sched_setaffinity(0, samplers or own)
    with serve(directory, sizes, visible() if on_cuda else [], options.devices, options.servers, START_S) as found:
        os.sched_setaffinity(0, own)
        os.environ.update(found.environment)
        return run_epoch(options, directory, make_engine(options, found.urls, samplers))


def cores_of_all_ranks() -> list[int]:
    """Return the CPU cores that the first process was given; those that it starts inherit its own."""
    given = os.environ.setdefault(CORES, ",".join(map(str, sorted(os.sched_getaffinity(0)))))
    return [int(core) for core in given.split(",")]


def longest(options: argparse.Namespace) -> int:
    """Return the tokens of prompt and response, and one more."""
    return int(options.prompt_tokens + options.longest + 1)


def make_engine(
    options: argparse.Namespace, urls: list[str], cores: list[int] | None
) -> LongTailEngine | LongTailServers:
    """Return the sampler: servers, or a process on the trainer's device, on the one behind it, or on other cores."""
    given = LengthsByPrompt(LongTail(options.longest), options.prompt_tokens)
    on_cuda = options.device == "cuda"
    if urls:
        over: Any = "nccl" if on_cuda else "auto"
        return LongTailServers(given, urls=urls, max_model_len=longest(options), weights_over=over)
    return LongTailEngine(
        given,
        core=None if cores is None else cores[0],
        max_model_len=longest(options),
        max_num_seqs=options.most_in_flight * options.generations,
        kv_cache_memory_gb=options.cache_gb,
        devices=[1] if on_cuda and options.placement == "separate" else None,
        start_timeout_s=START_S,
    )


def run_epoch(options: argparse.Namespace, directory: Path, engine: LongTailEngine | LongTailServers) -> dict[str, Any]:
    """Run an epoch and return its times and the work that was done."""
    from lightning_megatron_rl.data.prompts import PromptDataModule
    from lightning_megatron_rl.modules.grpo import GRPOModule
    from lightning_megatron_rl.modules.streaming import StreamingSettings
    from lightning_megatron_rl.modules.training import TrainingSettings

    separate = options.placement == "separate"
    device = own_device(options.device)
    lengths, vocab_size = LongTail(options.longest), SHAPES[options.shape]["vocab_size"]
    streaming = StreamingSettings(
        options.bound,
        in_flight=options.in_flight if options.bound else None,
        on_update=options.on_update,
        placement=cast("Any", options.placement) if options.bound else "auto",
        batch_parts=options.parts,
    )
    module = GRPOModule(
        str(directory),
        rewards=[lambda samples: [token_reward(sample.response_ids) for sample in samples]],
        num_generations=options.generations,
        engine=engine,
        streaming=streaming,
        sampling=SamplingParams(max_tokens=options.longest, ignore_eos=True),
        train=TrainingSettings(
            optimizer=make_optimizer(1e-6, options.moments),
            max_tokens_per_microbatch=options.max_tokens,
            model_config=dict(RECOMPUTE) if options.recompute else {},
        ),
    )
    steps = options.warmup + options.steps + options.drain
    data = PromptDataModule(
        TokenPrompts(options.groups * steps, options.prompt_tokens, vocab_size),
        tokenizer=str(directory),
        batch_size=options.groups,
        answer_column=None,
        add_special_tokens=False,
        shuffle=False,
    )
    log, taken = StepLog(device), Steps(lengths, device)
    rate = Rate(options.rates, vocab_size) if options.rates else None
    trainer = make_trainer(
        options.device,
        devices=options.devices,
        max_steps=steps,
        callbacks=[*([rate] if rate else []), log, taken],
        precision=options.precision,
    )
    trainer.fit(module, data)
    restarts = engine.num_restarts
    module.close_engine()
    if restarts:
        raise RuntimeError(f"the engine was restarted {restarts} times: its times are no measurement")
    seconds = [later - earlier for earlier, later in pairwise(taken.ends)]
    kept = slice(options.warmup, options.warmup + options.steps)
    logged, samples = log.steps[kept], options.groups * options.generations
    return {
        "max_staleness": options.bound,
        "placement": options.placement if options.bound else None,
        "on_update": options.on_update,
        "servers": options.servers,
        "parts": options.parts,
        "devices": options.devices,
        "in_flight": options.in_flight if options.bound else options.groups,
        "samples_per_s": samples * options.steps / sum(seconds[kept]),
        "step_s": summary(seconds[kept]),
        "epoch_s": sum(seconds[options.warmup :]),
        "seconds": seconds,
        "phases": {name: summary([step.get(f"time/{name}_s", 0.0) for step in logged]) for name in PHASES},
        "trainer_idle": trainer_idle(logged),
        "sampler_idle": sampler_idle(logged, separate=separate),
        "staleness_max": max(step["rollout/staleness_max"] for step in log.steps),
        "staleness_mean": sum(step["rollout/staleness_mean"] for step in logged) / len(logged),
        "partial": sum(step["rollout/partial_frac"] for step in logged) / len(logged),
        "mismatch": [step["mismatch/abs_logp_diff"] for step in log.steps],
        "rates": None
        if rate is None
        else {
            "sequences": list(rate.sequences),
            "token_s": rate.token_s,
            "context_token_s": rate.context_token_s,
            "prefill_tokens_per_s": rate.prefill_tokens_per_s,
        },
        "train_s": (sum(seconds[kept]) - sum(step["time/rollout_s"] for step in logged)) / options.steps,
        "sampler_tokens_per_s": [step.get("perf/sampler_tokens_per_s") for step in logged],  # while it samples
        "work": work(taken.groups),
        "response_tokens_per_step": taken.response_tokens,
    }


def trainer_idle(steps: list[dict[str, float]]) -> float:
    """Return the share of the steps in which the trainer waits for samples."""
    waits = [step.get("perf/trainer_idle_frac", step["time/rollout_s"] / step["time/step_s"]) for step in steps]
    return sum(waits) / len(waits)


def sampler_idle(steps: list[dict[str, float]], *, separate: bool) -> float | None:
    """Return the share of the steps in which the sampler has nothing to do; None where nobody has told it."""
    if all("perf/sampler_idle_frac" in step for step in steps):
        return sum(step["perf/sampler_idle_frac"] for step in steps) / len(steps)
    return None if separate else 1.0 - trainer_idle(steps)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what all sides are told."""
    on_cuda = default_device() == "cuda"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default_device())
    parser.add_argument("--shape", choices=tuple(SHAPES), default="1.7b" if on_cuda else "tiny")
    parser.add_argument("--precision", default="bf16-mixed" if on_cuda else "32-true")
    parser.add_argument("--steps", type=int, default=8, help="that are measured")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--drain", type=int, default=4, help="steps behind them, in the last of which nothing is begun")
    parser.add_argument("--groups", type=int, default=16, help="prompts of a batch")
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=128 if on_cuda else 16)
    parser.add_argument("--longest", type=int, default=3900 if on_cuda else 104, help="tokens of the longest response")
    parser.add_argument("--max-tokens", type=int, default=16_384 if on_cuda else 2048, help="per micro-batch")
    parser.add_argument("--cache-gb", type=float, default=24.0 if on_cuda else 0.5, help="key/value cache. GiB")
    add_model_arguments(parser)


def passed_on(options: argparse.Namespace) -> list[str]:
    """Return the command line of one side."""
    return [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in NUMBERS] + model_arguments(options)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    add_arguments(arguments)
    arguments.add_argument("--bound", type=int, default=0, help="max_staleness")
    arguments.add_argument("--placement", choices=("shared", "separate"), default="shared")
    arguments.add_argument("--in-flight", type=int, help="groups sampled at a time")
    arguments.add_argument("--most-in-flight", type=int, required=True, help="of all sides")
    arguments.add_argument("--devices", type=int, default=1, help="of the trainer")
    arguments.add_argument("--servers", type=int, default=0, help="that sample, behind the trainer's device; 0: none")
    arguments.add_argument("--on-update", default="recomputed", help="what becomes of caches")
    arguments.add_argument("--parts", type=int, default=1, help="in which a batch is trained on")
    arguments.add_argument("--rates", type=int, nargs="*", help="numbers of sequences for the simulation's rates")
    result = measure(arguments.parse_args())
    if rank_zero_only.rank == 0:
        print(json.dumps(result))
