"""What can be said without a GPU; `tests/gpu` writes a file."""

import pytest

from lightning_megatron_rl.callbacks.memory_snapshot import MemorySnapshot
from tests.distributed import WorkerError
from tests.training import fit_sft


def test_needs_cuda(worker_pool, qwen3_dir, tmp_path):
    with pytest.raises(WorkerError, match=r"MemorySnapshot records allocations on a GPU, this run is on 'cpu'"):
        worker_pool.run(
            fit_sft,
            qwen3_dir,
            {},
            1,
            callbacks=[MemorySnapshot(str(tmp_path))],
            world_size=1,
            init_process_group=False,
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("values", "message"), [({"steps": [-1]}, "steps="), ({"max_entries": 0}, "max_entries=0")])
def test_bad_settings(values, message):
    with pytest.raises(ValueError, match=message):
        MemorySnapshot("x", **values)
