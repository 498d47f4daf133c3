"""How fast the sampler decodes: ``python benchmarks/decoding.py --shape 30b-a3b --layers 6``.

On CUDA 256 sequences, on a CPU 32: prompts of 128 random tokens, 8 responses each, every prompt with a seed of its own,
EOS ignored: milliseconds for one more token of each, by vLLM's own steps and without what they do for nothing
(`compat/vllm_steps.py`). Prompts are in the prefix cache: the first rollout is not counted.
On CUDA with both of vLLM's model runners, which draw in different ways: the older one has a kernel for each sequence
with a seed, the newer one for all of them. With --profile one more rollout runs under Python's profiler, and a short
one under torch's: what vLLM's own Python takes of a step, and what the GPU waits for.
"""

import argparse
import json
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from common import (
    SHAPES,
    default_device,
    facts,
    model_directory,
    result_path,
    run_child,
    summary,
    write_json,
    write_model,
)
from profiles import Profile, of_functions

RUNNER = "VLLM_USE_V2_MODEL_RUNNER"  # vLLM's variable
RUNNERS = {"older": "0", "newer": "1"}
PROMPT_TOKENS, GENERATIONS = 128, 8
PROFILED_TOKENS = 32  # of torch's profile, which keeps every kernel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_cuda = default_device() == "cuda"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default_device())
    parser.add_argument("--shape", choices=tuple(SHAPES), default="0.6b" if on_cuda else "tiny")
    parser.add_argument("--layers", type=int, help="of the model; default: all that the shape has")
    parser.add_argument("--prompts", type=int, default=32 if on_cuda else 4)
    parser.add_argument("--response-tokens", type=int, default=256 if on_cuda else 16)
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs, on a CPU processes, that share the model")
    parser.add_argument("--cache-gb", type=float, default=12.0 if on_cuda else 0.25, help="key/value cache. GiB")
    parser.add_argument("--vllm-args", type=json.loads, help='of vLLM\'s own, as JSON: {"block_size": 64}')
    parser.add_argument("--repeats", type=int, default=4, help="after one that is not counted")
    parser.add_argument("--runners", nargs="+", choices=tuple(RUNNERS), default=list(RUNNERS), help="on CUDA")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds per runner")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--profile", type=Path, help="file for the profile, of vLLM's own choice of a runner")
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)  # the child's: where the model is
    options = parser.parse_args()
    if options.model:
        print(json.dumps(profile(options) if options.profile else measure(options)))
        return
    with tempfile.TemporaryDirectory() as work:
        report(options, model_directory(None, Path(work)))


def report(options: argparse.Namespace, model: Path) -> None:
    """Measure each runner in a process of its own; write and print."""
    names = ("shape", "layers", "prompts", "response_tokens", "tensor_parallel", "cache_gb", "repeats", "vllm_args")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    told = {name: json.dumps(value) if isinstance(value, dict) else value for name, value in given.items()}
    passed = [f"--{name.replace('_', '-')}={value}" for name, value in {**told, "device": options.device}.items()]
    result: dict[str, Any] = {**facts(options.device), "benchmark": "decoding", **given}
    runs = {name: RUNNERS[name] for name in options.runners} if options.device == "cuda" else {"only": ""}
    for name, value in runs.items():
        if value:
            os.environ[RUNNER] = value
        result[name] = run_child("decoding.py", [*passed, f"--model={model}"], options.timeout)
        found = result[name]["ms_per_token"]
        own = result[name]["vllms_own_ms_per_token"]["median"]
        spread = f"{found['min']:.3f} to {found['max']:.3f}, by vLLM's own steps {own:.3f}"
        print(f"{name:6s} {found['median']:8.3f} ms per token, {spread}", flush=True)
    write_json(result_path("decoding", options.device, options.out), result)
    if options.profile:
        os.environ.pop(RUNNER, None)
        target = options.profile.absolute()
        run_child("decoding.py", [*passed, f"--model={model}", f"--profile={target}"], options.timeout)
        start = "# One rollout under cProfile, which makes calls slower: {command}\n# {device}, {date}, {versions}\n"
        target.write_text(start.format(**result) + target.read_text())


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Sample the same requests several times, by vLLM's own steps and by those that are used."""
    requests, params, worker = start(options)
    seconds: dict[bool, list[float]] = {}
    answers: list[list[list[int]]] = []
    for is_quick in (False, True):
        if is_quick:
            vllm_steps().quicken(worker._llm)
        seconds[is_quick] = []
        for _ in range(options.repeats + 1):
            started = time.perf_counter()
            _, found = worker.generate(requests, params)
            seconds[is_quick].append(time.perf_counter() - started)
            answers.append([sample.token_ids for group in found for sample in group])
    own, quick = (
        summary([1000 * value / options.response_tokens for value in seconds[is_quick][1:]]) for is_quick in seconds
    )
    # from the second rollout on the prompts' keys and values are in the cache: fewer new tokens have other kernels
    cold, first, *others = answers
    return {
        "ms_per_token": quick,
        "vllms_own_ms_per_token": own,
        "same_responses_again": min(share_of_same(first, other) for other in others),
        "same_responses_as_without_cache": share_of_same(first, cold),
    }


def share_of_same(some: list[list[int]], others: list[list[int]]) -> float:
    """Return the share of responses that are the same.

    Example:
        ``share_of_same([[1, 2], [3]], [[1, 2], [4]]) == 0.5``
    """
    return sum(map(list.__eq__, some, others)) / len(some)


def start(options: argparse.Namespace) -> tuple[list[Any], Any, Any]:
    """Write the model; return requests, how to sample, and vLLM in this process, whose steps are its own."""
    from lightning_megatron_rl.rollout.protocol import GenerationRequest, SamplingParams, derive_seed

    if options.layers:
        SHAPES[options.shape]["num_hidden_layers"] = options.layers
    write_model(options.model, options.shape)
    if options.device == "cuda":
        torch.cuda.empty_cache()
    generator = torch.Generator().manual_seed(0)
    size = (options.prompts, PROMPT_TOKENS)
    prompts = torch.randint(SHAPES[options.shape]["vocab_size"], size, generator=generator).tolist()
    requests = [
        GenerationRequest(prompt, derive_seed(0, 0, index), GENERATIONS) for index, prompt in enumerate(prompts)
    ]
    from lightning_megatron_rl.rollout.vllm.engine import VLLMEngine
    from lightning_megatron_rl.rollout.vllm.settings import engine_environment, llm_arguments

    on_cuda = options.device == "cuda"
    config = json.loads((options.model / "config.json").read_text())
    if options.layers not in (None, config["num_hidden_layers"]):
        raise ValueError(
            f"--layers {options.layers} with the model in {options.model}, which has {config['num_hidden_layers']}"
            " layers: leave --layers out, or the model"
        )
    architectures, width = config["architectures"], options.tensor_parallel
    os.environ.update(engine_environment(options.device, architectures, eager=not on_cuda, tensor_parallel_size=width))
    from lightning_megatron_rl.rollout.vllm.worker import Worker

    worker = Worker(None)
    engine = VLLMEngine(
        dtype="bfloat16" if on_cuda else "float32",
        max_model_len=PROMPT_TOKENS + options.response_tokens + 1,
        max_num_seqs=options.prompts * GENERATIONS,
        kv_cache_memory_gb=options.cache_gb,
        tensor_parallel_size=width,
        vllm_args=options.vllm_args,
    )
    path = str(options.model)
    arguments = llm_arguments(engine, path, options.device, stored_dtype=engine.dtype, eager=not on_cuda)
    with mock.patch.object(vllm_steps(), "quicken"):
        worker.start(arguments)
    return requests, SamplingParams(max_tokens=options.response_tokens, ignore_eos=True), worker


def vllm_steps() -> Any:
    """Return the module, which imports vLLM, and that reads its environment."""
    from lightning_megatron_rl.compat import vllm_steps as module

    return module


def profile(options: argparse.Namespace) -> dict[str, Any]:
    """Write what one rollout spends in vLLM's functions, by vLLM in this process."""
    requests, params, worker = start(options)
    vllm_steps().quicken(worker._llm)
    worker.generate(requests, params)
    options.profile.write_text(of_functions(lambda: worker.generate(requests, params)))
    few = replace(params, max_tokens=min(PROFILED_TOKENS, options.response_tokens))
    Profile(0, options.profile).record(f"rollout of {few.max_tokens} tokens", lambda: worker.generate(requests, few))
    return {}


if __name__ == "__main__":
    main()
