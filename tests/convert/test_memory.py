"""What a conversion holds in memory does not grow with the model."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
benchmark: Any = importlib.import_module("convert")

# 0.9 GB in 28 layers like those of Qwen3-0.6B, with a vocabulary that is no larger than they are
SIZES = {**benchmark.SHAPES["0.6b"], "vocab_size": 8192}


@pytest.mark.slow
@pytest.mark.deadline(400)
def test_memory_is_that_of_a_few_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Within 0.1 GB of what a tiny model takes: four times the largest fused parameter, and the allocator's arenas.

    Fails where a writer keeps what it has written (torch's own keeps a tensor of every name), where the source's files
    stay mapped, and where a shard is put together in memory.
    """
    monkeypatch.setitem(benchmark.SHAPES, "small vocabulary", SIZES)
    rows = {}
    for name in ("tiny", "small vocabulary"):
        (tmp_path / name).mkdir()
        rows[name] = benchmark.measure(name, tmp_path / name)
    assert rows["small vocabulary"]["gb"] > 0.85
    for way in ("to_checkpoint", "to_hf"):
        grown = rows["small vocabulary"][way]["peak_gb"] - rows["tiny"][way]["peak_gb"]
        assert grown < 0.1, f"{way}: {rows}"


def test_shapes_are_those_of_the_released_models():
    def count(name: str) -> int:
        import math

        return sum(math.prod(shape) for _, shape in benchmark.tensor_shapes(benchmark.parse_shape(name)))

    assert count("0.6b") == 596_049_920  # Qwen/Qwen3-0.6B, without its tied output layer
    assert count("30b-a3b") == 30_532_122_624  # Qwen/Qwen3-30B-A3B
    assert count("30b-a3b:2") < count("30b-a3b") / 10
