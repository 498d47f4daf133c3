"""What TRL's asynchronous trainer is given in B4, in a module that its processes import: lengths, reward, attention.

Its attention is a kernel that it loads from a hub. Where that cannot be, torch's flash attention takes its place.
"""

from collections import Counter
from types import SimpleNamespace
from typing import Any

from common import token_reward
from response_lengths import LongTail
from segment_attention import attend
from trl.experimental.async_grpo import packing
from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Reward responses by their tokens."""
    return [token_reward(ids) for ids in completion_ids]


class LongTailLoop(_AsyncRolloutLoop):
    """TRL's loop of requests, whose responses end at given lengths: those of a group ask for one place each."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._lengths = LongTail(self.max_tokens)
        self._places: Counter[tuple[int, ...]] = Counter()
        self._asked: dict[int, int] = {}  # tokens by a request's seed: one that is sent again has it still

    async def _post(self, path: str, payload: dict[str, Any], timeout: float, max_retries: int = 3) -> dict[str, Any]:
        prompt, seed = tuple(payload["prompt"]), payload["seed"]
        if seed not in self._asked:
            self._asked[seed] = self._lengths(prompt, self._places[prompt] % self.num_generations)
            self._places[prompt] += 1
        tokens = self._asked[seed]
        answer: dict[str, Any] = await super()._post(
            path, {**payload, "max_tokens": tokens, "ignore_eos": True}, timeout, max_retries
        )
        got = len(answer["choices"][0]["token_ids"])
        if got != tokens:
            raise RuntimeError(f"a response of {got} tokens, which should have {tokens}")
        return answer


def choose_attention() -> str:
    """Give TRL an attention that is there; return whose it is."""
    try:
        packing._flash_attn()
    except Exception as error:  # whatever its loader raises without a network, or where it is not installed
        packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attend)
        return f"torch, since TRL's kernel is not to be had ({type(error).__name__})"
    return "TRL"
