"""The site: it builds with strict checks, and those find a broken link, a missing anchor and a page without a place."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import ROOT

PAGES = sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md"))


def make_site(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(root / "site")]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """The site's settings over two pages, without the API reference."""
    settings = (ROOT / "mkdocs.yml").read_text()
    settings = settings[: settings.index("nav:")]
    settings = re.sub(r"  - mkdocstrings:\n(?:      .*\n)+", "", settings)
    (tmp_path / "mkdocs.yml").write_text(settings + "nav: [index.md, other.md]\n")
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "site_links.py", tmp_path / "scripts")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(
        "# Start\n\n[other](other.md#part), [settings](../mkdocs.yml)\n\n![a](../a.png)\n"
    )
    shutil.copy(ROOT / "docs" / "timeline.png", tmp_path / "a.png")
    (tmp_path / "docs" / "other.md").write_text("# Other\n\n## Part\n")
    return tmp_path


def test_a_link_to_a_file_of_the_repository_becomes_its_name_and_images_come_along(small: Path):
    done = make_site(small)
    assert done.returncode == 0, done.stderr
    assert "<code>mkdocs.yml</code>" in (small / "site" / "index.html").read_text()
    assert (small / "site" / "images" / "a.png").read_bytes() == (small / "a.png").read_bytes()


def test_tables_and_names_of_pages_read_well(small: Path):
    table = "| setting | type |\n|---|---|\n| `a` | `int \\| None` |\n"
    (small / "docs" / "index.md").write_text(f"# Start\n\n[other.md](other.md#part) has it.\n\n{table}")
    done = make_site(small)
    assert done.returncode == 0, done.stderr
    page = (small / "site" / "index.html").read_text()
    assert "<td><code>int | None</code></td>" in page
    assert '<a href="other.html#part">Other</a> has it.' in page


@pytest.mark.parametrize(
    ("page", "text", "word"),
    [
        ("index.md", "[x](none.md)", "none.md"),
        ("index.md", "[x](other.md#nowhere)", "#nowhere"),
        ("index.md", "[x](../none.yaml)", "none.yaml"),
        ("third.md", "# Third", "third.md"),
    ],
)
def test_what_leads_nowhere_is_refused(small: Path, page: str, text: str, word: str):
    (small / "docs" / page).write_text(text + "\n")
    done = make_site(small)
    assert done.returncode != 0
    assert word in done.stdout + done.stderr


def test_every_page_has_a_place():
    settings = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"[\w/]+\.md", settings[settings.index("nav:") :])
    assert sorted(listed) == PAGES


@pytest.mark.slow  # .ci/run builds the site anyway
def test_the_site_builds_and_fetches_nothing(tmp_path: Path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for page in tmp_path.rglob("*.html"):
        assert not re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="?https?://[^">]+', page.read_text()), page
