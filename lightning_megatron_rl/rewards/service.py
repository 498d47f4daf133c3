"""Rewards over HTTP: a service of the user's own, and a reward model on a vLLM pooling server."""

import http.client
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal
from urllib.parse import urlsplit

from lightning_megatron_rl.rewards.base import RewardSetupError
from lightning_megatron_rl.rewards.deadline import call_in_threads
from lightning_megatron_rl.sample import Sample
from lightning_megatron_rl.utilities.ranges import COUNT, POSITIVE, check_ranges, check_words

_MAX_REPLY = 2**26  # bytes
_Inputs = Literal["tokens", "text"]


class ServiceReward(ABC):
    """What the rewards over HTTP share: batches in parallel, a time limit, one retry of a lost connection.

    Whatever goes wrong is raised; the guard then tries the samples alone and gives those that fail the default.
    No proxy is used, no redirect followed.
    """

    def __init__(
        self, url: str, name: str, batch_size: int, concurrency: int, timeout_s: float, token_variable: str | None
    ) -> None:
        try:
            parts = urlsplit(url)
            has_place = bool(parts.hostname) and parts.port != 0
        except ValueError as error:
            raise ValueError(f"url={url!r} of the reward {name!r} cannot be one: {error}") from error
        if parts.scheme not in ("http", "https") or not has_place:
            raise ValueError(f"url={url!r} of the reward {name!r}: give http://host:port/path or https://...")
        if parts.username or parts.password:
            raise ValueError(f"the url of the reward {name!r} holds a password. Name token_variable instead")
        check_ranges({"batch_size": COUNT, "concurrency": COUNT, "timeout_s": POSITIVE}, locals(), f"reward {name!r}: ")
        self.url = url
        self.name = name
        self.batch_size = batch_size
        self.concurrency = concurrency
        self.timeout_s = timeout_s
        self.token_variable = token_variable

    def __call__(self, samples: list[Sample]) -> list[float]:
        """Return the service's number for each sample; RuntimeError for an invalid reply."""
        batches = [samples[start : start + self.batch_size] for start in range(0, len(samples), self.batch_size)]
        headers = self._headers()
        results = call_in_threads([partial(self._score, batch, headers) for batch in batches], self.concurrency)
        return [score for scores in results for score in scores]

    @abstractmethod
    def request(self, samples: list[Sample]) -> dict[str, Any]:
        """Return what is asked, as JSON."""

    @abstractmethod
    def read(self, reply: Any) -> Any:
        """Return the list of numbers in a reply; KeyError, IndexError or TypeError if it is not there."""

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if self.token_variable is not None:
            if not os.environ.get(self.token_variable):
                raise RewardSetupError(
                    f"the reward {self.name!r} takes its token from the environment variable {self.token_variable}, "
                    "which is not set"
                )
            headers["Authorization"] = f"Bearer {os.environ[self.token_variable]}"
        return headers

    def _score(self, samples: list[Sample], headers: dict[str, str]) -> list[float]:
        try:
            body = json.dumps(self.request(samples)).encode()
        except (TypeError, ValueError) as error:  # it would fail on every such sample
            raise RewardSetupError(
                f"the reward {self.name!r} sends samples as JSON, and a column of the data is none ({error}): make it"
                " text or numbers, or leave it out"
            ) from error
        try:
            text = self._post(body, headers)
        except (ConnectionResetError, http.client.RemoteDisconnected):  # a server may close an idle connection, once
            text = self._post(body, headers)
        try:
            scores = self.read(json.loads(text))
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise RuntimeError(f"{self.url} answered {_shorten(text)}: {type(error).__name__}: {error}") from error
        if not isinstance(scores, list) or len(scores) != len(samples):
            raise RuntimeError(f"{self.url} answered {_shorten(text)}, not {len(samples)} numbers for as many samples")
        if not all(type(score) in (int, float) for score in scores):
            raise RuntimeError(f"{self.url} answered {_shorten(text)}: something in it is not a number")
        return scores

    def _post(self, body: bytes, headers: dict[str, str]) -> bytes:
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        assert parts.hostname is not None
        connection = kind(parts.hostname, parts.port, timeout=self.timeout_s)
        try:
            connection.request("POST", (parts.path or "/") + (f"?{parts.query}" if parts.query else ""), body, headers)
            response = connection.getresponse()
            text = response.read(_MAX_REPLY + 1)
        except TimeoutError as error:
            raise RuntimeError(f"{self.url} did not answer within timeout_s={self.timeout_s:g}") from error
        except (ConnectionResetError, http.client.RemoteDisconnected):
            raise
        except (OSError, http.client.HTTPException) as error:
            raise RuntimeError(f"{self.url}: {type(error).__name__}: {error}: is the service running there?") from error
        finally:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"{self.url} answered with status {response.status}: {_shorten(text)}")
        if len(text) > _MAX_REPLY:
            raise RuntimeError(f"{self.url} answered with more than {_MAX_REPLY} bytes: {_shorten(text)}")
        return text


class HTTPReward(ServiceReward):
    """Asks a service of your own: POST of samples, numbers in reply.

    The body is ``{"samples": [{"prompt", "response", "answer", "dataset", "index", "columns", "num_tokens", "turns",
    "truncated"}, ...]}``, the reply ``{"rewards": [0.5, ...]}``, one number per sample, in order.

    Args:
        url: Where to post.
        batch_size: Most samples of one request.
        concurrency: Requests at one time.
        timeout_s: Seconds that the service may be silent.
        token_variable: Environment variable whose value is sent as bearer token.
        name: What it is called in the logs.

    Raises:
        ValueError: An invalid url, or a number that is not positive.
    """

    def __init__(
        self,
        url: str,
        batch_size: int = 64,
        concurrency: int = 4,
        timeout_s: float = 30.0,
        token_variable: str | None = None,
        name: str = "http",
    ) -> None:
        super().__init__(url, name, batch_size, concurrency, timeout_s, token_variable)

    def request(self, samples: list[Sample]) -> dict[str, Any]:
        """Return all that a judge could want to know of the samples."""
        return {
            "samples": [
                {
                    "prompt": sample.prompt.text,
                    "response": sample.response,
                    "answer": sample.prompt.answer,
                    "dataset": sample.prompt.dataset,
                    "index": sample.prompt.index,
                    "columns": sample.prompt.columns,
                    "num_tokens": len(sample.policy_ids),
                    "turns": [turn.text for turn in sample.turns],
                    "truncated": sample.is_truncated,
                }
                for sample in samples
            ]
        }

    def read(self, reply: Any) -> Any:
        """Return the list under "rewards"."""
        return reply["rewards"]


class VLLMRewardModel(ServiceReward):
    """The score of a reward model that vLLM serves (``vllm serve MODEL --runner pooling``).

    The model is a sequence classifier with one label. Its raw score is taken, without a sigmoid.

    Args:
        url: Address of the server, ``http://host:port``.
        model: Name under which it serves the model; its only one if not given.
        inputs: "tokens" sends the token ids of prompt and response, for a model with the policy's tokenizer; "text"
            sends their text, which the server tokenises.
        batch_size: Most samples of one request.
        concurrency: Requests at one time.
        timeout_s: Seconds that the server may be silent.
        token_variable: Environment variable whose value is sent as bearer token.
        name: What it is called in the logs.

    Raises:
        ValueError: An invalid url, or a number that is not positive.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        inputs: _Inputs = "tokens",
        batch_size: int = 64,
        concurrency: int = 4,
        timeout_s: float = 60.0,
        token_variable: str | None = None,
        name: str = "reward_model",
    ) -> None:
        super().__init__(url.rstrip("/") + "/classify", name, batch_size, concurrency, timeout_s, token_variable)
        check_words({"inputs": _Inputs}, locals(), f"reward {name!r}: ")
        self.model = model
        self.inputs = inputs

    def request(self, samples: list[Sample]) -> dict[str, Any]:
        """Return the whole sequences, to be scored without activation."""
        inputs: Sequence[list[int] | str] = [
            sample.prompt.token_ids + sample.response_ids
            if self.inputs == "tokens"
            else sample.prompt.text + sample.response
            for sample in samples
        ]
        asked = {"input": list(inputs), "use_activation": False}
        return asked if self.model is None else {**asked, "model": self.model}

    def read(self, reply: Any) -> Any:
        """Return the score of each sequence, in the order in which they were sent."""
        rows = sorted(reply["data"], key=lambda row: row["index"])
        for row in rows:
            if len(row["probs"]) != 1:
                raise ValueError(f"{len(row['probs'])} labels: a reward model has one")
        return [row["probs"][0] for row in rows]


def _shorten(text: bytes, limit: int = 200) -> str:
    return repr(text[:limit].decode(errors="replace")) + ("..." if len(text) > limit else "")
