"""Responses under way on servers: each goes to the end, on whatever server, from the tokens that are there."""

import threading
from dataclasses import dataclass, field

from lightning_megatron_rl.rollout.protocol import Progress, SamplingParams, StreamRequest, derive_seed
from lightning_megatron_rl.rollout.servers.client import READY, ServerClient

SLACK = 8  # responses that the server with a prompt's cache may have more than the least busy one
PREFIX = 64  # tokens by which prompts are told apart


@dataclass
class Flight:
    """One response that is asked for."""

    request: StreamRequest
    params: SamplingParams
    token_ids: list[int] = field(default_factory=list)  # so far
    news: Progress = field(init=False)  # that was not told yet
    is_complete: bool = False

    def __post_init__(self) -> None:
        self.news = Progress(self.request.name)

    @property
    def prompt(self) -> list[int]:
        """What is sent: the prompt, and what was sampled."""
        return self.request.token_ids + self.token_ids

    @property
    def max_tokens(self) -> int:
        """That may still be sampled."""
        return self.request.max_tokens - len(self.token_ids)

    def seed(self, version: int) -> int:
        """Of what comes next: the noise of the first tokens must not come again."""
        if not self.token_ids:
            return self.request.seed
        return derive_seed(self.request.seed, version, len(self.token_ids), "continued")

    def add(self, token_ids: list[int], logprobs: list[float], reason: str | None, version: int) -> None:
        """Take what a server has sampled."""
        if token_ids:
            self.token_ids += token_ids
            self.news.add(token_ids, logprobs, version)
        if reason is not None:
            self.news.finish_reason, self.is_complete = reason, True

    def interrupt(self) -> None:
        """Prepare to go on elsewhere: from the tokens that are there, or anew if stop strings end the response.

        A server does not look for a stop string in what it is given, and a part of one may be there.
        """
        if self.params.stop and not self.is_complete:
            self.token_ids, self.news = [], Progress(self.request.name)

    def take_news(self) -> Progress:
        """Return what was not told yet."""
        news, self.news = self.news, Progress(self.request.name)
        return news


def choose_server(servers: list[ServerClient], prompt: list[int]) -> ServerClient | None:
    """Return the server for a prompt: the one that has its beginning cached, unless others are much less busy.

    None: none can sample at the moment. Responses to one prompt, and the turns of an episode, begin alike.
    """
    ready = [server for server in servers if server.state == READY]
    if not ready:
        return None
    home = ready[hash(tuple(prompt[:PREFIX])) % len(ready)]
    least = min(ready, key=lambda server: server.load)
    return home if home.load <= least.load + SLACK else least


class Board:
    """What threads tell each other of flights: those of the event loop add tokens, others wait for responses."""

    def __init__(self) -> None:
        self.flights: dict[str, Flight] = {}  # by name
        self.error: Exception | None = None  # for whoever waits
        self.changed = threading.Condition()

    def add(self, flight: Flight) -> None:
        """Take a flight in."""
        with self.changed:
            self.flights[flight.request.name] = flight

    def land(
        self, flight: Flight, token_ids: list[int], logprobs: list[float], reason: str | None, version: int
    ) -> None:
        """Note what a server has sampled of a response."""
        with self.changed:
            flight.add(token_ids, logprobs, reason, version)
            if flight.is_complete:
                self.changed.notify_all()

    def interrupt(self, flight: Flight) -> None:
        """Note that a server has left a response."""
        with self.changed:
            flight.interrupt()

    def fail(self, error: Exception) -> None:
        """Tell whoever waits of a failure."""
        with self.changed:
            self.error = error
            self.changed.notify_all()

    def raise_error(self) -> None:
        """Raise what has failed, once."""
        with self.changed:
            error, self.error = self.error, None
        if error is not None:
            raise error

    def wait(self, wait_s: float) -> None:
        """Wait until a response is complete or something has failed, at most so long."""
        with self.changed:
            self.changed.wait_for(
                lambda: self.error is not None or any(flight.is_complete for flight in self.flights.values()), wait_s
            )

    def take_news(self, *, everything: bool) -> list[Progress]:
        """Return what is new of complete responses, which leave the board, or of all."""
        news = []
        with self.changed:
            for name, flight in list(self.flights.items()):
                if flight.is_complete:
                    del self.flights[name]
                if flight.is_complete or (everything and flight.news.token_ids):
                    news.append(flight.take_news())
        return news
