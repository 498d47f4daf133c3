"""Supervises vLLM's process: starts it, gives it weights, lets it sleep, and replaces it when it fails."""

import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from lightning_megatron_rl.rollout.model_directory import CheckpointLayout, SourceCheck
from lightning_megatron_rl.rollout.protocol import (
    Generation,
    GenerationRequest,
    Progress,
    ResponsesLostError,
    SamplingParams,
    StreamingEngine,
    StreamMode,
    StreamRequest,
    SyncReport,
    WeightsLostError,
    check_requests,
    check_sleep,
    note_sleep,
)
from lightning_megatron_rl.rollout.turns import one_at_a_time
from lightning_megatron_rl.rollout.vllm.process import (
    EngineCallError,
    EngineDiedError,
    EngineTimeoutError,
    WorkerProcess,
)
from lightning_megatron_rl.rollout.vllm.sockets import SOCKETS_VARIABLE, SocketDirectory
from lightning_megatron_rl.utilities.notices import tell_loss
from lightning_megatron_rl.utilities.spans import Span, SpanLog
from lightning_megatron_rl.weights.placement import Placement
from lightning_megatron_rl.weights.source import WeightSource
from lightning_megatron_rl.weights.transports.base import Sent, Transport
from lightning_megatron_rl.weights.transports.host import HOST, SharedWeights

WORKER_MODULE = "lightning_megatron_rl.rollout.vllm.worker"
WEIGHTS, KV_CACHE = "weights", "kv_cache"  # vLLM's names of what sleeps and wakes apart
OTHERS_CALL_S = 10.0  # that `close` gives the call of another thread
LET_GO_S = 30.0  # it is an instant's work; more at the end of a run would be a hang

T = TypeVar("T")
log = logging.getLogger(__name__)


class SupervisedEngine(StreamingEngine):
    """vLLM in a child process; `VLLMEngine` says what it is started with."""

    call_timeout_s: float
    start_timeout_s: float
    max_restarts: int
    echo_output: bool
    _layout: CheckpointLayout
    _check: SourceCheck
    _llm_arguments: dict[str, Any]
    _environment: dict[str, str]

    activity: SpanLog
    stream_mode: StreamMode | None = None
    _lock: "threading.RLock | None" = None

    @property
    def call_lock(self) -> "threading.RLock":
        """Who has it may talk to the process."""
        if self._lock is None:  # by the first call: an engine that was never used can be copied
            self._lock = threading.RLock()
        return self._lock

    def _forget(self) -> None:
        self._stream_worker: WorkerProcess | None = None  # which has responses under way
        self.weight_version = 0
        self.num_restarts = 0
        self._worker: WorkerProcess | None = None
        self._limits: dict[str, int] | None = None  # of the worker; None until it has said that it is ready
        self._shared: SharedWeights | None = None
        self._failures: list[Exception] = []
        self._sockets: SocketDirectory | None = None
        # Pushes are numbered from 1; 0 stands for the weights in the model's directory.
        self._num_pushes = 0
        self._wanted_push = 0  # what should sample
        self._wanted_version = 0
        self._shared_push: int | None = None  # what the shared memory holds; None: nothing whole
        self._worker_push: int | None = 0  # what the worker has loaded; None: nothing whole
        self._awake = {WEIGHTS, KV_CACHE}  # of the worker's memory
        self._transport: Transport | None = None  # None: shared memory
        self._worker_plan: list[Placement] | None = None  # what the worker knows of the shared memory's layout
        # the last source, and the same checked against the layout

    @property
    def pid(self) -> int | None:
        """Process id of the engine's process, if there is one."""
        return None if self._worker is None or self._worker.is_gone else self._worker.pid

    @one_at_a_time
    def wait_ready(self) -> None:
        """Block until the process can sample with the weights last pushed.

        Raises:
            RuntimeError: It cannot start, did not start in time, or failed more often than `max_restarts`.
        """
        self._retrying(lambda worker: None)

    @one_at_a_time
    def generate(self, requests: list[GenerationRequest], params: SamplingParams) -> list[list[Generation]]:
        """Sample `num_generations` responses for each request.

        Raises:
            ValueError: A request is refused; see `check_requests`.
            RuntimeError: The call failed in vLLM, or the process failed or outlasted `call_timeout_s` too often.
        """

        def call(worker: WorkerProcess) -> tuple[int, list[list[Generation]]]:
            assert self._limits is not None
            check_requests(requests, params, **self._limits)
            self._wake(worker, {WEIGHTS, KV_CACHE})
            return worker.request("generate", ("generate", requests, params), self.call_timeout_s)

        if not requests:
            return []
        version, generations = self._retrying(call)
        if version != self.weight_version:
            raise RuntimeError(f"the engine sampled with weights of version {version}, not {self.weight_version}")
        return generations

    @one_at_a_time
    def submit(self, requests: list[StreamRequest], params: SamplingParams) -> None:
        """Take responses in, beside those under way; see `StreamingEngine`.

        Raises:
            ValueError: A request is refused; see `check_requests`.
            ResponsesLostError: The process that had earlier ones is gone; none of these was taken in either.
            RuntimeError: As `generate`.
        """

        def call(worker: WorkerProcess) -> None:
            assert self._limits is not None
            whole = [GenerationRequest(r.token_ids, r.seed, max_tokens=r.max_tokens) for r in requests]
            check_requests(whole, params, **self._limits)
            if self._stream_worker not in (None, worker):
                self._stream_worker = None
                raise ResponsesLostError("the engine's process was replaced, and what it sampled went with it")
            self._wake(worker, {WEIGHTS, KV_CACHE})
            worker.request("submit", ("submit", requests, params), self.call_timeout_s)
            self._stream_worker = worker

        if requests:
            self._retrying(call)

    @one_at_a_time
    def collect(self, wait_s: float, *, everything: bool = False) -> list[Progress]:
        """Sample until a response is complete, at most `wait_s` seconds; return what is new."""
        return self._ask_stream("collect", wait_s, everything)

    @one_at_a_time
    def hold(self) -> None:
        """Sample nothing before the next `collect` that waits, unless the mode is to sample in the background."""
        self._ask_stream("hold")

    @one_at_a_time
    def withdraw(self) -> list[Progress]:
        """Stop all responses under way and return what is new of them."""
        news = self._ask_stream("withdraw")
        self._stream_worker = None
        return news

    def _ask_stream(self, name: str, *arguments: Any) -> list[Progress]:
        worker = self._stream_worker
        if worker is None:
            return []
        try:
            if worker is not self._worker or worker.is_gone:
                raise EngineDiedError("the engine's process was replaced")
            return worker.request(name, (name, *arguments), self.call_timeout_s)
        except (EngineDiedError, EngineTimeoutError) as error:
            if worker is self._worker:
                self._failures.append(error)
            self._stream_worker = None
            raise ResponsesLostError(f"what the engine's process sampled went with it: {error}") from error

    @one_at_a_time
    def update_weights(self, source: WeightSource, version: int) -> SyncReport:
        """Push a full set of weights and clear the prefix cache; the version counts from the moment they are loaded.

        Through the host the tensors are copied into shared memory as they come. If the source raises or the set is not
        the model's, the old weights go on sampling; should the process then have to be replaced, they are gone with it,
        and `generate` asks for a new update.

        Args:
            source: Hugging Face names and whole tensors, on CPU or CUDA, in any dtype.
            version: Becomes `weight_version`.

        Raises:
            ValueError: The names or shapes differ from those of the model's directory.
            RuntimeError: The process failed, or outlasted `call_timeout_s`, more often than `max_restarts`.
        """
        began = time.perf_counter()
        self._started()
        checked = self._check(source)
        self._shared_push = None
        transport = self._transport
        if transport is None or not (transport.takes_host or checked.device.type == "cuda"):
            sent, name, peer_bytes = self._update_through_host(checked, version), HOST, 0
        else:
            sent = self._update_by(transport, checked, version)
            name, peer_bytes = transport.name, transport.peer_bytes
        seconds = time.perf_counter() - began
        report = SyncReport(sent.num_bytes, seconds, sent.extra_bytes, name, sent.replayed, peer_bytes)
        log.info("weights of version %d: %.3f GB through %s in %.3f s", version, sent.num_bytes / 1e9, name, seconds)
        return report

    def _update_through_host(self, source: WeightSource, version: int) -> Sent:
        plan = self._started().write(source.tensors())
        self._num_pushes += 1
        self._shared_push = self._wanted_push = self._num_pushes
        self._wanted_version = version
        self.wait_ready()
        return Sent(plan[-1].end, extra_bytes=0, replayed=False)

    def _update_by(self, transport: Transport, source: WeightSource, version: int) -> Sent:
        while True:
            try:
                return self._transfer(self._running_worker(), transport, source, version)
            except (EngineDiedError, EngineTimeoutError) as error:
                self._failures.append(error)
                if source.whole is None:
                    raise WeightsLostError(
                        f"the engine's process was lost during the update to version {version}, and the weights came"
                        f" one by one: update_weights again with all of them. {error}"
                    ) from error

    def _transfer(self, worker: WorkerProcess, transport: Transport, source: WeightSource, version: int) -> Sent:
        def ask(message: tuple[Any, ...], meanwhile: Callable[[], None] | None = None) -> Any:
            worker.send("update_weights", message, self.call_timeout_s)
            if meanwhile is not None:
                meanwhile()
            return worker.receive("update_weights", self.call_timeout_s)

        self._num_pushes += 1
        self._worker_push, self._wanted_push, self._wanted_version = None, self._num_pushes, version
        try:
            self._wake(worker, {WEIGHTS})
            transport.connect(
                worker.pid,
                lambda info: worker.send("connect", ("connect", info), self.call_timeout_s),
                lambda: worker.receive("connect", self.call_timeout_s),
            )
            sent = transport.send(source, ask, version)
            transport.finish()
        except EngineCallError as error:
            raise EngineDiedError(str(error)) from error
        except BaseException:
            worker.kill()  # it has a part of the weights
            raise
        self._worker_push, self.weight_version = self._wanted_push, version
        return sent

    @one_at_a_time
    def let_go(self) -> None:
        """Take memory back that the process keeps open from one update to the next; it has its own weights."""
        self._checked = None
        if self._transport is None or not self._transport.is_open:
            return
        if self._worker is not None and not self._worker.is_gone:
            try:
                self._worker.request("update_weights", ("let_go",), LET_GO_S)
                self._transport.forget()
                self._transport.finish()
                return
            except (EngineDiedError, EngineCallError, EngineTimeoutError) as error:  # the next call starts another
                self._failures.append(error)
        self._transport.forget(workers_are_gone=True)
        self._transport.finish()

    @one_at_a_time
    def sleep(self, level: int = 1) -> int:
        """Free the GPU's memory: 1 moves the weights to the host, 2 drops them; the cache is dropped by both.

        Returns:
            Bytes that were freed on the engine's GPUs; 0 on CPU, where vLLM keeps its memory, and if it is asleep.

        Raises:
            ValueError: `level` is neither, or the engine was built with ``sleep_level=0``.
            RuntimeError: The call failed in vLLM. A process that is lost is asleep: the next call starts another.
        """
        self._started()
        check_sleep(level, self.sleep_level)
        if not self._awake:
            return 0
        if self._transport is not None and self._transport.copies_peers:
            self.let_go()  # the copies would stay on the GPU
        try:
            freed, expected = self._running_worker().request("sleep", ("sleep", level), self.call_timeout_s)
        except (EngineDiedError, EngineTimeoutError) as error:
            self._failures.append(error)
            freed, expected = 0, 0
        self._awake = set()
        if level == 2:
            self._worker_push = None
        note_sleep(level, freed, expected)
        return int(freed)

    @one_at_a_time
    def wake(self, tags: list[str] | None = None) -> None:
        """Take memory again for "weights" and "kv_cache", both or one of them; the cache comes back empty.

        Raises:
            ValueError: Another tag.
            RuntimeError: As `generate`; out of memory among the reasons.
        """
        self._started()
        wanted = {WEIGHTS, KV_CACHE} if tags is None else set(tags)
        if wanted - {WEIGHTS, KV_CACHE}:
            raise ValueError(f"wake(tags={tags}): {WEIGHTS!r} and {KV_CACHE!r} can wake")
        self._retrying(lambda worker: self._wake(worker, wanted), self._running_worker)

    def _wake(self, worker: WorkerProcess, tags: set[str]) -> None:
        missing = sorted(tags - self._awake, reverse=True)  # weights first
        if missing:
            worker.request("wake", ("wake", missing), self.call_timeout_s)
            self._awake |= tags

    def close(self) -> None:
        """End the process and free the shared memory; the engine can be started again.

        A call of another thread that does not end soon is cut off.
        """
        lock = self._lock or threading.RLock()
        if not lock.acquire(timeout=OTHERS_CALL_S):
            if self._worker is not None:
                self._worker.kill()  # by which that call ends
            lock.acquire()
        try:
            self._end()
        finally:
            lock.release()

    def _end(self) -> None:
        self.let_go()
        if self._worker is not None:
            self._worker.close(grace_s=5.0 if self._limits else 0.0)  # while it loads it does not listen
        if self._shared is not None:
            self._shared.close()
        if self._sockets is not None:
            self._sockets.close()
        self._forget()

    def _retrying(
        self, call: Callable[[WorkerProcess], T], find_worker: Callable[[], WorkerProcess] | None = None
    ) -> T:
        """Run `call` on a worker, on a new one whenever the process has died, or has not answered in time.

        Args:
            call: What is asked of the worker.
            find_worker: Returns the worker; one that has the wanted weights if not given.

        Raises:
            RuntimeError: The call failed in vLLM, the process did not start in time, or it was lost too often.
        """
        self._started()
        while True:
            try:
                return call((find_worker or self._ready_worker)())
            except EngineDiedError as error:
                self._failures.append(error)
            except EngineTimeoutError as error:
                self._failures.append(error)
                if self._limits is None:  # a start that takes too long takes as long again
                    raise
            except EngineCallError as error:
                self._failures.append(error)
                raise

    def _ready_worker(self) -> WorkerProcess:
        """A worker with the wanted weights."""
        lost = self._wanted_push not in (0, self._shared_push)
        if lost and (self._worker is None or self._worker.is_gone):
            raise WeightsLostError(
                f"the weights of version {self._wanted_version} went with the engine's process, and nobody has a copy"
                " of them; call update_weights with a full set of weights"
            )
        worker = self._running_worker()
        if self._worker_push != self._wanted_push:
            if self._shared_push != self._wanted_push:
                raise WeightsLostError(
                    "the engine dropped its weights when it fell asleep at level 2; call update_weights with a full set"
                    " of weights"
                )
            self._load_shared(worker)
        return worker

    def _running_worker(self) -> WorkerProcess:
        """A worker that answers, whatever its weights."""
        if self._worker is None or self._worker.is_gone:
            self._relaunch()
        assert self._worker is not None
        if self._limits is None:
            remaining = self._worker.launched_at + self.start_timeout_s - time.monotonic()
            self._limits = self._worker.receive("start", remaining)
        return self._worker

    def _load_shared(self, worker: WorkerProcess) -> None:
        assert self._shared is not None
        plan = list(self._shared.plan)
        try:
            self._wake(worker, {WEIGHTS})
            news = None if plan == self._worker_plan else plan
            worker.request("update_weights", ("update", news, self._wanted_version), self.call_timeout_s)
        except EngineCallError as error:  # a failed reload leaves layers without weights: only a new process helps
            raise EngineDiedError(str(error)) from error
        self._worker_plan = plan
        self._worker_push = self._wanted_push
        self.weight_version = self._wanted_version

    def _launch(self) -> None:
        assert self._shared is not None
        self._limits = None
        self._worker_push, self._worker_plan = 0, None
        if self._transport is not None:
            self._transport.forget(workers_are_gone=True)
        self._awake = {WEIGHTS, KV_CACHE}
        if self._sockets is None:
            self._sockets = SocketDirectory()
        environment = {SOCKETS_VARIABLE: str(self._sockets.path)} | self._environment
        self._worker = WorkerProcess(
            WORKER_MODULE,
            environment,
            inherited_fds=(self._shared.fd,),
            echo_output=self.echo_output,
            hear=functools.partial(_note, self.activity, self.stream_mode is not None and self.stream_mode.background),
        )
        self._worker.send("start", ("start", self._llm_arguments, self.stream_mode), self.start_timeout_s)

    def _relaunch(self) -> None:
        last = self._failures[-1] if self._failures else None  # None: it was interrupted
        if self.num_restarts >= self.max_restarts:
            raise RuntimeError(
                f"the vLLM engine needs restart {self.num_restarts + 1} of max_restarts={self.max_restarts} and gives "
                f"up; raise max_restarts if what ended it was an accident; the last failure: {last}"
            ) from last
        why = "a call was interrupted" if last is None else str(last).split("; last lines")[0].splitlines()[0]
        self._check_directory(why)
        self.num_restarts += 1
        tell_loss(
            f"the vLLM engine's process is replaced (restart {self.num_restarts} of max_restarts={self.max_restarts}):"
            f" {why}"
        )
        self._launch()

    def _check_directory(self, why: str) -> None:
        """Refuse to start another process from a model directory that has changed since the start."""
        directory = self._llm_arguments["model"]
        try:
            changed = CheckpointLayout.read(directory).shapes != self._layout.shapes
            problem = "it holds other tensors than at the start" if changed else ""
        except (OSError, ValueError) as error:
            problem = str(error)
        if problem:
            raise RuntimeError(
                f"the vLLM engine's process must be replaced ({why}), but its model directory {directory} has vanished"
                f" or changed since the start: {problem}. Put it back, and go on from the last checkpoint."
            )

    def _started(self) -> SharedWeights:
        if self._shared is None:
            raise RuntimeError("the engine is not started; call start(model_path) first")
        return self._shared


def _note(activity: SpanLog, works_unasked: bool, news: tuple[float, list[Span]]) -> None:
    """Note what a process says that it has done; one that works unasked has done more by the next time."""
    told_at, spans = news
    activity.extend(spans, known_until=told_at if works_unasked else None)
