"""Copies that are run again are one kernel on a GPU."""

import torch

from lightning_megatron_rl.weights.copies import Copies
from tests.weights.test_copies import NOT_OF_WORDS, check_copies, pairs_of_every_kind


def copy_again() -> int:
    """Check every kind of copy, more than once; return how many are left to torch."""
    pairs = pairs_of_every_kind("cuda", rows=1000)
    copies = Copies(*zip(*pairs.values(), strict=True))
    for _ in range(3):
        check_copies(pairs, copies.run)
    assert copies._tables
    return sum(len(targets) for targets, _ in copies._lists)


def copy_rate() -> tuple[float, float]:
    """Bytes per second, read and written: of one copy, and of as many rows apart as a model of 28 layers has."""

    def rate(copy: object, num_bytes: int) -> float:
        times = []
        for _ in range(12):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            copy()  # type: ignore[operator]
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return 2 * num_bytes / sorted(times)[6]

    source, target = (torch.empty(2**28, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    one = rate(lambda: target.copy_(source), source.numel() * 2)
    pieces = [part[:, :768] for part in source.view(32, 8, 1024, 1024).unbind()]
    targets = [part.view(8, 768, 1024) for part in target[: 32 * 8 * 768 * 1024].view(32, -1).unbind()]
    return one, rate(Copies(targets, pieces).run, sum(piece.numel() for piece in pieces) * 2)


def test_copies_on_the_device(gpu_pool):
    left = gpu_pool.run(copy_again, world_size=1, init_process_group=False)[0]
    assert left == len(NOT_OF_WORDS)


def test_rows_apart_are_copied_at_the_rate_of_one_copy(gpu_pool):
    one, apart = gpu_pool.run(copy_rate, world_size=1, init_process_group=False)[0]
    print(f"one copy {one / 1e9:.0f} GB/s, rows apart {apart / 1e9:.0f} GB/s")
    assert apart > 0.7 * one  # an H100 has 0.88; torch's own copies of rows apart have 0.4 (profile_h200_sync.txt)
