"""vLLM's prefix cache, forgotten in the time that what is in it takes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.engine.llm_engine import LLMEngine


def reset_prefix_cache(engine: "LLMEngine", *, preempt: bool = False) -> bool:
    """Forget what is cached; return whether that was possible.

    Args:
        engine: Whose core is in this process; otherwise vLLM's own method does it alone.
        preempt: Responses under way lose their place in the cache, and compute it anew.
    """
    core: Any = getattr(engine.engine_core, "engine_core", None)
    if core is None:
        return engine.reset_prefix_cache(reset_running_requests=preempt)
    with cached_blocks_alone(core.scheduler):
        return engine.reset_prefix_cache(reset_running_requests=preempt)


@contextmanager
def cached_blocks_alone(scheduler: Any) -> Iterator[None]:
    """Show vLLM's reset no blocks but those that are cached.

    It visits every block of the cache, also those that hold nothing (vLLM 0.26). That takes some 60 ns for each: half a
    millisecond for 8,000 blocks, longer than all weights of a small model.
    """
    pool = scheduler.kv_cache_manager.block_pool
    every = pool.blocks
    pool.blocks = list(_cached_blocks(pool))
    try:
        yield
    finally:
        pool.blocks = every


def _cached_blocks(pool: Any) -> "Iterator[KVCacheBlock]":
    for found in pool.cached_block_hash_to_block._cache.values():
        if isinstance(found, dict):  # several of the same tokens
            yield from found.values()
        else:
            yield found
