"""The engine's own process (`python -m`): vLLM in it, one call at a time from the trainer."""

import ctypes
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, cast

from lightning_megatron_rl.compat.vllm_cache import reset_prefix_cache
from lightning_megatron_rl.rollout.protocol import (
    Generation,
    GenerationRequest,
    Progress,
    SamplingParams,
    StreamMode,
    StreamRequest,
)
from lightning_megatron_rl.rollout.vllm.step_loop import StepLoop, tokens_prompt, vllm_params
from lightning_megatron_rl.utilities.garbage import collect_as_usual, collect_rarely
from lightning_megatron_rl.utilities.spans import JOIN_S, SAMPLING, Reader, Span, SpanLog

if TYPE_CHECKING:
    from torch import Tensor
    from vllm import LLM, RequestOutput
    from vllm.logprobs import FlatLogprobs

    from lightning_megatron_rl.weights.cuda_memory import Handle
    from lightning_megatron_rl.weights.lent import LentWeight
    from lightning_megatron_rl.weights.placement import Placement
    from lightning_megatron_rl.weights.transports.base import Part

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PARENT_CHECK_S = 1.0


def die_with_parent(parent_pid: int, *, by_signal: bool) -> None:
    """End this process group when the trainer ends, in whatever way and whatever runs here.

    End of file on the connection is not enough: it is only seen between calls, and a data-loader worker that the
    trainer forked keeps the trainer's end open.
    """
    if by_signal:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(PARENT_CHECK_S)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


class Worker:
    """Answers the trainer's messages; the state is vLLM's and the plan of the shared weights."""

    def __init__(self, weights_fd: int | None) -> None:
        # By process id, not /proc/self: with tensor parallelism other processes open it, too.
        self._weights_path = f"/proc/{os.getpid()}/fd/{weights_fd}"  # None: in the trainer's process it is not opened
        self._plan: list[Placement] = []
        self._llm: LLM | None = None
        self._version = 0
        self._stream: StepLoop | None = None
        self._in_background = False
        self._is_awaited = False  # a batch is waited for: sampling goes on also between two calls of `collect`
        self._failure: Exception | None = None  # of a step in the background, until somebody asks
        self._update_began: float | None = None  # of one that comes in parts, between which no step may be taken
        self.activity = SpanLog(JOIN_S)
        self._untold = Reader(self.activity)

    def start(self, arguments: dict[str, Any], stream: StreamMode | None = None) -> dict[str, int]:
        """Load the model; return what requests are checked against."""
        with self.activity.during("start"):
            from vllm import LLM

            from lightning_megatron_rl.compat.vllm_logprobs import widen_logprobs
            from lightning_megatron_rl.compat.vllm_steps import quicken

            widen_logprobs()  # before vLLM compiles its kernels
            self._llm = LLM(**arguments)
            quicken(self._llm)
        collect_as_usual()
        if stream is not None:
            self._stream = StepLoop(self._llm, keeps_cache=stream.keeps_cache, activity=self.activity)
            self._in_background = stream.background
        config = self._llm.model_config
        return {"vocab_size": config.get_vocab_size(), "max_model_len": config.max_model_len}

    def update(self, plan: "list[Placement] | None", version: int) -> None:
        """Load the shared weights (`None`: laid out as last time) and forget everything computed with the old ones."""
        if plan is not None:
            self._plan = plan
        self.call("load_shared_weights", (self._weights_path, self._plan), version)

    def reload(self, weights: "list[tuple[str, Tensor]]", version: int) -> None:
        """Load weights of the same process layer by layer, as `update` does."""
        self.call("reload_weights", (iter(weights),), version)

    def call(self, method: str, arguments: tuple[Any, ...], version: int) -> None:
        """Update the weights by a method of each worker, such as one of a transport's `extension`."""
        assert self._llm is not None
        self._settle()
        with self.activity.during("update"):
            self._llm.collective_rpc(method, args=arguments)
            self._forget_prefixes()
        self._version = version

    def connect(self, info: dict[str, Any]) -> None:
        """Meet the trainer in a group of NCCL."""
        assert self._llm is not None
        self._llm.init_weight_transfer_engine({"init_info": info})

    def begin(self) -> None:
        """Start an update that comes in parts. The prefix cache is reset while the first is on its way."""
        assert self._llm is not None
        self._settle()
        self._update_began = time.monotonic()
        self._forget_prefixes()
        self._llm.start_weight_update()

    def load(self, part: "Part") -> None:
        """Load one part; when this returns, the trainer may use its memory for the next."""
        assert self._llm is not None
        self._llm.update_weights({"update_info": vars(part)})

    def end(self, version: int) -> bool:
        """Finish an update that came in parts; return whether every worker replayed the copies of an earlier one."""
        assert self._llm is not None
        replayed = all(self._llm.collective_rpc("finish_update"))
        self._version = version
        self._note_update()
        return replayed

    def replace(self, part: "Part", version: int) -> bool:
        """Do a whole update of one part; as `end`. The prefix cache is reset while the GPU copies."""
        assert self._llm is not None
        self._settle()
        with self.activity.during("update"):
            self._llm.collective_rpc("load_all", args=(vars(part),))
            self._forget_prefixes()
            replayed = all(self._llm.collective_rpc("finish_update"))
        self._version = version
        return replayed

    def _note_update(self) -> None:
        """An update that came in parts is over."""
        assert self._update_began is not None
        began, ended = self._update_began, time.monotonic()
        self._update_began = None
        self.activity.add(Span("update", began, ended, ended - began))

    def borrow(self, weights: "dict[str, LentWeight]", memory: "list[list[Handle | Tensor]]") -> list[int | None]:
        """Open the memory that weights lie in, by what each worker opens it with; return what each says of it."""
        assert self._llm is not None
        return self._llm.collective_rpc("borrow", args=(weights, memory))

    def let_go(self) -> None:
        """Drop all references to the trainer's memory."""
        assert self._llm is not None
        self._llm.collective_rpc("let_go")

    def _settle(self) -> None:
        """End what was begun with the weights that are there: an update comes."""
        self._is_awaited = False
        if self._stream is not None:
            self._stream.settle(self._version)

    def _forget_prefixes(self) -> None:
        assert self._llm is not None
        if self._stream is not None and self._stream.is_busy:
            self._stream.forget_cache(self._version)
            return
        # vLLM keys its prefix cache by tokens alone: prompts seen before would go on with stale keys and values.
        if not reset_prefix_cache(self._llm.llm_engine):
            raise RuntimeError("vLLM did not reset its prefix cache: requests are still running")

    def sleep(self, level: int) -> tuple[int, int]:
        """Free the GPU's memory; return the bytes that came free on all GPUs, and those that should have."""
        assert self._llm is not None
        before = self._memory_facts()
        with self.activity.during("sleep"):
            self._llm.sleep(level)
        after = self._memory_facts()
        freed = sum(late["free"] - early["free"] for early, late in zip(before, after, strict=True))
        return freed, sum(facts["pooled"] for facts in before)

    def wake(self, tags: list[str]) -> None:
        """Take the GPU's memory again, in the order of `tags`."""
        assert self._llm is not None
        for tag in tags:
            with self.activity.during("wake"):
                self._llm.wake_up([tag])

    def news(self) -> tuple[float, list[Span]]:
        """Return the time, and what was done since the last call."""
        return time.monotonic(), self._untold.read()

    def stop(self) -> None:
        """Free the model in this process, and the groups and shared memory of several workers."""
        from vllm.distributed.parallel_state import destroy_model_parallel

        self._llm = None
        destroy_model_parallel()
        gc.collect()

    def _memory_facts(self) -> list[dict[str, int]]:
        assert self._llm is not None
        return self._llm.collective_rpc("memory_facts")

    # ---- a stream of responses -------------------------------------------------------------------------------------

    def submit(self, requests: list[StreamRequest], params: SamplingParams) -> None:
        """Take responses in, to be sampled beside those under way."""
        self._open_stream().submit(requests, params, self._version)

    def collect(self, wait_s: float, everything: bool) -> list[Progress]:
        """Sample until a response is complete, at most `wait_s` seconds; return what is new."""
        self._is_awaited |= wait_s > 0
        return self._open_stream().collect(wait_s, self._version, everything=everything)

    def hold(self) -> None:
        """Nobody waits for responses any more."""
        self._is_awaited = False

    def withdraw(self) -> list[Progress]:
        """Stop what is under way; return what is new of it."""
        self._is_awaited = False
        return self._open_stream().withdraw(self._version)

    def work_in_background(self) -> bool:
        """Take a step of the stream while nobody asks for anything; return whether there is more to do."""
        updates = self._update_began is not None
        if not (self._in_background or self._is_awaited) or updates or self._failure:
            return False
        if not self._open_stream().is_busy:
            return False
        try:
            self._open_stream().step(self._version)
        except Exception as error:
            self._failure = error
        return True

    def _open_stream(self) -> StepLoop:
        if self._failure is not None:
            raise self._failure
        assert self._stream is not None, "started without a StreamMode"
        return self._stream

    # ---- whole batches ---------------------------------------------------------------------------------------------

    def generate(self, requests: list[GenerationRequest], params: SamplingParams) -> tuple[int, list[list[Generation]]]:
        """Sample, token ids in and token ids out; the version of the weights comes with them."""
        assert self._llm is not None
        if self._stream is not None and self._stream.is_busy:
            raise RuntimeError("responses of a stream are under way: withdraw them first")
        with self.activity.during(SAMPLING) as span:
            outputs = self._llm.generate(
                [tokens_prompt(request.token_ids, self._version) for request in requests],
                [
                    vllm_params(
                        params,
                        n=request.num_generations,
                        seed=request.seed,
                        max_tokens=params.max_tokens if request.max_tokens is None else request.max_tokens,
                    )
                    for request in requests
                ],
                use_tqdm=False,
            )
            generations = [to_generations(output) for output in outputs]
            span.tokens = sum(len(generation.token_ids) for group in generations for generation in group)
        return self._version, generations


def to_generations(output: "RequestOutput") -> list[Generation]:
    """Return the responses to one request."""
    generations = []
    for sample in output.outputs:
        if sample.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM ended request {output.request_id} with {sample.finish_reason!r}")
        token_ids = list(sample.token_ids)
        flat = cast("FlatLogprobs", sample.logprobs)  # asked for, so never None
        if flat.token_ids != token_ids:  # one entry per position: the sampled token
            raise RuntimeError(f"vLLM gave request {output.request_id} log-probs of other tokens than it sampled")
        generations.append(Generation(token_ids, list(flat.logprobs), sample.finish_reason))
    return generations


def serve(
    connection: Connection,
    calls: dict[str, Callable[..., Any]],
    idle: Callable[[], bool] = lambda: False,
    news: Callable[[], Any] | None = None,
) -> None:
    """Answer messages, one at a time, until the other end is closed; call `idle` between them while it has work to do.

    What `news` returns goes with each answer. To ask for it by a call of its own would wait for a step of the sampler.
    Nothing of a message is held while the next is waited for: to drop the tokens of a rollout takes some 10 ms, by
    which the weight sync after it would be longer.
    """
    while True:
        while not connection.poll(0) and idle():
            pass
        try:
            name, *values = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            answer = ("ok", calls[name](*values))
        except Exception:
            answer = ("error", traceback.format_exc())
        connection.send(answer if news is None else (*answer, news()))
        del answer, values


def main(arguments: list[str]) -> None:
    """Serve the trainer until it closes the connection."""
    connection_fd, parent_pid, by_signal, weights_fd = map(int, arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the trainer's to answer
    die_with_parent(parent_pid, by_signal=bool(by_signal))
    for fd in (connection_fd, weights_fd):
        os.set_inheritable(fd, False)
    connection = Connection(connection_fd)
    worker = Worker(weights_fd)
    names = [
        "start",
        "update",
        "call",
        "connect",
        "begin",
        "load",
        "end",
        "replace",
        "borrow",
        "let_go",
        "sleep",
        "wake",
        "generate",
        "submit",
        "collect",
        "hold",
        "withdraw",
    ]
    serve(connection, {name: getattr(worker, name) for name in names}, worker.work_in_background, worker.news)
    sys.stdout.flush()
    os._exit(0)  # vLLM's own shutdown takes seconds and holds nothing that the kernel does not free


if __name__ == "__main__":
    collect_rarely()
    main(sys.argv[1:])
elif __name__ == "__mp_main__":  # a worker of vLLM's executor, which multiprocessing starts with this module
    collect_rarely()
