"""Time and peak memory of `lightning-megatron-rl convert` against the model's size, both ways.

``python benchmarks/convert.py --shapes 0.6b,1.7b,30b-a3b:2`` (a shape may have a number of layers of its own). Each
conversion is a process of its own; its peak is what it says itself, the kernel's count of its resident memory, which
includes the pages of files that are mapped. "tiny" comes first: what the program and its libraries take.
"""

import argparse
import json
import math
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import ROOT, SHAPES, facts, make_tokenizer, result_path, write_json

_DTYPE = torch.bfloat16
_TIMEOUT_S = 1800.0


def tensor_shapes(sizes: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of the tensors of a Qwen3 or Qwen3-MoE checkpoint."""
    hidden, head = sizes["hidden_size"], sizes["head_dim"]
    queries, groups = sizes["num_attention_heads"] * head, sizes["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", (sizes["vocab_size"], hidden)
    if not sizes["tie_word_embeddings"]:
        yield "lm_head.weight", (sizes["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    for number in range(sizes["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        yield f"{layer}.self_attn.q_norm.weight", (head,)
        yield f"{layer}.self_attn.k_norm.weight", (head,)
        yield f"{layer}.self_attn.q_proj.weight", (queries, hidden)
        yield f"{layer}.self_attn.k_proj.weight", (groups, hidden)
        yield f"{layer}.self_attn.v_proj.weight", (groups, hidden)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, queries)
        experts, width = sizes.get("num_experts", 0), sizes.get("moe_intermediate_size", sizes["intermediate_size"])
        if experts:
            yield f"{layer}.mlp.gate.weight", (experts, hidden)
        for mlp in [f"experts.{expert}." for expert in range(experts)] or [""]:
            yield f"{layer}.mlp.{mlp}gate_proj.weight", (width, hidden)
            yield f"{layer}.mlp.{mlp}up_proj.weight", (width, hidden)
            yield f"{layer}.mlp.{mlp}down_proj.weight", (hidden, width)


def parse_shape(text: str) -> dict[str, Any]:
    """Return the sizes of a shape of `common`, with its number of layers replaced if one is given.

    Example:
        ``parse_shape("30b-a3b:2")["num_hidden_layers"] == 2``
    """
    name, _, layers = text.partition(":")
    return {**SHAPES[name], **({"num_hidden_layers": int(layers)} if layers else {})}


def write_source(directory: Path, sizes: dict[str, Any]) -> int:
    """Write a checkpoint whose tensors are one number each; return its largest tensor's bytes."""
    from transformers import Qwen3Config, Qwen3MoeConfig

    from lightning_megatron_rl.models.hf.writer import CheckpointWriter

    kind, name = (Qwen3MoeConfig, "Qwen3Moe") if "num_experts" in sizes else (Qwen3Config, "Qwen3")
    config = kind(**sizes, max_position_embeddings=4096, architectures=[f"{name}ForCausalLM"])
    tokenizer = directory.parent / f"{directory.name}-tokenizer"
    make_tokenizer(512).save_pretrained(tokenizer)
    writer = CheckpointWriter(directory, 5_000_000_000)
    largest = 0
    for number, (tensor, shape) in enumerate(tensor_shapes(sizes)):
        writer.add(tensor, torch.full(shape, 0.01 * (number % 97 + 1), dtype=_DTYPE))
        largest = max(largest, math.prod(shape) * _DTYPE.itemsize)
    writer.finish(tokenizer, config, _DTYPE)
    return largest


def convert(source: Path, destination: Path, *arguments: str) -> dict[str, float]:
    """Run the command; return its seconds, CPU seconds and peak memory."""
    command = [sys.executable, "-m", "lightning_megatron_rl", "convert", str(source), str(destination), *arguments]
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    told = re.search(r"with at most ([\d.]+) GB of memory", done.stdout)
    if done.returncode != 0 or told is None:
        raise RuntimeError(f"{command} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
    return {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 2),
        "peak_gb": float(told[1]),
    }


def measure(name: str, work: Path) -> dict[str, Any]:
    """Convert a model of one shape there and back."""
    sizes = parse_shape(name)
    source, checkpoint, back = work / "source", work / "model.ckpt", work / "back"
    largest = write_source(source, sizes)
    count = sum(math.prod(shape) for _, shape in tensor_shapes(sizes))
    try:
        return {
            "shape": name,
            "tensors": sum(1 for _ in tensor_shapes(sizes)),
            "gb": round(count * _DTYPE.itemsize / 1e9, 3),
            "largest_tensor_gb": round(largest / 1e9, 3),
            "to_checkpoint": convert(source, checkpoint),
            "to_hf": convert(checkpoint, back),
        }
    finally:
        for directory in work.iterdir():
            shutil.rmtree(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="0.6b,1.7b,30b-a3b:2", help="of benchmarks/common.py, NAME or NAME:LAYERS")
    parser.add_argument("--work", type=Path, help="where three copies of a model have room; default: a temporary one")
    parser.add_argument("--device", choices=("cpu",), default="cpu", help="conversions run on the CPU")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    print(f"{'shape':12s} {'GB':>7s} {'largest':>8s}   {'to checkpoint':>24s}   {'to Hugging Face':>24s}")
    for name in ["tiny", *options.shapes.split(",")]:
        with tempfile.TemporaryDirectory(dir=options.work) as work:
            row = measure(name, Path(work))
        rows.append(row)
        ways = [f"{row[way]['seconds']:8.1f} s, {row[way]['peak_gb']:7.2f} GB" for way in ("to_checkpoint", "to_hf")]
        print(
            f"{name:12s} {row['gb']:7.2f} {row['largest_tensor_gb']:8.3f}   {ways[0]:>24s}   {ways[1]:>24s}", flush=True
        )
    out = result_path("convert", "cpu", options.out)
    write_json(out, {**facts("cpu"), "rows": rows})
    print(json.dumps({"out": str(out)}))


if __name__ == "__main__":
    main()
