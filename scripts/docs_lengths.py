"""Words of each page of docs/ and words a sentence, code and tables left out of the sentences.

``python scripts/docs_lengths.py [REVISION]`` reads the working tree, or the pages of a revision of git.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_END = re.compile(r"[.:!?]\s|\n\n|\n- |\n\d\. ")


def sentence_lengths(markdown: str) -> list[int]:
    """Return the number of words of each sentence of the running text."""
    text = re.sub(r"^```.*?^```|^\|.*?$|^#.*?$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    return [len(words) for part in _END.split(text) if (words := part.split())]


def pages(revision: str | None) -> dict[str, str]:
    """Return the text of each page by its path."""
    if revision is None:
        return {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted((ROOT / "docs").rglob("*.md"))}

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    names = git("ls-tree", "-r", "--name-only", revision, "docs").split()
    return {name: git("show", f"{revision}:{name}") for name in names if name.endswith(".md")}


def main() -> None:
    """Print a line for each page, and one for all."""
    everything: list[int] = []
    for name, text in pages(sys.argv[1] if len(sys.argv) > 1 else None).items():
        lengths = sentence_lengths(text)
        everything += lengths
        print(f"{len(text.split()):6} words {sum(lengths) / max(len(lengths), 1):6.1f} a sentence  {name}")
    print(f"all pages: {sum(everything) / len(everything):.1f} words a sentence, {len(everything)} sentences")


if __name__ == "__main__":
    main()
