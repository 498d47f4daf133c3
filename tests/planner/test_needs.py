"""What an engine says it needs."""

from lightning_megatron_rl.planner.memory import ModelSize
from lightning_megatron_rl.planner.needs import EngineNeeds


def test_the_cache_holds_so_many_tokens():
    """Two layers with 64 numbers a token, in bf16: 2 x 64 x 2 = 256 bytes, half of them on each of two GPUs."""
    size = ModelSize(
        dense=1, experts=0, embeddings=1, hidden=64, layers=2, query_width=64, key_value_width=64, ffn_width=1,
        vocabulary=8,
    )  # fmt: skip
    needs = EngineNeeds(kv_cache_memory_gb=0.5)
    assert needs.cache_tokens(size, "bfloat16") == 2**29 // 256
    assert needs.cache_tokens(size, "float32") == 2**29 // 512
    assert EngineNeeds(kv_cache_memory_gb=0.5, tensor_parallel_size=2).cache_tokens(size, "bfloat16") == 2**29 // 128
    assert EngineNeeds().cache_tokens(size, "bfloat16") is None
    share = EngineNeeds(gpu_memory_utilization=0.5)  # of 2^20 bytes, of which two weights of 2 bytes take 4
    assert share.cache_tokens(size, "bfloat16", 2**20) == (2**19 - 4) // 256


def test_messages_to_servers_have_a_bucket_for_each_server_of_a_replica():
    pool = EngineNeeds(device="cpu", servers=5, bucket_bytes=256)
    found = [pool.message_bytes(replicas, adapters=False) for replicas in (1, 2, 5, 8)]
    assert found == [5 * 256, 3 * 256, 256, 256]
    assert pool.message_bytes(1, adapters=True) == 256
    assert EngineNeeds().message_bytes(1, adapters=False) == EngineNeeds().message_bytes(1, adapters=True) == 0
