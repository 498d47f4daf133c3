"""What trainer and sampler take of a GPU, and give back; nothing else may use it meanwhile."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.engines import MIB, Transports, fit_grpo, send_every_way
from tests.gpu.machine import needs_gpus
from tests.gpu.test_engine import ONE, check_parity
from tests.gpu.test_training import backend, fit_on_cuda
from tests.tiny_models import save_tiny_model

pytestmark = [pytest.mark.deadline(600), pytest.mark.alone]
GROWTH = 64 * MIB  # what is in use goes up and down by 20 MiB
HOST_GROWTH = 64 * MIB  # 2 MiB were seen
LARGE_VOCAB = 65_536  # makes a copy of the weights 8 MiB or more: one leaked in each of 46 rounds is 368 MiB
# the first samples are of the model as it is, the last come after as many updates less one
ROUNDS = {"dense": 21, "tied": 51, "moe": 21}


@pytest.fixture(scope="module")
def larger_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same, of which a leak shows."""
    families = {"dense": "qwen3", "tied": "qwen2_tied", "moe": "qwen3_moe"}
    return {
        name: save_tiny_model(tmp_path_factory.mktemp(f"large_{name}"), family, vocab_size=LARGE_VOCAB)
        for name, family in families.items()
    }


def check_ways(found: Transports, in_place: bool = True) -> None:
    """Every way ends in the same weights, bit by bit: the same seeds draw the same tokens with the same log-probs."""
    expected = found.samples["replayed"]
    assert expected != found.samples["other"]
    for way in found.samples.keys() - {"other", "other again", "buckets of others", "lent others"}:
        assert found.samples[way] == expected, way
    assert found.samples["buckets of others"] == found.samples["lent others"] == found.samples["other"]
    assert found.reports["replayed"].replayed
    assert found.reports["buckets replayed"].replayed
    assert found.reports["lent"].replayed
    assert (found.reports["replayed"].extra_bytes == 0) == in_place
    assert 0 < found.reports["buckets"].extra_bytes <= MIB
    assert found.freed_bytes[1] >= 0.9 * 2**30  # the cache at least
    assert found.freed_bytes[2] >= 0.9 * 2**30
    assert found.shared_files == [[], []]  # the weights are still there


def check_nccl(found: Transports) -> None:
    """As `check_ways`; lists go through buckets, too."""
    assert {found.reports[way].transport for way in ("replayed", "buckets")} == {"NCCL"}
    for way in ("host", "buckets", "buckets replayed", "lent", "slept at 1", "slept at 2"):
        assert found.samples[way] == found.samples["replayed"], way
    assert found.samples["replayed"] != found.samples["other"]


@pytest.mark.parametrize("family", ["dense", "tied", "moe"])
def test_weights_are_the_same_by_every_way(gpu_pool, models, family):
    check_ways(gpu_pool.run(send_every_way, models[family], "child", {}, **ONE)[0])


@needs_gpus(2)
def test_weights_to_other_gpus(gpu_pool, models):
    apart = {"devices": [1], "weight_transfer": "nccl"}
    check_nccl(gpu_pool.run(send_every_way, models["dense"], "child", apart, **ONE)[0])
    found = gpu_pool.run(send_every_way, models["dense"], "child", {"devices": [1]}, **ONE)[0]
    assert found.reports["replayed"].transport == "CUDA IPC"  # read where they are
    check_ways(found)
    found = gpu_pool.run(send_every_way, models["moe"], "child", {"tensor_parallel_size": 2}, **ONE)[0]
    check_ways(found, in_place=False)


@needs_gpus(4)
def test_weights_to_four_gpus(gpu_pool, models):
    """More workers than the model has groups of keys and values: vLLM gives two of them the same."""
    found = gpu_pool.run(send_every_way, models["dense"], "child", {"tensor_parallel_size": 4}, **ONE)[0]
    check_ways(found, in_place=False)


@pytest.mark.parametrize("family", ["dense", "tied", "moe"])
def test_rounds_of_sleep_wake_and_sync(gpu_pool, larger_models, family):
    """Optimizer, gradients and parameters leave, the sampler wakes in order, and nothing grows."""
    options: dict[str, Any] = {
        "engine": {"sleep_level": 2},
        "strategy": {"offload_while_sampling": ["optimizer", "gradients", "parameters"]},
        "steps": ROUNDS[family],
    }
    run = gpu_pool.run(fit_grpo, larger_models[family], 1, **options, **ONE)[0]
    check_parity(run, ROUNDS[family])
    assert run.used[-1] - run.used[4] < GROWTH
    assert run.resident[-1] - run.resident[4] < HOST_GROWTH
    assert run.shared_files == []
    assert all(freed >= 0.9 * 2**30 for freed in run.freed)
    assert min(run.offloaded) > 0
    assert all(report.replayed for report in run.reports[1:])


def memory_beside_torch(model: Path) -> int:
    """Bytes that a run takes on the GPU and torch's allocator does not have: libraries, kernels, communicators."""

    def taken() -> int:
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()

    torch.zeros(1, device="cuda")  # the context
    before = taken()
    fit_on_cuda(model, [backend("transformer_engine", "bf16-mixed")], 1)
    return taken() - before


def test_a_run_takes_little_beside_torchs_allocator(fresh_pool, qwen3_dir):
    """Communicators for groups that nobody uses would take 8 GiB: 21 of 388 MiB each."""
    taken = fresh_pool.run(memory_beside_torch, qwen3_dir, world_size=1, init_process_group=False)[0]
    print(f"{taken / 2**30:.2f} GiB")
    assert taken < 3 * 2**30
