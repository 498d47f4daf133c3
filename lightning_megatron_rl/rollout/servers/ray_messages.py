"""What a trainer and its process that talks to Ray tell each other."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Order:
    """What is to be placed.

    Args:
        model: Hugging Face directory.
        settings: Of `VLLMEngine`.
        digest: Of the servers' token.
        asked: Resources of one engine.
        total: Engines of all replicas of the run.
        count: Engines of this replica.
        wait_s: For others to give resources back. # seconds
    """

    model: str
    settings: dict[str, Any]
    digest: str
    asked: dict[str, float]
    total: int
    count: int
    wait_s: float


@dataclass(frozen=True)
class News:
    """Of one engine: where its server is, or why it has ended, with the last of its output."""

    engine: int
    url: str | None = None
    host: str = ""
    ended: str | None = None
    output: str = ""
