"""The protocol of rollout engines: token ids in, token ids and log-probs out, weights by name."""

import hashlib
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from lightning_megatron_rl.planner.needs import EngineNeeds
from lightning_megatron_rl.sample import Outcome, Turn
from lightning_megatron_rl.utilities.ranges import COUNT, Range, check_ranges
from lightning_megatron_rl.utilities.spans import SpanLog
from lightning_megatron_rl.weights.source import WeightSource

LEAST_FREED = 0.9  # of the memory that sleeping should free; the rest may be lost to what others take at that moment
MIN_TEMPERATURE = 0.01  # vLLM raises any smaller temperature to this without an error, which changes the log-probs
_RANGES = {
    "temperature": Range(least=0, most=2, note="0 is greedy, and vLLM refuses more than 2"),
    "top_p": Range(above=0, most=1, note="1 keeps every token"),
    "top_k": Range(least=-1, whole=True, note="-1 keeps every token"),
    "max_tokens": COUNT,
}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn; one value for all requests of a call.

    Args:
        temperature: Divides the logits; 0 takes the most likely token, with log-probs of the plain softmax.
        top_p: Keeps the smallest set of tokens whose probability reaches it; 1 keeps all.
        top_k: Keeps the k most likely tokens; -1 keeps all.
        max_tokens: Upper limit of the response. # [tokens]
        stop: Strings that end a response; the tokens that spell one stay in the response.
        ignore_eos: Go on to `max_tokens` whatever is sampled.

    Raises:
        ValueError: A value is outside its range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        check_ranges(_RANGES, vars(self), "sampling.")
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"temperature={self.temperature} must be 0 (greedy) or at least {MIN_TEMPERATURE}: "
                "below that vLLM would sample at another temperature than the trainer assumes"
            )
        if self.top_k == 0:
            raise ValueError("sampling.top_k=0 must be at least 1, or -1 to keep every token")
        if isinstance(self.stop, str):
            raise ValueError(
                f"sampling.stop={self.stop!r} is one string, of which each character would end a response: give a list,"
                f" {[self.stop]}"
            )
        object.__setattr__(self, "stop", tuple(self.stop))
        if not all(isinstance(text, str) for text in self.stop):
            raise ValueError(f"sampling.stop={self.stop} holds something else than strings")
        if "" in self.stop:
            raise ValueError(f"stop={self.stop} contains an empty string, which would end every response at once")


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt and the number of responses to draw for it.

    The i-th response is drawn with `seed + i`: take seeds from `derive_seed`, not from a running number, or the second
    response of one request repeats the noise of the first response of the next.
    """

    token_ids: list[int]  # [prompt tokens]
    seed: int
    num_generations: int = 1
    max_tokens: int | None = None  # of this request, below that of the sampling parameters; None: as there


@dataclass(frozen=True)
class Generation:
    """One response as it was sampled."""

    token_ids: list[int]  # [response tokens], the end-of-sequence token included if it was sampled
    logprobs: list[float]  # [response tokens], of the distribution they were drawn from (temperature, top-p, top-k)
    finish_reason: str  # "stop", or "length" when cut by max_tokens
    turns: tuple[Turn, ...] = ()  # of an episode that is replayed whole; its other tokens are the environment's
    outcome: Outcome | None = None  # of such an episode


@dataclass(frozen=True)
class StreamRequest:
    """One response that is sampled beside others which came earlier, or are still to come."""

    name: str  # no other under way has it
    token_ids: list[int]  # [prompt tokens], and those of the response that were sampled before
    seed: int
    max_tokens: int  # that may still be sampled


@dataclass
class Progress:
    """What was sampled of a streamed response since it was last told."""

    name: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of each token, under the weights that drew it
    segments: list[tuple[int, int]] = field(default_factory=list)  # (version of the weights, tokens drawn with them)
    finish_reason: str | None = None  # None: it is not complete

    def add(self, token_ids: list[int], logprobs: list[float], version: int) -> None:
        """Append tokens that weights of `version` drew."""
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.segments = join_segments(self.segments, [(version, len(token_ids))])


def join_segments(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return runs of tokens of one version each, end to end.

    Example:
        ``join_segments([(3, 10), (4, 2)], [(4, 5)]) == [(3, 10), (4, 7)]``
    """
    joined = list(first)
    for version, count in second:
        if joined and joined[-1][0] == version:
            joined[-1] = version, joined[-1][1] + count
        else:
            joined.append((version, count))
    return joined


@dataclass(frozen=True)
class StreamMode:
    """How an engine samples a stream of responses.

    Args:
        background: Go on sampling while nobody asks; else only from a `collect` that waits until `hold`.
        keeps_cache: Responses under way keep their cache at an update of the weights; else it is computed anew.
    """

    background: bool = False
    keeps_cache: bool = False


@dataclass(frozen=True)
class SyncReport:
    """Measurements of one update of an engine's weights."""

    num_bytes: int  # of the weights as they came
    seconds: float  # from the call to weights that sample
    extra_bytes: int  # most memory of the trainer's device that the transfer itself held at one time
    transport: str  # "shared memory", "CUDA IPC", "NCCL", "in process" or "none"
    replayed: bool = False  # whether the engine replayed the copies that it recorded in an earlier update
    peer_bytes: int = 0  # read in place out of the memory of other GPUs, by the worker that read most
    direct: "DirectReport | None" = None  # what ranks sent straight to servers; None: nothing


@dataclass(frozen=True)
class DirectReport:
    """What the ranks of a replica sent straight to the workers of servers in one update."""

    num_bytes: int  # to all workers
    worker_bytes: int  # to the worker that got most
    seconds: float  # until the workers of the slowest server had everything
    link_share: float  # of what the links of all these servers carried when they met, one after the other

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.num_bytes / self.seconds if self.seconds else 0.0


class WeightsLostError(RuntimeError):
    """The engine has no weights to sample with: they were lost with its process or in a sleep at level 2.

    `update_weights` with a full set makes the engine whole again.
    """


class ResponsesLostError(RuntimeError):
    """The responses under way went with the engine's process; submit them again, with what is known of them."""


class RolloutEngine(Protocol):
    """Samples from a policy whose weights can be replaced; every call has a deadline.

    An engine that shares GPUs with the trainer can sleep while the trainer works. It wakes in two parts, because
    weights and cache may not fit beside what the trainer still holds while it exports: ``wake(["weights"])``,
    ``update_weights(...)``, ``wake(["kv_cache"])``.
    """

    weight_version: int  # version of the weights that sample; 0 is what `start` loaded
    max_model_len: int  # longest prompt plus response. # [tokens]
    sleep_level: int = 0  # between rollouts: 0 does not sleep, 1 moves weights to the host, 2 drops them
    tensor_parallel_size: int = 1  # workers that share the model
    num_restarts: int = 0  # replacements of its process since `start`
    streams: bool = False  # whether it is a `StreamingEngine`
    replays_run: bool = False  # whether it has the rewarded rollout of each step, and samples nothing
    is_apart: bool = False  # whether it samples on devices that the trainer has no part in, whatever `devices` says
    takes_direct: bool = False  # whether every rank of a replica can send to its workers; see `WeightSource.direct`
    is_collective: bool = False  # whether every rank of a replica calls it, with the same requests, or its leader alone
    activity: SpanLog | None = None  # what it did when; None: it does not tell, and the time of calls is taken for it

    def expect(self, num_tokens: int | None) -> None:
        """Learn, before `start`, how many tokens the run will sample at most; None: unknown."""
        return

    def describe(self) -> str:
        """Return what the engine is, for the table at start."""
        return type(self).__name__

    def describe_needs(self) -> EngineNeeds | None:
        """Return the GPU memory that it needs, for the check before a run; None: it is not checked."""
        return None

    def start(self, model_path: str | Path) -> None:
        """Begin to load a Hugging Face model directory (config, weights, tokenizer) and return at once."""

    def wait_ready(self) -> None:
        """Block until the engine can sample; the first call does so by itself."""

    def generate(self, requests: list[GenerationRequest], params: SamplingParams) -> list[list[Generation]]:
        """Return `num_generations` responses for each request, in the order of the requests."""

    def update_weights(self, source: WeightSource, version: int) -> SyncReport:
        """Replace all weights (Hugging Face names and shapes, CPU or CUDA) and forget whatever was cached with them.

        Taking weights may be a collective of the trainer's ranks, see `WeightSource`; an engine takes all of them or
        raises. Those that stay where they are may be read there until `let_go`.
        """

    def let_go(self) -> None:
        """Stop reading memory of an earlier update, which may be freed then. The engine keeps its own weights."""

    def sleep(self, level: int = 1) -> int:
        """Free the device's memory and return the bytes; does nothing if asleep."""
        return 0

    def wake(self, tags: list[str] | None = None) -> None:
        """Take the memory of "weights", "kv_cache" or, with no tags, both; what is awake stays as it is."""

    def close(self) -> None:
        """End the engine and free what it holds; calling it twice is fine."""


class StreamingEngine(RolloutEngine, Protocol):
    """An engine that takes responses in one by one, and whose weights may change while they are under way."""

    streams: bool = True
    stream_mode: StreamMode | None  # set before `start`; None: it only answers `generate`
    devices: list[int] | None  # GPUs that it is on, as the trainer numbers them; None: the trainer's own

    def submit(self, requests: list[StreamRequest], params: SamplingParams) -> None:
        """Take responses in; those under way go on."""

    def collect(self, wait_s: float, *, everything: bool = False) -> list[Progress]:
        """Wait until a response is complete, at most `wait_s` seconds; return what is new of complete ones, or of all.

        An engine that has waited goes on sampling until `hold`.

        Raises:
            ResponsesLostError: The process that had them is gone.
        """

    def hold(self) -> None:
        """Sample nothing before the next `collect` that waits, unless the mode is to sample in the background.

        Raises:
            ResponsesLostError: The process that had them is gone.
        """

    def withdraw(self) -> list[Progress]:
        """Stop all responses under way and return what is new of them; submitted again, they go on from there.

        Raises:
            ResponsesLostError: The process that had them is gone.
        """


def derive_seed(base_seed: int, step: int, prompt_index: int, dataset: str = "") -> int:
    """Return the 31-bit seed of one prompt at one step, the same in every process and on every machine."""
    key = f"{base_seed}/{step}/{prompt_index}/{dataset}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "big") >> 1


def check_sleep(level: int, sleep_level: int) -> None:
    """Refuse an invalid level, and an engine that was built to stay awake.

    Args:
        level: Asked for.
        sleep_level: The engine's own.

    Raises:
        ValueError: Either of them.
    """
    if level not in (1, 2):
        raise ValueError(f"sleep(level={level}): 1 (weights to the host's memory) or 2 (weights dropped)")
    if sleep_level == 0:
        raise ValueError("an engine with sleep_level=0 cannot sleep: build it with sleep_level=1 or 2")


def note_sleep(level: int, freed: int, expected: int) -> None:
    """Log the memory that an engine freed when it fell asleep; warn if it is less than it had.

    Args:
        level: Of its sleep.
        freed: Bytes that came free on its GPUs.
        expected: Bytes that it had of them.
    """
    log.info("asleep at level %d: freed %.3f of %.3f GB", level, freed / 1e9, expected / 1e9)
    if freed < LEAST_FREED * expected:
        log.warning(
            "sleep(level=%d) freed %.2f GB of the %.2f GB that the engine had: another process took memory on its"
            " GPU at that moment, or the memory did not come free, which the trainer will miss",
            level,
            freed / 1e9,
            expected / 1e9,
        )


def check_requests(
    requests: list[GenerationRequest], params: SamplingParams, *, vocab_size: int, max_model_len: int
) -> None:
    """Refuse requests that an engine would reject or silently shorten.

    Raises:
        ValueError: The first bad request, by its index, with the value and the remedy.
    """
    for index, request in enumerate(requests):
        length = len(request.token_ids)
        if length == 0:
            raise ValueError(f"request {index}: the prompt is empty; give at least one token, such as the BOS token")
        for position, token_id in enumerate(request.token_ids):
            if not 0 <= token_id < vocab_size:
                raise ValueError(
                    f"request {index}: token id {token_id} at position {position} is outside the vocabulary of "
                    f"{vocab_size}; was the prompt tokenised with another model's tokenizer?"
                )
        max_tokens = params.max_tokens if request.max_tokens is None else request.max_tokens
        if not 1 <= max_tokens <= params.max_tokens:
            raise ValueError(f"request {index}: max_tokens={max_tokens} must be in [1, {params.max_tokens}]")
        if length + max_tokens > max_model_len:
            raise ValueError(
                f"request {index}: prompt ({length}) + max_tokens ({max_tokens}) = "
                f"{length + max_tokens} > max_model_len ({max_model_len}); "
                "shorten the prompt, lower max_tokens, or raise max_model_len"
            )
        if request.num_generations < 1:
            raise ValueError(f"request {index}: num_generations={request.num_generations} must be at least 1")
        if request.num_generations > 1 and params.temperature == 0:
            raise ValueError(
                f"request {index}: num_generations={request.num_generations} at temperature=0 would be "
                f"{request.num_generations} equal responses; use num_generations=1 or a positive temperature"
            )
        if not 0 <= request.seed < 2**62:
            raise ValueError(f"request {index}: seed={request.seed} must be in [0, 2**62); take it from derive_seed")
