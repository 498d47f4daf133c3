"""Numbers of a buffer's buckets are put where the buffer has them (a resumed run is in strategy/test_overlap.py)."""

import torch

from lightning_megatron_rl.compat.bucket_padding import spread


def test_parts_land_at_their_buckets():
    joined = torch.arange(1.0, 6.0)
    assert spread(joined, [(0, 3), (4, 2)], 8).tolist() == [1, 2, 3, 0, 4, 5, 0, 0]
    assert spread(joined, [(0, 5)], 5).tolist() == joined.tolist()
