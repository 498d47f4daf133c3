"""Write the table of model families into docs/models.md: `python scripts/model_table.py`."""

from pathlib import Path

from lightning_megatron_rl.models.families.registry import table

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "models.md"
START, END = "<!-- table -->\n", "<!-- end of table -->\n"


def with_table(text: str) -> str:
    """The document with the current table between its marks."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return before + START + table() + END + after


if __name__ == "__main__":
    DOCUMENT.write_text(with_table(DOCUMENT.read_text()))
