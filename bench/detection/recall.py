"""The recall that the trial measured, as the package carries it: what status, report and doctor compute expected steps from.

python bench/detection/recall.py          # writes src/bitwitness/store/recall.json from docs/detection.md
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "detection.md"
DATA = ROOT / "src" / "bitwitness" / "store" / "recall.json"
_COLUMNS = ("one process", "four ranks")


def recall_of(page: str) -> dict[str, Any]:
    """Return the shares of harmful faults that were seen, from the text of ``docs/detection.md``."""
    light: dict[str, dict[str, dict[str, float]]] = {column: {"flip": {}, "pattern": {}} for column in _COLUMNS}
    head: list[str] = []
    for line in _section(page, "## Harmful faults").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == "class":
            head = cells
        elif head and ", " in cells[0] and not cells[0].startswith("*"):
            sort, place = cells[0].split(", ", 1)
            for column in _COLUMNS:
                light[column][sort][place] = _share(cells[head.index(column)])
    deep = {}
    for line in _section(page, "## Deep steps").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] in ("Single flips", "Patterns"):
            deep["flip" if cells[0] == "Single flips" else "pattern"] = _share(cells[2])
    return {"source": "docs/detection.md, harmful faults", "light": light, "checksum": deep}


def write(page: str) -> None:
    """Write the data file of the package."""
    DATA.write_text(json.dumps(recall_of(page), indent=1) + "\n")


def _section(page: str, title: str) -> str:
    start = page.index(title)
    end = page.find("\n## ", start + 1)
    return page[start:end]


def _share(cell: str) -> float:
    found = re.match(r"([\d.]+) %", cell)
    if found is None:
        raise ValueError(f"docs/detection.md: expected a share, such as '98.5 % (97.1–99.2)', not {cell!r}")
    return round(float(found[1]) / 100, 4)


if __name__ == "__main__":
    write(PAGE.read_text())
    sys.exit(0)
