"""`StepLoop`: responses one by one in vLLM's step loop, which an update of the weights may interrupt."""

import time
from typing import TYPE_CHECKING, Any, cast

from lightning_megatron_rl.compat.vllm_cache import reset_prefix_cache
from lightning_megatron_rl.rollout.protocol import Progress, SamplingParams, StreamRequest
from lightning_megatron_rl.utilities.spans import SAMPLING, SpanLog

if TYPE_CHECKING:
    import vllm
    from vllm import LLM, RequestOutput
    from vllm.logprobs import FlatLogprobs
    from vllm.v1.engine.output_processor import RequestState


def tokens_prompt(token_ids: list[int], version: int) -> "vllm.TokensPrompt":
    """Return a prompt in vLLM's terms, which finds none of its tokens in a cache of other weights."""
    import vllm

    return vllm.TokensPrompt(prompt_token_ids=token_ids, cache_salt=f"weights {version}")


def vllm_params(params: SamplingParams, **own: Any) -> "vllm.SamplingParams":
    """Return `params` in vLLM's terms, with what is a request's `own`; log-probs are of the sampled token alone."""
    import vllm

    return vllm.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        stop=list(params.stop),
        ignore_eos=params.ignore_eos,
        logprobs=0,
        flat_logprobs=True,  # lists of numbers; a dictionary per token takes longer to collect than to fill
        detokenize=bool(params.stop),
        skip_special_tokens=False,  # of the text that stop strings are looked for in: one may be a special token
        **own,
    )


class StepLoop:
    """Takes responses in at any time, samples one token of each per step, and tells what is new of them.

    Args:
        llm: vLLM, with its engine core in this process.
        keeps_cache: Responses under way keep their keys and values when the weights change; else they are computed anew
            with the new ones.
        activity: Gets the time of the steps.
    """

    def __init__(self, llm: "LLM", *, keeps_cache: bool, activity: SpanLog) -> None:
        self._engine = llm.llm_engine
        self._activity = activity
        self._keeps_cache = keeps_cache
        self._news: dict[str, Progress] = {}  # by name: what was noted and not told yet
        self._under_way: dict[str, RequestState] = {}  # by name: what vLLM has of a response so far
        self._noted: dict[str, int] = {}  # tokens of those under way
        self._complete: set[str] = set()  # of those in `_news`
        self._num_tokens = 0  # of all under way

    @property
    def is_busy(self) -> bool:
        """Whether there is anything to sample."""
        return bool(self._under_way)

    def submit(self, requests: list[StreamRequest], params: SamplingParams, version: int) -> None:
        """Take responses in, to be sampled from weights of `version`.

        Raises:
            RuntimeError: One of that name is under way: the tokens of one would be taken for the other's.
        """
        if taken := [request.name for request in requests if request.name in self._under_way]:
            raise RuntimeError(f"a response {taken[0]!r} is under way already: withdraw it first, or give another name")
        from vllm.sampling_params import RequestOutputKind

        # an output per token would take vLLM and this loop a fifth of a step of a hundred responses
        for request in requests:
            own = {"seed": request.seed, "max_tokens": request.max_tokens, "output_kind": RequestOutputKind.FINAL_ONLY}
            prompt = tokens_prompt(request.token_ids, version)
            key = self._engine.add_request(request.name, prompt, vllm_params(params, **own))
            self._under_way[request.name] = self._engine.output_processor.request_states[key]
            self._noted[request.name] = 0

    def step(self, version: int) -> None:
        """Sample the next token of every response that has room in the batch."""
        with self._activity.during(SAMPLING) as span:
            ended = sum(self._end(cast("RequestOutput", output), version) for output in self._engine.step())
            now = sum(len(_tokens(state)) for state in self._under_way.values())
            span.tokens, self._num_tokens = ended + now - self._num_tokens, now

    def _end(self, output: "RequestOutput", version: int) -> int:
        """Note a response that is complete; return its tokens."""
        name, (sample,) = output.request_id, output.outputs
        if name not in self._under_way:  # withdrawn
            return 0
        if sample.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM ended {name} with {sample.finish_reason!r}")
        self._note(name, list(sample.token_ids), cast("FlatLogprobs", sample.logprobs), version)
        self._news.setdefault(name, Progress(name)).finish_reason = sample.finish_reason  # its tokens may all be told
        del self._under_way[name], self._noted[name]
        self._complete.add(name)
        return len(sample.token_ids)

    def note(self, version: int) -> None:
        """Note the tokens of what is under way that were not noted yet: weights of `version` drew them."""
        for name, state in self._under_way.items():
            assert state.logprobs_processor is not None
            self._note(name, _tokens(state), cast("FlatLogprobs", state.logprobs_processor.logprobs), version)

    def _note(self, name: str, token_ids: list[int], flat: "FlatLogprobs", version: int) -> None:
        noted = self._noted[name]
        if flat.token_ids[noted:] != token_ids[noted:]:
            raise RuntimeError(f"vLLM gave {name} log-probs of other tokens than it sampled")
        if noted < len(token_ids):
            self._news.setdefault(name, Progress(name)).add(token_ids[noted:], flat.logprobs[noted:], version)
            self._noted[name] = len(token_ids)

    def collect(self, wait_s: float, version: int, *, everything: bool) -> list[Progress]:
        """Step until a response is complete, or `wait_s` seconds have passed; return what is new.

        Args:
            wait_s: 0 does not step.
            version: Of the weights.
            everything: Also tell of responses that are under way.
        """
        deadline = time.monotonic() + wait_s
        while self._under_way and not self._complete and time.monotonic() < deadline:
            self.step(version)
        if everything:
            self.note(version)
        names = [name for name in self._news if everything or name in self._complete]
        self._complete.clear()
        return [self._news.pop(name) for name in names]

    def settle(self, version: int) -> None:
        """End the step that vLLM began ahead, so that weights of `version` drew each token that is there.

        With asynchronous scheduling the GPU computes a step while vLLM hands out the tokens of the last one.
        """
        core = self._engine.engine_core.engine_core  # type: ignore[attr-defined]
        if not core.batch_queue:  # None: steps end before the next one begins
            return
        core.pause_scheduler("keep", clear_cache=False)
        while core.batch_queue:
            self.step(version)
        core.resume_scheduler()

    def withdraw(self, version: int) -> list[Progress]:
        """Stop sampling what is under way; return all that was not told yet."""
        self.settle(version)
        self.note(version)
        self._engine.abort_request(list(self._under_way))
        self._under_way.clear()
        while self._engine.has_unfinished_requests():  # frees what they hold
            self._engine.step()
        self._noted.clear()
        self._complete.clear()
        self._num_tokens = 0
        news = list(self._news.values())
        self._news.clear()
        return news

    def forget_cache(self, version: int) -> None:
        """Let nothing that weights of `version` computed be used, unless responses under way are to keep it."""
        self.note(version)
        if self._keeps_cache and self._under_way:
            return  # later ones cannot share it: see `tokens_prompt`
        if not reset_prefix_cache(self._engine, preempt=True):
            raise RuntimeError("vLLM did not reset its cache")


def _tokens(state: "RequestState") -> list[int]:
    """Return what was sampled of a response so far."""
    assert state.detokenizer is not None
    return state.detokenizer.output_token_ids
