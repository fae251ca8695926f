"""The table of docs/guides/families.md: `python -m tests.families.table` writes it anew.

With `--plans` it plans all kinds of models first, or those that are named behind it.
"""

import sys
from pathlib import Path

from tests.families import plans
from tests.families.row import Row
from tests.families.rows import ROWS

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "families.md"
_BEGIN, _END = "<!-- table: written by tests/families/table.py -->", "<!-- end of the table -->"
_HEAD = (
    *("model", "`model.family`", "task", "its `data.conditioning`", "sampler like the release"),
    *(f"LoRA in {gib} GiB" for gib in plans.DEVICES),
)


def facts(row: Row) -> list[str]:
    """The cells of a kind of model."""
    pictures = ", ".join(f"`{name}`" for name in row.pictures) or "-"
    described = [row.kind, f"`{row.family}`", row.task, pictures, f"`{row.solver}`"]
    return described + plans.cells(plans.known().get(row.kind))


def lines(page: str) -> list[str]:
    """The rows that a page has."""
    table = page.partition(_BEGIN)[2].partition(_END)[0]
    return [line for line in table.splitlines() if line]


def expected() -> list[str]:
    """The rows that it should have."""
    cells = [list(_HEAD), ["---"] * len(_HEAD), *map(facts, ROWS)]
    return [f"| {' | '.join(row)} |" for row in cells]


def page() -> str:
    return _PAGE.read_text(encoding="utf-8")


if __name__ == "__main__":
    if "--plans" in sys.argv:
        named = sys.argv[sys.argv.index("--plans") + 1 :]
        plans.update([row for row in ROWS if row.kind in named or not named])
    before, _, rest = page().partition(_BEGIN)
    after = rest.partition(_END)[2]
    written = "\n".join(expected())
    _PAGE.write_text(f"{before}{_BEGIN}\n\n{written}\n\n{_END}{after}", encoding="utf-8")
