"""`VLLMServers`: an engine made of vLLM servers that somebody else has started, on any host."""

import os
import uuid
from pathlib import Path

from lightning_megatron_rl.parallel.distributed import replica_share
from lightning_megatron_rl.rollout.servers.about import WeightsOver
from lightning_megatron_rl.rollout.servers.client import ServerClient, check_url
from lightning_megatron_rl.rollout.servers.pool import ServerPool
from lightning_megatron_rl.rollout.servers.shared_token import TOKEN_VARIABLE, check_token, read_token_file
from lightning_megatron_rl.utilities.masking import MASK
from lightning_megatron_rl.utilities.ranges import COUNT, POSITIVE, Range, check_ranges

_REMEDY = "Give the one that the servers were started with."


class VLLMServers(ServerPool):
    """Samples on vLLM servers, which ``lightning-megatron-rl serve`` starts; see docs/servers.md.

    Responses go to the least busy server, those that begin alike to one that has their beginning in its cache. A server
    that is lost loses no response: each goes on from the tokens that are there, on another server, or when one is back.
    A server that comes back samples again after the next push of weights.

    Weights go over the network to all servers at the same time: after a server's first update from each rank what it
    has, and to each worker what it loads. Responses under way at an update go on with the new weights; what was
    cached for them is computed anew, or kept (`streaming.on_update`).

    Args:
        urls: Of the servers, ``http://host:port``. Replicas of the model share them out, at least one for each.
        token: Of the servers. Better not here but in `token_file` or the variable LIGHTNING_MEGATRON_RL_TOKEN.
        token_file: File with the token, readable by its owner alone.
        max_model_len: Longest prompt and response together, at most the servers'. # [tokens]
        start_timeout_s: How long to wait for servers that do not answer yet, before weights load. # seconds
        call_timeout_s: Deadline of an update, of waiting for a token, and for a server when all are lost. # seconds
        bucket_mb: Size of the buffers that a rank sends weights to a server in. # MiB
        weights_over: "nccl" sends weights from the trainer's GPUs to those of servers after a server's first update,
            "gloo" through the host's memory. "auto" is gloo for now: NCCL between trainer and servers has not been run
            between machines yet.
    """

    def __init__(
        self,
        urls: list[str],
        token: str | None = None,
        token_file: str | None = None,
        max_model_len: int = 2048,
        start_timeout_s: float = 300,
        call_timeout_s: float = 600,
        bucket_mb: int = 256,
        weights_over: WeightsOver = "auto",
    ) -> None:
        ranges = {
            "max_model_len": Range(least=2, whole=True, note="one token in and one token out"),
            "start_timeout_s": POSITIVE,
            "call_timeout_s": POSITIVE,
            "bucket_mb": COUNT,
        }
        check_ranges(ranges, locals(), "engine.")
        if isinstance(urls, str) or not urls:
            raise ValueError(f"engine.urls={urls!r}: give a list of one URL or more, such as [http://node-7:8000]")
        super().__init__(len(urls), max_model_len, call_timeout_s, bucket_mb, weights_over)
        self.urls = [check_url(url) for url in urls]
        if len(set(self.urls)) < len(self.urls):
            raise ValueError(f"engine.urls={self.urls}: one of them is there twice")
        if token is not None and token_file is not None:
            raise ValueError("engine.token and engine.token_file are both set; give one of them")
        self.token = token
        self.token_file = token_file
        self.start_timeout_s = start_timeout_s

    def start(self, model_path: str | Path) -> None:
        """Find the servers of this replica, check them and take their leases.

        Raises:
            ValueError: Fewer servers than replicas; a server refuses the token, is another trainer's, or has another
                model or version.
            RuntimeError: A server does not answer within `start_timeout_s`, or the engine runs already.
        """
        token, run = self._read_token(), uuid.uuid4().hex
        servers = [ServerClient(url, token, run, self.call_timeout_s) for url in self._share()]
        self._open(servers, model_path, self.start_timeout_s)
        try:
            self.connections.admit()
        except BaseException:
            self.close()
            raise

    def _share(self) -> list[str]:
        """The URLs of this replica."""
        replica, replicas = replica_share()
        if len(self.urls) < replicas:
            raise ValueError(
                f"engine.urls has {len(self.urls)} server(s) for {replicas} replicas of the model: each replica samples"
                f" on servers of its own. Start {replicas - len(self.urls)} more, or train with fewer replicas."
            )
        return self.urls[replica::replicas]

    def _read_token(self) -> str:
        if self.token_file is not None:
            return check_token(read_token_file(self.token_file, "engine.token_file"), self.token_file, _REMEDY)
        own = None if self.token == MASK else self.token
        token = own or os.environ.get(TOKEN_VARIABLE)
        if not token:
            missing = "engine.urls without a token"
            if self.token == MASK:
                missing = "engine.token was masked when this config was written"
            raise ValueError(
                f"{missing}. Give engine.token_file, or set the variable {TOKEN_VARIABLE}, to the one that the servers"
                " were started with"
            )
        return check_token(token, "engine.token" if own else TOKEN_VARIABLE, _REMEDY)

    def describe(self) -> str:
        """Return what the engine is, for the table at start."""
        return f"{len(self.urls)} vLLM server(s): {', '.join(self.urls)}"
