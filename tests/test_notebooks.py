"""Notebooks: every cell runs, what it prints is what is committed, and the pages of docs/ are theirs."""

from pathlib import Path

import nbformat
import pytest

from scripts.notebook_pages import DOCS, NOTEBOOKS, execute, render, text_outputs

PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_page_and_pictures_are_those_of_the_notebook(path: Path):
    notebook = nbformat.read(path, as_version=4)
    assert [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"] == list(
        range(1, len(text_outputs(notebook)) + 1)
    ), "not run from the first cell to the last"
    page, pictures = render(notebook, path.stem)
    assert (DOCS / f"{path.stem}.md").read_text() == page, "python scripts/notebook_pages.py writes it"
    assert pictures
    for name, content in pictures.items():
        assert (DOCS / name).read_bytes() == content


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_every_cell_runs_and_prints_what_is_committed(path: Path):
    done = execute(path)  # raises where a cell does
    assert text_outputs(done) == text_outputs(nbformat.read(path, as_version=4))
    assert not [
        output for cell in done.cells for output in cell.get("outputs", []) if output.get("name") == "stderr"
    ], "a cell warns"
