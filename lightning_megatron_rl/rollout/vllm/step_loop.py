"""`StepLoop`: responses one by one in vLLM's step loop, which an update of the weights may interrupt."""

import time
from typing import TYPE_CHECKING, Any, cast

from lightning_megatron_rl.rollout.protocol import Progress, SamplingParams, StreamRequest
from lightning_megatron_rl.utilities.spans import SAMPLING, SpanLog

if TYPE_CHECKING:
    import vllm
    from vllm import LLM, RequestOutput
    from vllm.logprobs import FlatLogprobs


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
        self._news: dict[str, Progress] = {}  # by name: what was not told yet, of those under way or just complete
        self._under_way: set[str] = set()
        self._complete: set[str] = set()  # of those in `_news`

    @property
    def is_busy(self) -> bool:
        """Whether there is anything to sample."""
        return bool(self._under_way)

    def submit(self, requests: list[StreamRequest], params: SamplingParams, version: int) -> None:
        """Take responses in, to be sampled from weights of `version`."""
        from vllm.sampling_params import RequestOutputKind

        for request in requests:
            own = {"seed": request.seed, "max_tokens": request.max_tokens, "output_kind": RequestOutputKind.DELTA}
            prompt = tokens_prompt(request.token_ids, version)
            self._under_way.add(request.name)
            self._engine.add_request(request.name, prompt, vllm_params(params, **own))

    def step(self, version: int) -> None:
        """Sample the next token of every response that has room in the batch."""
        with self._activity.during(SAMPLING) as span:
            span.tokens = sum(self._take(cast("RequestOutput", output), version) for output in self._engine.step())

    def _take(self, output: "RequestOutput", version: int) -> int:
        """Note what is new of a response; return its tokens."""
        name, (sample,) = output.request_id, output.outputs
        if name not in self._under_way:  # withdrawn
            return 0
        token_ids, news = list(sample.token_ids), self._news.setdefault(name, Progress(name))
        if token_ids:
            flat = cast("FlatLogprobs", sample.logprobs)
            if flat.token_ids != token_ids:
                raise RuntimeError(f"vLLM gave {name} log-probs of other tokens than it sampled")
            news.add(token_ids, list(flat.logprobs), version)
        if sample.finish_reason is None:
            return len(token_ids)
        if sample.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM ended {name} with {sample.finish_reason!r}")
        news.finish_reason = sample.finish_reason
        self._under_way.discard(name)
        self._complete.add(name)
        return len(token_ids)

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
        names = list(self._news) if everything else [name for name in self._news if name in self._complete]
        self._complete.clear()
        return [self._news.pop(name) for name in names]

    def withdraw(self) -> list[Progress]:
        """Stop sampling what is under way; return all that was not told yet."""
        self._engine.abort_request(list(self._under_way))
        while self._engine.has_unfinished_requests():  # frees what they hold
            self._engine.step()
        self._under_way.clear()
        self._complete.clear()
        news = list(self._news.values())
        self._news.clear()
        return news

    def forget_cache(self) -> None:
        """Let nothing that was computed with other weights be used, unless responses under way are to keep it."""
        if self._keeps_cache and self._under_way:
            return  # later ones cannot share it: see `tokens_prompt`
        if not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not reset its cache")
