"""Warm workers: run a function on N local processes as one job, with a deadline, and keep them for the next job."""

import contextlib
import faulthandler
import gc
import io
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import IO, Any

from lightning_megatron_rl.utilities.files import driver_files, remove_files
from lightning_megatron_rl.utilities.garbage import IMPORT_THRESHOLD, set_aside

GRACE = 5.0  # seconds the other ranks get to report after the first one failed


_MOST_THREADS = 600
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


class _Nursery:
    """A process that imports what every worker needs, once, and forks them.

    It does nothing else, so a worker starts with what its jobs import, and with nothing that they did.
    """

    def __init__(self) -> None:
        self._socket, child = socket.socketpair()
        self._log = tempfile.TemporaryFile("ab+")  # noqa: SIM115  lives as long as the process
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lightning_megatron_rl.verify.pool", str(child.fileno())],
            pass_fds=[child.fileno()],
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # an interrupt is for who waits for its workers
        )
        child.close()

    def fork(self, environment: dict[str, str], files: Sequence[int]) -> int:
        """Return the process id of a new worker: leader of a session, whose files 0, 1, 2 and connection are given."""
        return int(self._ask(_FORK, {"environment": environment, "path": sys.path}, files))

    def exit_code(self, pid: int, wait: bool) -> int | None:
        """Return the exit code of a worker, negative for a signal; None while it runs. Called no more once it has one.

        Args:
            pid: The worker.
            wait: Until it has ended.
        """
        code = self._ask(_WAIT, (pid, wait))
        return None if code is None else int(code)

    def close(self) -> None:
        """End it; workers end with their pipes."""
        self._socket.close()
        self.process.wait()
        self._log.close()

    def _ask(self, order: bytes, question: Any, files: Sequence[int] = ()) -> Any:
        try:
            socket.send_fds(self._socket, [order], files)
            _send(self._socket, question)
            return _receive(self._socket)
        except (EOFError, OSError) as error:
            code = self.process.wait()
            raise RuntimeError(f"the process that forks workers exited with code {code}\n{_tail(self._log)}") from error


_FORK, _WAIT = b"f", b"w"


def _send(sock: socket.socket, message: Any) -> None:
    data = pickle.dumps(message)
    sock.sendall(len(data).to_bytes(8, "big") + data)


def _receive(sock: socket.socket) -> Any:
    return pickle.loads(_read(sock, int.from_bytes(_read(sock, 8), "big")))


def _read(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (part := sock.recv(count - len(data))):
            raise EOFError("the other end is gone")
        data += part
    return data


def _environment() -> dict[str, str]:
    """What a worker sees: what can be imported here can be imported there, a user's own modules among it."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NVIDIA_TF32_OVERRIDE": "0",  # fp32 means fp32: TransformerEngine would multiply it as TF32
        "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path),
    }


class _Worker:
    """One process and the pipe to it; its output goes to a file that is quoted when it fails."""

    def __init__(self, nursery: _Nursery, node: int | None = None) -> None:
        self.log = tempfile.TemporaryFile("ab+")  # noqa: SIM115  lives as long as the worker; appended by both sides
        self.connection, child = Pipe()
        stdin, self._stdin = os.pipe()
        environment = _environment()
        if node is not None:  # NCCL refuses two processes on one GPU, but not those of another host
            environment |= {"NCCL_HOSTID": f"node{node}", "NCCL_SOCKET_IFNAME": "lo"}
        self._nursery = nursery
        self._code: int | None = None
        self.pid = nursery.fork(environment, [stdin, self.log.fileno(), child.fileno()])
        os.close(stdin)
        child.close()

    def exit_code(self, wait: bool = False) -> int | None:
        """How the worker ended; None while it runs."""
        if self._code is None:
            self._code = self._nursery.exit_code(self.pid, wait)
        return self._code

    @property
    def is_worn(self) -> bool:
        """Whether jobs have left too many threads behind; those of a process group wake up a hundred times a second."""
        try:
            return len(os.listdir(f"/proc/{self.pid}/task")) > _MOST_THREADS
        except FileNotFoundError:  # it is gone: the job will say so
            return False

    def kill(self) -> None:
        """End the worker and everything it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(RuntimeError):  # who forked it is gone, too
            self.exit_code(wait=True)
        remove_files(driver_files(self.pid))
        os.close(self._stdin)
        self.connection.close()
        self.log.close()

    def stacks(self) -> str:
        """The worker's output with the stack of every thread, while it is stuck."""
        size = os.fstat(self.log.fileno()).st_size
        if self.exit_code() is None:
            os.write(self._stdin, b"\n")
            deadline = time.monotonic() + GRACE
            while os.fstat(self.log.fileno()).st_size == size and time.monotonic() < deadline:
                time.sleep(0.1)
            time.sleep(0.5)  # the dump has begun: a loaded machine may need a moment for the rest
        return self.tail(8000)

    def tail(self, characters: int) -> str:
        """The end of what the worker has printed."""
        return _tail(self.log, characters)


def _tail(log: IO[bytes], characters: int = 4000) -> str:
    size = os.fstat(log.fileno()).st_size
    return os.pread(log.fileno(), characters, max(size - characters, 0)).decode(errors="replace")


class WorkerPool:
    """Up to `size` processes that stay warm between jobs (importing Megatron costs ten seconds, once).

    Args:
        size: Most processes of a job.
        on_start: Called with the id of each process that is started.
        nodes: Nodes that a job of `size` processes runs as, all of them on this machine and each with all its GPUs: a
            job of four under NCCL takes two GPUs as two nodes. A job that fits into one node runs as one.

    Raises:
        ValueError: Processes that do not divide into the nodes.

    Example:
        ``pool.run(all_reduce_ranks, 10, world_size=2)`` calls ``all_reduce_ranks(10)`` as ranks 0 and 1 of a gloo job
        and returns ``[result of rank 0, result of rank 1]``. The function must live at the top of a module.
    """

    def __init__(self, size: int = 4, on_start: Callable[[int], None] = lambda pid: None, nodes: int = 1) -> None:
        if nodes < 1 or size % nodes:
            raise ValueError(f"size={size} processes do not divide into nodes={nodes}")
        self.size = size
        self.on_start = on_start
        self.nodes = nodes
        self._nursery: _Nursery | None = None
        self._workers: list[_Worker] = []

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
            if worker.is_worn:
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

    def _start(self, index: int) -> _Worker:
        if self._nursery is None:
            self._nursery = _Nursery()
            self.on_start(self._nursery.process.pid)
        worker = _Worker(self._nursery, index // self.node_size if self.nodes > 1 else None)
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


def _collect(workers: list[_Worker], timeout: float) -> tuple[dict[int, Any], dict[int, _Failure]]:
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


def _watch_parent() -> None:
    """Print every thread's stack for each line on stdin, and end with the process at its other end.

    Not by a signal: at the end of a run Lightning resets those that Python does not know to be handled.
    """
    while os.read(0, 1):
        faulthandler.dump_traceback(all_threads=True)
    os._exit(1)


def _serve(descriptor: int) -> None:
    """The main loop of a worker: run jobs until the pipe closes."""
    threading.Thread(target=_watch_parent, daemon=True).start()
    num_modules = 0
    connection = Connection(descriptor)
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


def _import_for_workers() -> None:
    """Import what jobs need, which takes ten seconds. Not beside a GPU: what has touched that cannot be forked."""
    gc.set_threshold(IMPORT_THRESHOLD)
    if not _finds_gpu():
        import lightning_megatron_rl.verify.job  # noqa: F401
        from lightning_megatron_rl.compat.bridge import import_auto_bridge

        import_auto_bridge(())
    gc.freeze()  # pages that nobody writes to stay shared


def _finds_gpu() -> bool:
    """Ask in a process of its own, since to ask may touch it."""
    import torch

    pid = os.fork()
    if pid == 0:
        os._exit(int(torch.cuda.is_available()))
    return os.waitpid(pid, 0)[1] != 0


def _fork_workers(descriptor: int) -> None:
    """The main loop of a nursery: fork workers and wait for them, until the socket closes."""
    _import_for_workers()
    requests = socket.socket(fileno=descriptor)
    while True:
        order, files, _, _ = socket.recv_fds(requests, 1, 3)
        if not order:
            return
        question = _receive(requests)
        if order == _WAIT:
            pid, wait_for_it = question
            found, status = os.waitpid(pid, 0 if wait_for_it else os.WNOHANG)
            _send(requests, os.waitstatus_to_exitcode(status) if found else None)
            continue
        pid = os.fork()
        if pid == 0:
            requests.close()
            _become_worker(question, *files)
        for file in files:
            os.close(file)
        _send(requests, pid)


def _become_worker(setting: dict[str, Any], stdin: int, log: int, connection: int) -> None:
    """What a worker does after the fork; it does not return."""
    code = 1
    try:
        os.setsid()  # its own group, so that its children can be ended with it
        for file, number in ((stdin, 0), (log, 1), (log, 2)):
            os.dup2(file, number)
        os.close(stdin)
        os.close(log)
        os.environ.clear()
        os.environ.update(setting["environment"])
        sys.path[:] = setting["path"]
        _serve(connection)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    from lightning_megatron_rl.verify import pool  # answers are pickled under the module's name, not as `__main__`'s

    pool._fork_workers(int(sys.argv[1]))
