"""MkDocs' hook for what reads well as plain Markdown and not as a site.

Links out of docs/: files of the repository become their names, images come along in `images/`. A link to a file that is
not there ends the build. A page that is linked by its file's name is called by its title. A `|` that tables of plain
Markdown want escaped within code is itself.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

DOCS = Path(__file__).resolve().parents[1] / "docs"
_LINK = re.compile(r"(!?)\[([^\]]+)\]\((?!https?://|#|mailto:)([^)\s#]+)(#[^)\s]*)?\)")


def without_outside_links(markdown: str, page: Path, docs: Path) -> str:
    """Return the text of `page` as the site wants its links.

    Files outside `docs` become code, images from there those of the site, names of pages their titles.

    Raises:
        ValueError: Such a file does not exist.
    """

    def inside(link: re.Match[str]) -> str:
        is_image, text, target = bool(link[1]), link[2], (page.parent / link[3]).resolve()
        if target.is_relative_to(docs):  # MkDocs checks these
            is_name = not is_image and text == target.name and target.is_file()
            return f"[{_title(target)}]({link[3]}{link[4] or ''})" if is_name else link[0]
        if not target.exists():
            raise ValueError(f"{page.relative_to(docs)}: the link to {link[3]} leads to {target}, which does not exist")
        if is_image:
            return f"![{text}]({Path(os.path.relpath(docs / 'images' / target.name, page.parent)).as_posix()})"
        name = target.relative_to(docs.parent).as_posix()
        return f"`{name}`" if text.strip("`") in name else f"{text} (`{name}`)"

    return _LINK.sub(inside, markdown)


def _title(page: Path) -> str:
    return page.read_text().partition("# ")[2].partition("\n")[0]


def without_escaped_bars(markdown: str) -> str:
    """Return the text with `int \\| None` in code of table rows as `int | None`, as Python-Markdown wants it."""
    rows = re.compile(r"^\|.*$", re.MULTILINE)
    return rows.sub(lambda row: re.sub(r"`[^`]+`", lambda code: code[0].replace("\\|", "|"), row[0]), markdown)


def outside_images(page: Path, docs: Path) -> set[Path]:
    """Return the images outside `docs` that a page shows."""
    found = {(page.parent / link[3]).resolve() for link in _LINK.finditer(page.read_text()) if link[1]}
    return {image for image in found if not image.is_relative_to(docs)}


def on_files(files: Any, config: Any) -> Any:
    """Called by MkDocs once, with the files of docs/."""
    images = set().union(*(outside_images(page, DOCS) for page in DOCS.rglob("*.md")))
    for image in sorted(images):
        files.append(File.generated(config, f"images/{image.name}", abs_src_path=str(image)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by MkDocs for each page."""
    try:
        return without_outside_links(without_escaped_bars(markdown), Path(page.file.abs_src_path), DOCS)
    except ValueError as error:
        raise PluginError(str(error)) from error
