"""Write the tables of model families, supported and refused, into docs/models.md: `python scripts/model_table.py`."""

from pathlib import Path

from lightning_megatron_rl.models.families.refused import refused_table
from lightning_megatron_rl.models.families.registry import table

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "models.md"
TABLES = {
    ("<!-- table -->\n", "<!-- end of table -->\n"): table,
    ("<!-- refused -->\n", "<!-- end of refused -->\n"): refused_table,
}


def with_table(text: str) -> str:
    """The document with the current tables between their marks."""
    for (start, end), content in TABLES.items():
        before, _, rest = text.partition(start)
        _, _, after = rest.partition(end)
        text = before + start + content() + end + after
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(with_table(DOCUMENT.read_text()))
