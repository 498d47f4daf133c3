"""`RayEngines`: an engine made of vLLM servers that Ray places on the nodes of a cluster."""

import logging
import secrets
import uuid
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from lightning_megatron_rl.parallel.distributed import replica_share
from lightning_megatron_rl.parallel.ray_cluster import INSTALL
from lightning_megatron_rl.rollout.servers.about import WeightsOver, refuse_nccl
from lightning_megatron_rl.rollout.servers.client import ServerClient, ServerLostError
from lightning_megatron_rl.rollout.servers.guard import token_digest
from lightning_megatron_rl.rollout.servers.pool import ServerPool
from lightning_megatron_rl.rollout.servers.ray_messages import News, Order
from lightning_megatron_rl.rollout.servers.ray_places import RayPlaces
from lightning_megatron_rl.rollout.vllm.engine import VLLMEngine
from lightning_megatron_rl.rollout.vllm.settings import Dtype
from lightning_megatron_rl.utilities.ranges import COUNT, POSITIVE, check_ranges, check_words

log = logging.getLogger(__name__)

_Device = Literal["cuda", "cpu"]


class RayEngines(ServerPool):
    """Samples on vLLM servers that Ray places on any nodes of its cluster, and places again; see docs/ray_engines.md.

    An engine whose processes, or whose node, are lost loses no response: each goes on from the tokens that are there,
    on another engine, or when one is back. It is placed anew, and gets the newest weights before it samples.

    The cluster is the one that RAY_ADDRESS names, or that this host is a node of. The model's directory must have the
    same path on all nodes. Ray counts what it was told of: GPUs that a trainer uses must not be Ray's to give away.

    Args:
        num_engines: In all; replicas of the model share them out, at least one for each.
        tensor_parallel_size: GPUs (on CPU: processes) of each engine, all of one node.
        device: "cuda" asks Ray for GPUs, "cpu" for none.
        num_cpus: CPUs that Ray reserves for each engine; unset: one for each of its processes' threads. # [CPUs]
        resources: Others that Ray reserves for each, by the names that nodes were started with, such as
            ``{"engines": 1}``: only such nodes get engines.
        max_model_len: Longest prompt and response together. # [tokens]
        dtype: "auto" is the dtype in the model's config; "float32", "bfloat16" or "float16".
        kv_cache_memory_gb: Size of the key/value cache; unset: 0.5 on CPU, from `gpu_memory_utilization` on CUDA. # GiB
        gpu_memory_utilization: Share of the GPU's memory for weights and cache, if `kv_cache_memory_gb` is unset.
        max_num_seqs: Most sequences that an engine samples at a time.
        num_threads: CPU threads of each of an engine's processes; unset: by the size of the model.
        vllm_args: Other arguments of vLLM's own, as `VLLMEngine` takes them.
        start_timeout_s: How long to wait for the resources, and then for engines to load. # seconds
        call_timeout_s: Deadline of an update, of waiting for a token, and for an engine when all are lost. # seconds
        bucket_mb: Size of the buffers that a rank sends weights to a server in. # MiB
        weights_over: "nccl" sends weights from the trainer's GPUs to those of servers after a server's first update,
            "gloo" through the host's memory. "auto" is gloo for now: NCCL between trainer and servers has not been run
            between machines yet.

    Raises:
        ValueError: An argument is outside its range.
    """

    def __init__(
        self,
        num_engines: int = 1,
        tensor_parallel_size: int = 1,
        device: _Device = "cuda",
        num_cpus: float | None = None,
        resources: dict[str, float] | None = None,
        max_model_len: int = 2048,
        dtype: Dtype = "auto",
        kv_cache_memory_gb: float | None = None,
        gpu_memory_utilization: float = 0.9,
        max_num_seqs: int = 256,
        num_threads: int | None = None,
        vllm_args: dict[str, Any] | None = None,
        start_timeout_s: float = 600,
        call_timeout_s: float = 600,
        bucket_mb: int = 256,
        weights_over: WeightsOver = "auto",
    ) -> None:
        ranges = {"num_engines": COUNT, "num_cpus": POSITIVE, "start_timeout_s": POSITIVE, "call_timeout_s": POSITIVE}
        check_ranges(ranges | {"bucket_mb": COUNT}, locals(), "engine.")
        check_words({"device": _Device}, locals(), "engine.")
        if weights_over == "nccl" and device == "cpu":
            raise refuse_nccl("engine.device is 'cpu'")
        check_resources(resources or {})
        super().__init__(num_engines, max_model_len, call_timeout_s, bucket_mb, weights_over)
        self.settings: dict[str, Any] = {
            "max_model_len": max_model_len,
            "dtype": dtype,
            "device": device,
            "kv_cache_memory_gb": kv_cache_memory_gb,
            "gpu_memory_utilization": gpu_memory_utilization,
            "max_num_seqs": max_num_seqs,
            "num_threads": num_threads,
            "tensor_parallel_size": tensor_parallel_size,
            "vllm_args": vllm_args,
        }
        VLLMEngine(**self.settings)  # refuses what it refuses
        self.num_engines = num_engines
        self.start_timeout_s = start_timeout_s
        cpus = num_cpus or tensor_parallel_size * (num_threads or 1)
        gpus = {"GPU": float(tensor_parallel_size)} if device == "cuda" else {}
        self.asked = {"CPU": float(cpus), **gpus, **(resources or {})}
        self._places: RayPlaces | None = None
        self._clients: list[ServerClient] = []
        self._is_ready = False

    def start(self, model_path: str | Path) -> None:
        """Reserve the engines' resources and begin to start them; `wait_ready` waits for them.

        Raises:
            ValueError: The cluster cannot be joined, has less than is asked, or others have it; fewer engines than
                replicas.
            RuntimeError: Ray is not installed, or does not answer, or the engine runs already.
        """
        if find_spec("ray") is None:
            raise RuntimeError(f"RayEngines without Ray: {INSTALL}")
        replica, replicas = replica_share()
        if self.num_engines < replicas:
            raise ValueError(
                f"engine.num_engines={self.num_engines} for {replicas} replicas of the model: each replica samples on"
                f" engines of its own. Ask for {replicas}, or train with fewer replicas."
            )
        token, run = secrets.token_urlsafe(32), uuid.uuid4().hex  # of this run alone: it is known nowhere else
        count = len(range(replica, self.num_engines, replicas))
        self._clients = [ServerClient("", token, run, self.call_timeout_s) for _ in range(count)]
        self._open(self._clients, model_path, self.start_timeout_s)
        order = Order(
            model=str(Path(model_path).resolve()),
            settings=self.settings,
            digest=token_digest(token),
            asked=self.asked,
            total=self.num_engines,
            count=count,
            wait_s=self.start_timeout_s,
        )
        self._places = RayPlaces(order, self._hear)
        try:
            self._places.begin()
        except BaseException:
            self.close()
            raise

    def wait_ready(self) -> None:
        """Wait until all engines have loaded the model and answer.

        Raises:
            ValueError: An engine's node has another version of this package, of vLLM, or another model.
            RuntimeError: An engine cannot start, says why, or does not answer within `start_timeout_s`.
        """
        if self._is_ready:
            return
        try:
            self.connections.admit()
        except BaseException:
            self.close()
            raise
        self._is_ready = True

    def _hear(self, news: News) -> None:
        """Take what is new of an engine; in a thread of its own."""
        client, connections = self._clients[news.engine], self.connections
        if news.url is not None:
            log.info("engine %d is on %s: %s", news.engine, news.host, news.url)
            connections.run(client.move(news.url))
            return
        tail = f"; last of its output:\n{news.output}" if news.output else ""
        if not self._is_ready:
            client.failure = f"engine {news.engine} on Ray has ended: {news.ended}{tail}"
            return
        log.warning("engine %d has ended, and is placed anew: %s", news.engine, news.ended)
        log.info("engine %d%s", news.engine, tail)
        connections.lose(client, ServerLostError(f"engine {news.engine} has ended: {news.ended}"))

    def close(self) -> None:
        """End the engines; what is under way is lost."""
        places, self._places = self._places, None
        if places is not None:
            places.hear_no_more()
        self._is_ready = False
        super().close()
        if places is not None:
            places.close()

    def describe(self) -> str:
        """Return what the engine is, for the table at start."""
        parts = ", ".join(f"{amount:g} {name}" for name, amount in self.asked.items())
        return f"{self.num_engines} vLLM server(s) placed by Ray, {parts} each"


def check_resources(resources: dict[str, float]) -> None:
    """Refuse resources that have a setting of their own, or an amount that is none.

    Raises:
        ValueError: Names the resource.
    """
    for name, amount in resources.items():
        if name in ("CPU", "GPU"):
            raise ValueError(f"engine.resources has {name}: set num_cpus, or tensor_parallel_size")
        if not amount > 0:
            raise ValueError(f"engine.resources: {amount} of {name!r} must be above 0")
