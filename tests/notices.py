"""What a run tells its user in the log, for tests."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

LOGGER = logging.getLogger("lightning_megatron_rl")
INFORMS = logging.getLogger("lightning.pytorch")  # of `rank_zero_info`


class Keeps(logging.Handler):
    """Keeps the messages of a level and above: of warnings and errors."""

    def __init__(self, level: int = logging.WARNING) -> None:
        super().__init__(level)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if not message.startswith("this run told "):  # what was told before, once more
            self.messages.append(message)


@contextmanager
def collected() -> Iterator[list[str]]:
    """Collect what is told inside."""
    handler = Keeps()
    LOGGER.addHandler(handler)
    try:
        yield handler.messages
    finally:
        LOGGER.removeHandler(handler)


@contextmanager
def informed() -> Iterator[list[str]]:
    """Collect the information of this package's `rank_zero_info` inside."""
    handler = Keeps(logging.INFO)
    INFORMS.addHandler(handler)
    try:
        yield handler.messages
    finally:
        INFORMS.removeHandler(handler)


@contextmanager
def told(match: str = "") -> Iterator[list[str]]:
    """Collect what is told inside; at the end one of the messages must match."""
    with collected() as messages:
        yield messages
    assert any(re.search(match, message) for message in messages), messages


@contextmanager
def silent() -> Iterator[None]:
    """Nothing may be told inside."""
    with collected() as messages:
        yield
    assert messages == []
