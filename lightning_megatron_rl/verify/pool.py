"""Warm workers: run a function on N local processes as one job, with a deadline, and keep them for the next job."""

import contextlib
import gc
import io
import os
import pickle
import random
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from lightning_megatron_rl.utilities.garbage import IMPORT_THRESHOLD, set_aside
from lightning_megatron_rl.verify.nursery import Nursery, Worker

GRACE = 5.0  # seconds the other ranks get to report after the first one failed
_MOST_THREADS = 600  # those of a process group wake up a hundred times a second
_MODULES_WORTH_A_FREEZE = 100


class WorkerError(RuntimeError):
    """A function failed, died or ran past its deadline on at least one rank; the message holds each rank's story.

    Args:
        message: The stories.
        raised: What was raised, by rank: name of the exception's type and its message.
    """

    def __init__(self, message: str, raised: dict[int, tuple[str, str]]) -> None:
        super().__init__(message)
        self.raised = raised


@dataclass
class _Failure:
    """How a rank failed."""

    story: str  # for people
    exception: tuple[str, str] | None = None  # type and message of what it raised; None if it died or is stuck


@dataclass
class _Job:
    """What a worker needs to be rank `rank` of one job."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rank: int
    world_size: int
    node_size: int  # ranks of a node
    port: int
    timeout: float  # seconds
    init_process_group: bool


def import_libraries() -> None:
    """Import what jobs need, which takes ten seconds. Not beside a GPU: what has touched that cannot be forked."""
    gc.set_threshold(IMPORT_THRESHOLD)
    if not _finds_gpu():
        import lightning_megatron_rl.verify.job  # noqa: F401
        from lightning_megatron_rl.compat.bridge import import_auto_bridge

        import_auto_bridge(())


def _finds_gpu() -> bool:
    """Ask in a process of its own, since to ask may touch it."""
    import torch

    pid = os.fork()
    if pid == 0:
        os._exit(int(torch.cuda.is_available()))
    return os.waitpid(pid, 0)[1] != 0


class WorkerPool:
    """Up to `size` processes that stay warm between jobs (importing Megatron costs ten seconds, once).

    Args:
        size: Most processes of a job.
        on_start: Called with the id of each process that is started.
        nodes: Nodes that a job of `size` processes runs as, all of them on this machine and each with all its GPUs: a
            job of four under NCCL takes two GPUs as two nodes. A job that fits into one node runs as one.
        prepare: Called once, in the process that forks the others: what it imports they have.

    Raises:
        ValueError: Processes that do not divide into the nodes.

    Example:
        ``pool.run(all_reduce_ranks, 10, world_size=2)`` calls ``all_reduce_ranks(10)`` as ranks 0 and 1 of a gloo job
        and returns ``[result of rank 0, result of rank 1]``. The function must live at the top of a module.
    """

    def __init__(
        self,
        size: int = 4,
        on_start: Callable[[int], None] = lambda pid: None,
        nodes: int = 1,
        prepare: Callable[[], None] = import_libraries,
    ) -> None:
        if nodes < 1 or size % nodes:
            raise ValueError(f"size={size} processes do not divide into nodes={nodes}")
        self.size = size
        self.on_start = on_start
        self.nodes = nodes
        self.prepare = prepare
        self._nursery: Nursery | None = None
        self._workers: list[Worker] = []

    @property
    def node_size(self) -> int:
        """Most processes of a node."""
        return self.size // self.nodes

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        world_size: int,
        timeout: float = 240.0,
        init_process_group: bool = True,
        **kwargs: Any,
    ) -> list[Any]:
        """Run `function(*args, **kwargs)` on `world_size` ranks and return their results in rank order.

        The environment is torchrun's (RANK, LOCAL_RANK, GROUP_RANK, ...); the gloo group is up unless
        `init_process_group` is false; Megatron's parallel state, the group and the environment are reset afterwards.
        Results and arguments are pickled by value. Raises `WorkerError` after `timeout` seconds or when a rank raises.
        """
        if world_size > self.size:
            raise ValueError(f"world_size {world_size} > {self.size} workers of this pool")
        node_size = min(world_size, self.node_size)
        if world_size % node_size:
            raise ValueError(f"world_size {world_size} does not divide into nodes of {node_size} processes")
        if self._nursery is not None and self._nursery.process.poll() is not None:
            self.close()
        while len(self._workers) < world_size:
            self._workers.append(self._start(len(self._workers)))
        for index, worker in enumerate(self._workers[:world_size]):
            if worker.num_threads > _MOST_THREADS:  # that jobs have left behind
                worker.kill()
                self._workers[index] = self._start(index)
        workers = self._workers[:world_size]
        port = free_port()
        for rank, worker in enumerate(workers):
            job = _Job(function, args, kwargs, rank, world_size, node_size, port, timeout, init_process_group)
            worker.connection.send_bytes(pickle.dumps(job))
        results, failures = _collect(workers, timeout)
        if len(results) + len(failures) < world_size:  # a worker is still busy: find out where, then start new ones
            for rank, worker in enumerate(workers):
                if rank not in results and rank not in failures:
                    story = f"still running after {timeout:g} s or after another rank failed\n{worker.stacks()}"
                    failures[rank] = _Failure(story)
            self._end_workers()
        elif any(worker.exit_code() is not None for worker in workers):
            self._end_workers()
        if failures:
            ordered = sorted(failures.items())
            text = "\n".join(f"--- rank {rank} of {world_size}: {failure.story}" for rank, failure in ordered)
            raised = {rank: failure.exception for rank, failure in ordered if failure.exception is not None}
            name = getattr(function, "__qualname__", repr(function))  # of a partial
            raise WorkerError(f"{function.__module__}.{name} failed\n{text}", raised)
        return [results[rank] for rank in range(world_size)]

    def _start(self, index: int) -> Worker:
        if self._nursery is None:
            self._nursery = Nursery(self.prepare, _serve)
            self.on_start(self._nursery.process.pid)
        variables = {}
        if self.nodes > 1:  # NCCL refuses two processes on one GPU, but not those of another host
            variables = {"NCCL_HOSTID": f"node{index // self.node_size}", "NCCL_SOCKET_IFNAME": "lo"}
        worker = Worker(self._nursery, variables)
        self.on_start(worker.pid)
        return worker

    def _end_workers(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def close(self) -> None:
        """End all processes; the next job starts new ones."""
        self._end_workers()
        if self._nursery is not None:
            self._nursery.close()
            self._nursery = None


def _collect(workers: list[Worker], timeout: float) -> tuple[dict[int, Any], dict[int, _Failure]]:
    """Results and failures by rank, as far as they came within `timeout` (or `GRACE` after the first failure)."""
    results: dict[int, Any] = {}
    failures: dict[int, _Failure] = {}
    ranks = {worker.connection: rank for rank, worker in enumerate(workers)}
    deadline = time.monotonic() + timeout
    while ranks and (left := deadline - time.monotonic()) > 0:
        for connection in wait(list(ranks), left):
            assert isinstance(connection, Connection)
            rank = ranks.pop(connection)
            try:
                succeeded, value = _decode(connection.recv_bytes())
            except EOFError:
                code = workers[rank].exit_code(wait=True)
                succeeded, value = False, _Failure(f"exited with code {code}\n{workers[rank].tail(4000)}")
            if succeeded:
                results[rank] = value
            else:
                failures[rank] = value
                deadline = min(deadline, time.monotonic() + GRACE)
    return results, failures


def _encode(value: Any) -> bytes:
    """Pickle by torch: Megatron changes how tensors are pickled by Python, such that reading them imports Megatron."""
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _decode(data: bytes) -> Any:
    """Read what `_encode` wrote."""
    import torch

    return torch.load(io.BytesIO(data), weights_only=False)


def trainer_size(world_size: int) -> tuple[int, int]:
    """Return the Trainer's `devices` and `num_nodes` for `world_size` processes, as the pool has started them."""
    node_size = min(world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
    return node_size, world_size // node_size


def free_port() -> int:
    """A TCP port that is free on the loopback interface, below those that the system hands out by itself."""
    while True:
        port = random.SystemRandom().randint(20_000, 30_000)  # a seeded generator would give runs side by side one port
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _run_job(job: _Job) -> Any:
    """Run one rank of `job`, and restore the process's state."""
    from datetime import timedelta

    import torch

    from lightning_megatron_rl.parallel.rendezvous import local_store

    environment = dict(os.environ)
    os.environ.update(
        RANK=str(job.rank),
        LOCAL_RANK=str(job.rank % job.node_size),
        GROUP_RANK=str(job.rank // job.node_size),
        WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.node_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(job.port),
    )
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        if job.init_process_group:
            timeout = timedelta(seconds=job.timeout)
            store = local_store(job.rank, job.world_size, job.port, timeout)
            torch.distributed.init_process_group(
                "gloo", store=store, rank=job.rank, world_size=job.world_size, timeout=timeout
            )
        return job.function(*job.args, **job.kwargs)
    finally:
        if "megatron.core.parallel_state" in sys.modules:
            sys.modules["megatron.core.parallel_state"].destroy_model_parallel()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        os.environ.clear()
        os.environ.update(environment)
        gc.collect()  # a model is full of reference cycles
        if torch.cuda.is_initialized():
            torch.cuda.ipc_collect()  # and what was lent to processes that are gone
            torch.cuda.empty_cache()


def _serve(connection: Connection) -> None:
    """Run jobs until the pipe closes."""
    num_modules = 0
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        try:
            answer = _encode((True, _run_job(pickle.loads(message))))
        except BaseException as error:  # SystemExit of a library must be told too
            answer = _encode((False, _Failure(traceback.format_exc(), (type(error).__name__, str(error)))))
        sys.stdout.flush()
        if len(sys.modules) > num_modules + _MODULES_WORTH_A_FREEZE:
            # modules are objects by the ten thousand: to look at them after every job takes longer than a small job.
            # Not after each, for something of a job may still be alive, such as groups with their threads
            set_aside()
            num_modules = len(sys.modules)
        connection.send_bytes(answer)
