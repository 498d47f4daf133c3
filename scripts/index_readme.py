"""Hatch's hook for the package's description: README.md without what leads nowhere outside the repository."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_IMAGE = re.compile(r"^!\[[^\]]*\]\((?!https?://)[^)]*\)\n+", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?://|#|mailto:)([^)\s]+)\)")


def for_an_index(readme: str) -> str:
    """Return the text with relative links as plain text, and without images of the repository.

    Example:
        ``for_an_index("[docs/lora.md](docs/lora.md)") == "docs/lora.md"``
    """

    def plain(link: re.Match[str]) -> str:
        text, target = link.groups()
        return text if text in target or target.endswith(text) else f"{text} ({target})"

    return _LINK.sub(plain, _IMAGE.sub("", readme))


class IndexReadme(MetadataHookInterface):
    """Fills in `readme`, which is dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by the build."""
        text = for_an_index((Path(self.root) / "README.md").read_text())
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
