"""The collectives of this folder between real processes."""

import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lightning_megatron_rl.algorithms import Tally, add_mismatch_metrics, sequence_weights

LENGTHS = torch.tensor([3, 1, 4, 2, 5, 2])
RANK_OF_SEQUENCE = torch.tensor([0, 0, 1, 1, 1, 1])
GROUPS = torch.tensor([0, 0, 1, 1, 2, 2])


def logprobs() -> tuple[torch.Tensor, torch.Tensor]:
    rollout = -torch.rand(int(LENGTHS.sum()), generator=torch.Generator().manual_seed(0))
    return rollout + 0.1 * torch.randn(len(rollout), generator=torch.Generator().manual_seed(1)), rollout


def compute(mine: torch.Tensor, all_reduce) -> dict:
    """Weights and metrics of the sequences that the bool `mine` selects."""
    tokens = mine.repeat_interleave(LENGTHS)
    tally = Tally()
    add_mismatch_metrics(tally, *(values[tokens] for values in logprobs()))
    lengths, groups = LENGTHS[mine], GROUPS[mine]
    weights = sequence_weights("prompt_mean", lengths, groups, max_response_length=8, all_reduce=all_reduce)
    return {"weights": weights.tolist(), "metrics": tally.reduce(all_reduce).compute()}


def worker(rank: int, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)

    def all_reduce(vector: torch.Tensor, op: str = "sum") -> torch.Tensor:
        dist.all_reduce(vector, dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX)
        return vector

    result = compute(rank == RANK_OF_SEQUENCE, all_reduce)
    Path(directory, f"{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def test_two_processes_equal_one(tmp_path: Path):
    context = mp.spawn(worker, (str(tmp_path),), nprocs=2, join=False)
    try:
        for process in context.processes:
            process.join(timeout=120)
        assert context.join(timeout=1)  # all have ended; raises what they raised
    finally:
        for process in context.processes:
            process.kill()
    one = compute(torch.ones(6, dtype=torch.bool), lambda vector, op="sum": vector)
    two = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert two[0]["weights"] + two[1]["weights"] == one["weights"]
    assert two[0]["metrics"] == two[1]["metrics"]
    # float64 sums of 17 numbers in another order
    for name, value in one["metrics"].items():
        assert abs(two[0]["metrics"][name] - value) <= 1e-12 * abs(value)
