"""This project's side of B1 and B3: a GRPO run on random weights with fixed lengths, measured from callbacks.

Used by weight_sync.py and grpo_step.py, each in a process of its own; prints one line of JSON.
"""

import argparse
import hashlib
import json
import logging
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from common import (
    SHAPES,
    StepLog,
    TokenPrompts,
    add_dispatcher_argument,
    add_model_arguments,
    dispatcher_arguments,
    how_trained,
    make_optimizer,
    make_trainer,
    measure_peaks,
    model_arguments,
    model_config,
    model_directory,
    own_device,
    prepare,
    summary,
    timed,
    token_reward,
    write_model,
)
from floor import Work, cache_bytes_per_token, optimizer_bytes
from lightning.pytorch.utilities import rank_zero_only
from profiles import Profile, of_functions
from work_done import MEGATRON_PROJECTION, ComputeDtype, megatron_work

PHASES = ("weight_sync", "rollout", "reward", "old_logp", "ref_logp", "update")
PROFILED_SYNCS = 100
BUCKET_MB = 256  # the default of `VLLMServers`
CALL_S = 3600  # of one call to the sampler: a very long response takes long, and the run has a deadline of its own
HANDOVER = ("time/sleep_s", "time/offload_s", "perf/sleep_freed_gb", "perf/offloaded_gb")


def reward(samples: list[Any]) -> list[float]:
    """Reward samples by their tokens."""
    return [token_reward(sample.response_ids) for sample in samples]


class SyncTimes(pl.Callback):
    """Times weight syncs before the first step: the plan is made in the warm-ups.

    Args:
        repeats: Syncs that are timed.
        warmup: Syncs before those.
        device: This rank's.
        profile: File for profiles of more syncs, of rank 0; None: there are none.
    """

    def __init__(self, repeats: int, warmup: int, device: torch.device, profile: Path | None = None) -> None:
        self.repeats, self.warmup, self.device, self.profile = repeats, warmup, device, profile
        self.seconds: list[float] = []
        self.awake_seconds: list[float] = []  # of a sampler that sleeps between steps, while it does not
        self.sleep_seconds: list[float] = []
        self.num_bytes = 0
        self.extra_bytes = 0
        self.peer_bytes = 0
        self.transport = ""
        self.direct: dict[str, Any] | None = None  # what ranks sent straight to servers in the last one

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        from lightning_megatron_rl.models.hf.files import num_weights

        self.num_bytes = num_weights(pl_module.hf_model.path) * pl_module.hf_model.dtype.itemsize
        if pl_module.strategy.replica.is_leader and not pl_module.engine.sleep_level:  # it is ready before it sleeps
            pl_module.engine.wait_ready()
        if self.device.type == "cuda":
            before = torch.cuda.memory_allocated()  # what the first sync keeps for the next ones counts, too
        for number in range(self.warmup + self.repeats):
            if number == self.warmup and self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            if pl_module.engine.sleep_level:
                self.seconds.append(timed(lambda: _sync_and_wake(pl_module), self.device))
                self.sleep_seconds.append(timed(pl_module.sampler.finish, self.device))
            else:
                self.seconds.append(timed(lambda: pl_module.sampler.sync(0), self.device))
        self.seconds, self.sleep_seconds = self.seconds[self.warmup :], self.sleep_seconds[self.warmup :]
        if pl_module.engine.sleep_level:
            pl_module.sampler.sync(0)
            self.awake_seconds = [timed(lambda: pl_module.sampler.sync(0), self.device) for _ in range(self.repeats)]
            _sync_and_wake(pl_module)
            pl_module.sampler.finish()
        if self.device.type == "cuda":
            self.extra_bytes = torch.cuda.max_memory_allocated() - before
        if self.profile is not None:
            _profile_syncs(pl_module, self.profile)
        if report := pl_module.sampler.last_sync:
            self.peer_bytes, self.transport = report.peer_bytes, report.transport
            self.direct = vars(report.direct) if report.direct else None
        pl_module.report.phase_seconds.clear()  # the first step's own


def _profile_syncs(module: Any, path: Path) -> None:
    """Write what syncs in a row spend in Python's functions, and what the GPU does in some of them."""

    def syncs(count: int) -> None:
        for _ in range(count):
            module.sampler.sync(0)

    functions = of_functions(partial(syncs, PROFILED_SYNCS))
    Profile(0, path).record(f"{PROFILED_SYNCS // 10} weight syncs", partial(syncs, PROFILED_SYNCS // 10))
    if rank_zero_only.rank == 0:
        path.write_text(f"{path.read_text()}\n# {PROFILED_SYNCS} weight syncs under cProfile\n{functions}")


def _sync_and_wake(module: Any) -> None:
    module.sampler.sync(0)  # wakes the weights' memory first
    module.sampler.memory.prepare_sampling()  # the cache's


class Samples(pl.Callback):
    """Takes note of what each step sampled, for the comparison of work."""

    def __init__(self) -> None:
        self.prompts = hashlib.sha256()
        self.response_tokens: list[int] = []
        self.samples: list[int] = []
        self.device_bytes = 0  # in use on the whole device, by whomever

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        samples = pl_module.last_rollout.samples
        prompts = sorted({tuple(sample.prompt.token_ids) for sample in samples})
        self.prompts.update(repr(prompts).encode())
        self.samples.append(len(samples))
        self.response_tokens.append(sum(len(sample.response_ids) for sample in samples))
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            self.device_bytes = max(self.device_bytes, total - free)


class Warnings(logging.Handler):
    """Keeps what the package warns of: weights that should go over NCCL may go over gloo."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self.told.append(record.getMessage())


class Numbers(pl.Callback):
    """Takes note of dtypes and the optimizer of the run, for the comparison of work."""

    def __init__(self) -> None:
        self.work: dict[str, str] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.compute = ComputeDtype(pl_module.model[0], MEGATRON_PROJECTION)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.work = {"compute_dtype": self.compute.name(), **megatron_work(trainer.strategy.optimizers[0])}


def longest(options: argparse.Namespace) -> int:
    """Return the tokens of prompt and response, and one more."""
    return int(options.prompt_tokens + options.response_tokens + 1)


def make_engine(options: argparse.Namespace) -> Any:
    """Return the sampler: on the trainer's GPUs, in its processes or beside them, on the GPUs behind, or servers."""
    from lightning_megatron_rl.rollout.servers.engine import VLLMServers
    from lightning_megatron_rl.rollout.vllm.colocated import ColocatedVLLMEngine
    from lightning_megatron_rl.rollout.vllm.engine import VLLMEngine

    if options.urls:
        return VLLMServers(
            options.urls.split(","),
            max_model_len=longest(options),
            call_timeout_s=CALL_S,
            bucket_mb=options.bucket_mb,
            weights_over=weights_over(options),
        )
    sizes: dict[str, Any] = {
        "max_model_len": longest(options),
        "max_num_seqs": options.prompts * options.generations,
        "kv_cache_memory_gb": options.cache_gb,
        "tensor_parallel_size": options.sampler_parallel,
        "sleep_level": options.sleep_level,
    }
    if options.in_process:
        return ColocatedVLLMEngine(**sizes, enforce_eager=options.eager)
    behind = list(range(options.devices, options.devices + options.sampler_parallel))
    return VLLMEngine(
        **sizes,
        devices=behind if options.apart else None,
        weight_transfer=options.weight_transfer,
        start_timeout_s=600,  # 30 billion weights, and their compilation
        call_timeout_s=CALL_S,
        enforce_eager=options.eager or None,
        compilation=options.compilation,
    )


def weights_over(options: argparse.Namespace) -> Any:
    """Return what weights go to servers over."""
    return options.weights_over or ("nccl" if options.device == "cuda" else "gloo")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run and return times, losses and the work that was done."""
    from megatron.core.utils import get_model_config

    from lightning_megatron_rl.data.prompts import PromptDataModule
    from lightning_megatron_rl.models.flops import sequence_flops
    from lightning_megatron_rl.models.hf.files import num_weights
    from lightning_megatron_rl.modules.grpo import GRPOModule
    from lightning_megatron_rl.modules.training import TrainingSettings
    from lightning_megatron_rl.rollout.protocol import SamplingParams

    warnings = Warnings()
    logging.getLogger("lightning_megatron_rl").addHandler(warnings)
    device = own_device(options.device)
    prepare(options.device, options.shape)
    peaks = measure_peaks(device)
    steps = options.warmup + options.steps
    vocab_size = SHAPES[options.shape]["vocab_size"]
    log, sampled, numbers = StepLog(device), Samples(), Numbers()
    syncs = SyncTimes(options.syncs, 3, device, options.profile) if options.syncs else None
    directory = model_directory(options.model, Path(tempfile.mkdtemp()))
    write_model(directory, options.shape, longest(options))
    if options.device == "cuda":
        torch.cuda.empty_cache()
    module = GRPOModule(
        str(directory),
        rewards=[reward],
        num_generations=options.generations,
        engine=make_engine(options),
        sampling=SamplingParams(temperature=1.0, max_tokens=options.response_tokens, ignore_eos=True),
        train=TrainingSettings(
            optimizer=make_optimizer(1e-6, options.moments),
            max_tokens_per_microbatch="auto" if options.auto else options.max_tokens,
            recompute="auto" if options.auto else "none",
            model_config=model_config(options),
        ),
    )
    data = PromptDataModule(
        TokenPrompts(options.prompts * steps, options.prompt_tokens, vocab_size),
        tokenizer=str(directory),
        batch_size=options.prompts,
        answer_column=None,
        add_special_tokens=False,
        shuffle=False,
    )
    callbacks = [log, sampled, numbers, *([syncs] if syncs else [])]
    trainer = make_trainer(
        options.device,
        devices=options.devices,
        max_steps=steps,
        callbacks=callbacks,
        precision=options.precision,
        tensor_model_parallel_size=options.tensor_parallel,
        sequence_parallel=options.tensor_parallel > 1,
        context_parallel_size=options.context_parallel,
        expert_model_parallel_size=options.expert_parallel,
        expert_tensor_parallel_size=1 if options.expert_parallel > 1 else None,
        **({"offload_while_sampling": ["optimizer", "gradients", "parameters"]} if options.offload else {}),
    )
    trainer.fit(module, data)
    linear, quadratic = sequence_flops(get_model_config(module.model[0]), vocab_size)
    config = module.hf_model.config
    parameters = num_weights(directory)
    element = 2 if options.device == "cuda" else 4
    work = Work(
        samples=options.prompts * options.generations,
        prompts=options.prompts,
        prompt_tokens=options.prompt_tokens,
        response_tokens=options.response_tokens,
        parameters=parameters,
        linear_flops=linear,
        quadratic_flops=quadratic,
        cache_bytes_per_token=cache_bytes_per_token(config, element),
        weight_bytes=element,
        optimizer_bytes=optimizer_bytes(options.moments, element),
    )
    module.close_engine()
    kept = log.steps[options.warmup :]
    step_s = [step["time/step_s"] for step in kept]
    phases, handover = PHASES, None
    if options.sleep_level:
        phases += ("sleep",)
    if options.offload:
        phases += ("offload",)
        handover = {name: summary([step[name] for step in kept]) for name in HANDOVER}
    return {
        "who": "lightning-megatron-rl",
        **({"place": "sampler in the trainer's processes"} if options.in_process else {}),
        "shape": options.shape,
        "layout": module.strategy.layout.describe(trainer.world_size),
        **how_trained(module, options),
        "sleep_level": options.sleep_level,
        "sampler_is_eager": options.eager,
        "sampler_compilation": options.compilation,
        # ranks of a model replica, each of which has a sampler
        "devices_per_sampler": options.tensor_parallel * options.context_parallel,
        "step_s": summary(step_s),
        "phases": {name: summary([step.get(f"time/{name}_s", 0.0) for step in kept]) for name in phases},
        "handover": handover,
        "losses": [step["policy/loss"] for step in log.steps],
        "rewards": [step["reward/mean"] for step in log.steps],
        "mismatch": [step["mismatch/abs_logp_diff"] for step in log.steps],
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30 if options.device == "cuda" else None,
        "device_memory_gib": sampled.device_bytes / 2**30 if options.device == "cuda" else None,
        "sync": None
        if syncs is None
        else {
            "seconds": summary(syncs.seconds),
            "awake_seconds": summary(syncs.awake_seconds) if syncs.awake_seconds else None,
            "sleep_seconds": summary(syncs.sleep_seconds) if syncs.sleep_seconds else None,
            "bytes": syncs.num_bytes,
            "extra_bytes": syncs.extra_bytes,
            "peer_bytes": syncs.peer_bytes,
            "transport": syncs.transport,
            "direct": syncs.direct,
        },
        "warnings": warnings.told,
        "work": {
            "samples_per_step": sampled.samples,
            "response_tokens_per_step": sampled.response_tokens,
            "prompt_tokens": options.prompt_tokens,
            "prompts_sha256": sampled.prompts.hexdigest(),
            "optimizer_steps": trainer.global_step,
            **numbers.work,
        },
        "floor_work": vars(work),
        "peaks": peaks,
    }


def add_arguments(parser: argparse.ArgumentParser, device: str) -> None:
    """Add what both sides of a comparison are told."""
    on_cuda = device == "cuda"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=device)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="0.6b" if on_cuda else "tiny")
    parser.add_argument("--precision", default="bf16-mixed" if on_cuda else "32-true")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=32 if on_cuda else 8)
    parser.add_argument("--generations", type=int, default=8 if on_cuda else 4)
    parser.add_argument("--prompt-tokens", type=int, default=128 if on_cuda else 16)
    parser.add_argument("--response-tokens", type=int, default=512 if on_cuda else 24)
    parser.add_argument("--max-tokens", type=int, default=32_768 if on_cuda else 2048, help="per micro-batch")
    parser.add_argument("--cache-gb", type=float, default=19.0 if on_cuda else 0.25, help="key/value cache. GiB")
    parser.add_argument("--syncs", type=int, default=0, help="weight syncs to time before the first step")
    parser.add_argument("--profile", type=Path, help="file for profiles of more weight syncs, of ours")
    parser.add_argument("--devices", type=int, default=1, help="processes of the trainer, one GPU each; without a peer")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--context-parallel", type=int, default=1, help="ranks that share each sequence")
    parser.add_argument("--expert-parallel", type=int, default=1)
    parser.add_argument("--sampler-parallel", type=int, default=1, help="GPUs that share the sampler's model")
    parser.add_argument("--in-process", action="store_true", help="the sampler is in the trainer's processes")
    parser.add_argument("--eager", action="store_true", help="no compilation and no CUDA graphs in the sampler")
    parser.add_argument(
        "--compilation",
        choices=("auto", "full", "graphs"),
        default="auto",
        help="of the sampler's model, as VLLMEngine",
    )
    parser.add_argument("--auto", action="store_true", help="the planner chooses --max-tokens and --recompute")
    parser.add_argument("--sleep-level", type=int, default=0, help="of the sampler between rollouts; 0 never sleeps")
    add_model_arguments(parser)
    add_dispatcher_argument(parser)
    parser.add_argument("--trl-batch", type=int, default=16 if on_cuda else 8, help="sequences per TRL micro-batch")


def passed_on(options: argparse.Namespace) -> list[str]:
    """Return the command line of one side."""
    names = ("device", "shape", "precision", "steps", "warmup", "prompts", "generations", "prompt_tokens")
    names += ("response_tokens", "max_tokens", "cache_gb", "syncs", "trl_batch")
    names += ("devices", "tensor_parallel", "context_parallel", "expert_parallel", "sampler_parallel", "sleep_level")
    names += ("compilation",)
    flags = [f"--{name.replace('_', '-')}" for name in ("eager", "auto", "in_process") if getattr(options, name)]
    given = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names]
    given += [f"--profile={options.profile.absolute()}"] if options.profile else []
    return given + flags + dispatcher_arguments(options) + model_arguments(options)


def add_place_arguments(parser: argparse.ArgumentParser) -> None:
    """Add where the sampler is, if not on the trainer's GPUs."""
    parser.add_argument("--apart", action="store_true", help="the sampler's process has the GPUs behind the trainer's")
    parser.add_argument("--weight-transfer", choices=("auto", "ipc", "nccl"), default="auto", help="of --apart")
    parser.add_argument("--weights-over", choices=("nccl", "gloo"), help="to servers; unset: NCCL, on a CPU gloo")
    parser.add_argument("--bucket-mb", type=int, default=BUCKET_MB, help="of weights on their way to each server. MiB")


if __name__ == "__main__":
    from common import default_device

    arguments = argparse.ArgumentParser(description=__doc__)
    add_arguments(arguments, default_device())
    add_place_arguments(arguments)
    arguments.add_argument("--urls", default="", help="of servers that sample, with commas between")
    arguments.add_argument("--offload", action="store_true", help="the trainer's state leaves the GPU for the rollout")
    result = measure(arguments.parse_args())
    if rank_zero_only.rank == 0:
        print(json.dumps(result))
