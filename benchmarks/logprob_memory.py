"""Peak memory of log-probs and entropy with a large vocabulary: ``python benchmarks/logprob_memory.py``.

Forward and backward of one micro-batch, each way in a process of its own: ours in chunks, and the naive way, which
makes all fp32 logits, their log-softmax and the entropy of it by autograd. What is reported is the peak of the resident
memory (on CUDA: of the allocator) above what weights, hidden states and their gradients take. Goal: at most a quarter.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import torch

ROOT = Path(__file__).resolve().parents[1]
GOAL = 0.25


def naive(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropy by autograd over all logits at once."""
    log_p = (hidden @ weight.T).float().log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(1, labels[:, None])[:, 0], entropy


def ours(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same through the model's output processor."""
    from lightning_megatron_rl.models.layers.logprobs import logprob_processor

    process = logprob_processor(vocab_size=weight.size(0), chunk_size=chunk_size, with_entropy=True)
    layer = SimpleNamespace(weight=weight, sequence_parallel=False, tp_group=torch.distributed.group.WORLD)
    values = process(hidden_states=hidden[:, None], output_layer=layer, output_weight=None, labels=labels[None])
    return values[0, 0], values[1, 0]


def peak_bytes(device: torch.device) -> int:
    """Return the most memory this process has had so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Run one way once and return its peak, its time and a checksum."""
    import megatron.core.tensor_parallel.mappings  # noqa: F401  its import must not count

    device = torch.device(options.device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(options.tokens, options.hidden, device=device, generator=generator).requires_grad_()
    weight = (
        torch.randn(options.vocabulary, options.hidden, device=device, generator=generator) * 0.02
    ).requires_grad_()
    labels = torch.randint(options.vocabulary, (options.tokens,), device=device, generator=generator)
    weight.grad, hidden.grad = torch.zeros_like(weight), torch.zeros_like(hidden)
    warm = hidden[:1].detach() @ weight.detach().T
    del warm
    before, started = peak_bytes(device), time.perf_counter()
    way = naive if options.way == "naive" else lambda *tensors: ours(*tensors, options.chunk_size)
    logprobs, entropy = way(hidden, weight, labels)
    (logprobs.sum() + 0.1 * entropy.sum()).backward()
    seconds = time.perf_counter() - started
    torch.distributed.destroy_process_group()
    return {
        "peak_gb": (peak_bytes(device) - before) / 1e9,
        "seconds": seconds,
        "logprob_sum": logprobs.sum().item(),
        "hidden_grad_norm": hidden.grad.norm().item(),
        "weight_grad_norm": weight.grad.norm().item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=131_072)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--chunk-size", type=int, default=256)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--way", choices=["naive", "ours"], help="run one way in this process (used by itself)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "logprob_memory.json")
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measure(options)))
        return
    results = {}
    for way in ("naive", "ours"):
        command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
        done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=900)
        results[way] = json.loads(done.stdout.splitlines()[-1])
        print(f"{way:6s} {results[way]['peak_gb']:7.3f} GB {results[way]['seconds']:7.2f} s")
    ratio = results["ours"]["peak_gb"] / results["naive"]["peak_gb"]
    print(f"ours / naive = {ratio:.3f} (goal: at most {GOAL})")
    facts = {
        "command": "python benchmarks/logprob_memory.py",
        "device": options.device if options.device == "cuda" else f"{platform.machine()} CPU",
        "versions": {package: version(package) for package in ("torch", "megatron-core")},
        "sizes": {name: getattr(options, name) for name in ("vocabulary", "tokens", "hidden", "chunk_size")},
        "results": results,
        "ratio": ratio,
        "goal": GOAL,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
