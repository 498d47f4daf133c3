"""`SamplingPhase`: who has the GPU's memory, the trainer or its sampler, and what it takes to change over."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeVar

import torch

from lightning_megatron_rl.devices.measure import describe_use
from lightning_megatron_rl.rollout.protocol import RolloutEngine

if TYPE_CHECKING:
    from lightning_megatron_rl.strategy.megatron import MegatronStrategy

T = TypeVar("T")
OUT_OF_MEMORY = "out of memory"  # in errors of CUDA's and of vLLM's allocator
TAGS = {"weights": "weights", "kv_cache": "key/value cache"}


class SamplingPhase:
    """The order in which trainer and sampler hand memory to each other; every method is for all ranks of a replica.

    The trainer's optimizer state and gradients go and its cached memory is released, the sampler's weights wake, the
    trainer's weights are pushed into them, the trainer's parameters go, the sampler's cache wakes; and back. In another
    order both would need memory at once (cache before weights, or before what the trainer's last step left cached).

    Args:
        engine: The sampler.
        strategy: The trainer's memory.
        timed: Makes a context that times what runs inside under a name.
        stays_awake: The engine could sleep, and keeps its memory all the same once it has it.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        strategy: "MegatronStrategy",
        timed: Callable[[str], AbstractContextManager[None]],
        *,
        stays_awake: bool = False,
    ) -> None:
        self._engine = engine
        self._strategy = strategy
        self._timed = timed
        self._stays_awake = stays_awake
        self._state = "training"  # "syncing": weights are awake; "sampling": all of the sampler is
        self.freed_bytes = 0  # by the sampler's last sleep, on this rank's word
        self.offloaded_bytes = 0  # by the trainer's last move
        self.kept_bytes = 0  # by the trainer's allocator after it, whatever of that is in use

    @property
    def changes_hands(self) -> bool:
        """Whether there is anything to hand over; if not, nothing here does anything."""
        return self._engine.sleep_level > 0 or bool(self._strategy.offloads)

    @property
    def sleep_level(self) -> int:
        """How deep the engine sleeps between rollouts; 0: it does not."""
        return 0 if self._stays_awake else self._engine.sleep_level

    def prepare_sync(self) -> None:
        """Make room for the sampler's weights and wake them; the trainer's are where they can be read."""
        if not self.changes_hands or self._state == "syncing":
            return
        if self._state == "sampling":  # a sampler that lost its weights in the middle
            self.reload()
        self.offloaded_bytes = self._offload(("optimizer", "gradients"))
        self._wake("weights")
        self._state = "syncing"

    def prepare_sampling(self) -> None:
        """Make room for the sampler's cache and wake it; called again, it does nothing."""
        if not self.changes_hands or self._state == "sampling":
            return
        self.prepare_sync()
        self.offloaded_bytes += self._offload(("parameters",))
        self._wake("kv_cache")
        self._state = "sampling"

    def finish(self) -> bool:
        """Put the sampler to sleep and take the trainer's memory back.

        Returns:
            Whether the sampler still has its weights.
        """
        if not self.changes_hands or self._state == "training":
            return True
        level = self.sleep_level
        if level:
            with self._timed("sleep"):
                self.freed_bytes = self.run(lambda: self._engine.sleep(level))
        self.reload()
        return level < 2

    def reload(self) -> None:
        """Take the trainer's memory back, whatever the sampler does."""
        if self._state == "training":
            return
        self._state = "training"
        with self._timed("offload"):
            self._strategy.reload()

    def run(self, function: Callable[[], T]) -> T:
        """Call the engine, on the leader or if it wants that on every rank, and return what the leader got."""
        replica = self._strategy.replica
        assert replica is not None
        if self._engine.is_collective:
            return replica.broadcast_object(function())
        return replica.run_on_leader(function)

    def _offload(self, parts: tuple[str, ...]) -> int:
        with self._timed("offload"):
            report = self._strategy.offload(parts)  # type: ignore[arg-type]
        device = self._strategy.root_device
        self.kept_bytes = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
        return report.num_bytes

    def _wake(self, tag: str) -> None:
        if self._engine.sleep_level:
            assert self._strategy.replica is not None
            self._strategy.replica.wait_for_all()  # the sampler may use the GPUs of all ranks
            with self._timed("sleep"):
                try:
                    self.run(lambda: self._engine.wake([tag]))
                except RuntimeError as error:
                    if OUT_OF_MEMORY not in str(error):
                        raise
                    raise RuntimeError(self._say_who_has_it(tag)) from error

    def _say_who_has_it(self, tag: str) -> str:
        device = self._strategy.root_device
        use = f" {describe_use(device.index)}" if device.type == "cuda" else ""
        return (
            f"the sampler's {TAGS[tag]} woke, and found too little memory.{use} Lower the engine's"
            " gpu_memory_utilization or kv_cache_memory_gb, offload more of the trainer (offload_while_sampling), or"
            " end what else is on the GPU."
        )
