"""TRL's asynchronous side of B4: its AsyncGRPOTrainer on one GPU, and vLLM's own server on the next.

Used by long_tail.py; prints one line of JSON. A micro-batch is a group, without padding. TRL's settings are its own
where B4 does not decide: as many batches in flight as the bound, and a group that is too old is left out. On a CPU
weights are not sent, which takes NCCL: no comparison, only a dry run.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import batched, pairwise
from pathlib import Path
from typing import Any

import gpus
import torch
from common import SHAPES, TokenPrompts, default_device, summary, synchronize, write_model
from ours import add_arguments
from servers import end_with_parent, serve_vllm
from trl_peer import settings
from work_done import TRANSFORMERS_PROJECTION, ComputeDtype, optimizer_work

START_S = 300.0  # of the server, which compiles
CHAT = "{{ messages[0]['content'] }}"  # a prompt is its text


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train against a server and return times, losses and the work that was done."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer
    from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker
    from trl_long_tail import LongTailLoop, choose_attention, reward

    on_cuda, device = options.device == "cuda", torch.device(options.device)
    steps = options.warmup + options.steps
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    tokenizer.chat_template, tokenizer.response_schema = CHAT, {"type": "object"}
    count = options.prompts * (steps + options.bound + 1)
    rows = TokenPrompts(count, options.prompt_tokens, SHAPES[options.shape]["vocab_size"])()
    config = AsyncGRPOConfig(
        **settings(options),
        per_device_train_batch_size=options.generations,
        gradient_accumulation_steps=options.prompts,
        token_budget=0,  # batches of as many samples as ours
        max_staleness=options.bound,
        vllm_server_base_url=options.server,
    )
    ends: list[float] = []
    trained: list[tuple[int, int]] = []  # samples and their tokens, of each micro-batch

    class Clock(TrainerCallback):
        """Takes the time of the first step's begin and of each step's end; weights are sent before the latter."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self._take()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self._take()

        def _take(self) -> None:
            synchronize(device)
            ends.append(time.perf_counter())

    class Counting(AsyncGRPOTrainer):
        """Counts what it trains on."""

        def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any) -> Any:
            tokens = int((inputs["token_index"] >= 0).sum())
            trained.append((int(inputs["segment_id"].max()) + 1, tokens))
            return super().training_step(model, inputs, num_items_in_batch)

    attention = choose_attention()
    AsyncRolloutWorker._loop_cls = LongTailLoop
    if not on_cuda:
        async_grpo_trainer.get_peak_flops_per_device = lambda *_: None  # it asks CUDA
    trainer = Counting(
        model=str(options.model),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]),
        processing_class=tokenizer,
        weight_transfer=None if on_cuda else _Nothing(),
    )
    trainer.add_callback(Clock())  # the last, behind the one that sends weights
    compute = ComputeDtype(trainer.model, TRANSFORMERS_PROJECTION)
    trainer.train()
    seconds = [later - earlier for earlier, later in pairwise(ends)]
    by_step = list(batched(trained, options.prompts))
    logged = [row for row in trainer.state.log_history if "loss" in row]
    return {
        "who": "TRL AsyncGRPOTrainer",
        "devices": 2,
        "shape": options.shape,
        "bound": options.bound,
        "attention": attention,
        "step_s": summary(seconds[options.warmup :]),
        "seconds": seconds,
        "phases": {
            name: summary([row[key] for row in logged[options.warmup :]])
            for name, key in (("weight_sync", "perf/weight_sync_s"), ("update", "perf/fwd_bwd_s"))
        },
        "staleness": {
            "max": max(row["sample/staleness_max"] for row in logged),
            "mean": sum(row["sample/staleness_mean"] for row in logged) / len(logged),
        },
        "left_out": sum(row.get("sample/dropped_stale_total", 0.0) for row in logged),  # samples that were too old
        "losses": [row["loss"] for row in logged],
        "rewards": [row["reward"] for row in logged],
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30 if on_cuda else None,
        "work": {
            "samples_per_step": [sum(count for count, _ in step) for step in by_step],
            "response_tokens_per_step": [sum(tokens for _, tokens in step) for step in by_step],
            "prompt_tokens": options.prompt_tokens,
            "optimizer_steps": trainer.state.global_step,
            "compute_dtype": compute.name(),
            **optimizer_work([getattr(trainer.optimizer, "optimizer", trainer.optimizer)]),  # Accelerate wraps it
        },
    }


class _Nothing:
    """Sends no weights: a dry run on a CPU."""

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: Any) -> None: ...

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


def serve_and_train(options: argparse.Namespace) -> None:
    """Start the server on the last GPU, and this script again on the first.

    Raises:
        RuntimeError: The server did not start, or training failed.
    """
    on_cuda, own = options.device == "cuda", gpus.visible()
    directory = write_model(options.model or Path(tempfile.mkdtemp()) / "model", options.shape)
    if on_cuda:
        torch.cuda.empty_cache()
    arguments = [
        f"--max-model-len={options.prompt_tokens + options.response_tokens + 1}",
        f"--max-num-seqs={options.prompts * options.generations * max(options.bound, 1)}",
        f"--kv-cache-memory-bytes={int(options.cache_gb * 2**30)}",
        f"--dtype={'bfloat16' if on_cuda else 'float32'}",
        "--logprobs-mode=processed_logprobs",
    ]
    if on_cuda:
        arguments += ["--gpu-memory-utilization=0.9", '--weight-transfer-config={"backend": "nccl"}']
    else:
        arguments.append("--enforce-eager")
    with serve_vllm(directory, arguments, own[-1] if on_cuda else "", START_S) as url:
        environment = dict(os.environ) | {"VLLM_HOST_IP": "127.0.0.1", "TRL_EXPERIMENTAL_SILENCE": "1"}
        if on_cuda:
            environment["CUDA_VISIBLE_DEVICES"] = own[0]
        again = [sys.executable, *sys.argv, f"--server={url}", f"--model={directory}"]
        code = subprocess.run(again, env=environment, check=False, preexec_fn=end_with_parent).returncode
        if code != 0:
            raise RuntimeError(f"TRL's trainer ended with {code}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, default_device())
    parser.add_argument("--long-tail", action="store_true", help="always: lognormal lengths, up to --response-tokens")
    parser.add_argument("--bound", type=int, required=True, help="of staleness")
    parser.add_argument("--server", help="vLLM's, which runs already; none: one is started")
    options = parser.parse_args()
    if options.server is None:
        serve_and_train(options)
        return
    print(json.dumps(measure(options)), flush=True)
    os._exit(0)  # threads of TRL may wait for ever


if __name__ == "__main__":
    main()
