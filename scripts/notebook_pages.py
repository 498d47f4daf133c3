"""Runs the notebooks of examples/notebooks and writes each as a page of docs/, with its output and pictures.

``python scripts/notebook_pages.py`` runs them, which takes some seconds; ``--no-run`` writes the pages of the output
that is there. A cell that raises ends it.
"""

import argparse
import base64
import re
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "examples" / "notebooks"
DOCS = ROOT / "docs"
_LINK = re.compile(r"\]\(\.\./\.\./docs/")  # notebooks link to pages as they are seen from examples/notebooks


def execute(path: Path) -> Any:
    """Return the notebook with the output of a run in its own folder.

    Raises:
        CellExecutionError: A cell raised; the message has the cell and the traceback.
    """
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": path.parent}}
    ).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times, which differ in each run
    notebook.metadata.pop("language_info", None)
    return notebook


def text_outputs(notebook: Any) -> list[str]:
    """Return what each cell of code wrote or returned as text, pictures left out."""
    return ["".join(_text(output) for output in cell.outputs) for cell in notebook.cells if cell.cell_type == "code"]


def render(notebook: Any, name: str) -> tuple[str, dict[str, bytes]]:
    """Return the notebook as Markdown, and its pictures by their file names.

    Args:
        notebook: With output.
        name: Of the notebook's file; pictures are ``<name>_1.png`` and so on.
    """
    parts, pictures = [], {}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(_LINK.sub("](", cell.source))
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            if picture := output.get("data", {}).get("image/png"):
                file = f"{name}_{len(pictures) + 1}.png"
                pictures[file] = base64.b64decode(picture)
                parts.append(f"![{cell.metadata['alt']}]({file})")
            elif text := _text(output):
                parts.append(f"```text\n{text.rstrip()}\n```")
    note = f"The notebook is [{name}.ipynb](../examples/notebooks/{name}.ipynb); its output below is that of a run."
    return "\n\n".join([parts[0], note, *parts[1:]]) + "\n", pictures


def _text(output: Any) -> str:
    if output.output_type == "stream":
        return str(output.text)
    data = output.get("data", {})
    return "" if "image/png" in data else str(data.get("text/plain", ""))


def main() -> None:
    """Run the notebooks and write their pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-run", action="store_true", help="write the pages only")
    is_run = not parser.parse_args().no_run
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        notebook = execute(path) if is_run else nbformat.read(path, as_version=4)
        nbformat.write(notebook, path)
        page, pictures = render(notebook, path.stem)
        (DOCS / f"{path.stem}.md").write_text(page)
        for name, content in pictures.items():
            (DOCS / name).write_bytes(content)


if __name__ == "__main__":
    main()
