"""The table of a comparison, a row for each value that was compared: written as CSV, JSON Lines or a spreadsheet."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from importlib.util import find_spec
from typing import IO, Any

from bitwitness.comparison.align import Pair
from bitwitness.comparison.differences import Differences
from bitwitness.comparison.values import KeptValues
from bitwitness.errors import UsageError
from bitwitness.files.shown import shown
from bitwitness.finding import to_jsonable

COLUMNS = (
    "rank", "step", "micro", "kind", "site", "site_b", "dtype_a", "dtype_b", "shape_a", "shape_b", "result", "change",
    "cosine", "euclidean", "max_abs_error", "max_rel_error", "one_thousandth", "five_thousandths", "ulp",
    "max_a", "max_b", "max_diff", "min_a", "min_b", "min_diff", "mean_a", "mean_b", "mean_diff", "l2_a", "l2_b", "l2_diff",
    "l2_rel", "nan_a", "nan_b", "hash_a", "hash_b",
)  # fmt: skip
_SHEET_ROWS = 1_048_575  # that a spreadsheet holds below its header
# Beginnings that make spreadsheets compute a cell; names in a recording may come from somebody else.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")

Cells = dict[str, Any]


def rows_of(rank: int, step: int, differences: Differences, values: KeptValues | None) -> Iterator[Cells]:
    """Yield a step's rows in the order of execution, those that one run alone has included."""
    alignment = differences.alignment
    for pair in alignment.pairs:
        for row_a, row_b in (*pair.inputs, *pair.outputs):
            yield {"rank": rank, "step": step} | _cells(differences, pair, row_a, row_b, values)
    lone = [("only in A", alignment.only_a), ("only in B", alignment.only_b)]
    for group in alignment.groups:
        lone += [("group in A", group.a), ("group in B", group.b)]
    for result, nodes in lone:
        for node in nodes:
            place = {"rank": rank, "step": step, "micro": node.micro}
            yield place | {"kind": node.kind, "site": node.site, "result": result}


def _cells(differences: Differences, pair: Pair, row_a: int, row_b: int, values: KeptValues | None) -> Cells:
    a, b = differences.a, differences.b
    change = differences.change_of[row_a]
    site = f"{pair.a.site}.{a.text('slot', row_a)}"
    site_b = f"{pair.b.site}.{b.text('slot', row_b)}"
    cells: Cells = {
        "micro": pair.a.micro,
        "kind": pair.a.kind,
        "site": site,
        "site_b": site_b if site_b != site else None,
        "dtype_a": a.text("dtype", row_a),
        "dtype_b": b.text("dtype", row_b),
        "shape_a": str(list(a.shapes[row_a])),
        "shape_b": str(list(b.shapes[row_b])),
        "result": "equal" if change == 0 else "rounding" if differences.is_noise(pair, row_a) else "differs",
        "change": change,
    }
    first, second = a.stats(row_a), b.stats(row_b)
    for name in ("max", "min", "mean", "l2"):
        x, y = first[name], second[name]
        cells |= {f"{name}_a": x, f"{name}_b": y, f"{name}_diff": None if x is None or y is None else x - y}
    l2 = cells["l2_diff"]
    cells["l2_rel"] = None if l2 is None or not second["l2"] else abs(l2) / second["l2"]
    cells |= {"nan_a": first["nan"], "nan_b": second["nan"], "hash_a": first["hash"], "hash_b": second["hash"]}
    metrics = None if values is None else values.metrics(row_a, row_b)
    if metrics is not None:
        cells |= {
            "cosine": metrics.cosine,
            "euclidean": metrics.rmse * math.sqrt(int(a.count[row_a])),
            "max_abs_error": metrics.max_abs,
            "max_rel_error": metrics.max_rel,
            "one_thousandth": metrics.share_within_1e_3,
            "five_thousandths": metrics.share_within_5e_3,
            "ulp": metrics.ulp_max,
        }
    return cells


def harmless(text: str) -> str:
    """Return a text that no spreadsheet takes for a formula and no terminal for a command."""
    safe = shown(text, None)
    return f"'{safe}" if text.startswith(_FORMULA) else safe


class CsvTable:
    """A CSV file, of which ``file`` is the open one."""

    binary = False

    def __init__(self, file: IO[Any]) -> None:
        self._writer = csv.writer(file)
        self._writer.writerow(COLUMNS)

    def add(self, cells: Cells) -> None:
        """Write a row."""
        self._writer.writerow([_plain(cells.get(name)) for name in COLUMNS])

    def finish(self, _fields: dict[str, Any]) -> None:
        """Leave what is not a row to other formats."""


def _plain(value: Any) -> Any:
    return harmless(value) if isinstance(value, str) else "" if value is None else value


class JsonTable:
    """A JSON object whose ``table`` is written row by row; its other fields come last."""

    binary = False

    def __init__(self, file: IO[Any]) -> None:
        self._file = file
        self._file.write('{"table": [')
        self._first = True

    def add(self, cells: Cells) -> None:
        """Write a row; what is not known is left out."""
        known = {name: to_jsonable(value) for name, value in cells.items() if value is not None}
        self._file.write(("" if self._first else ",") + "\n" + json.dumps(known, allow_nan=False))
        self._first = False

    def finish(self, fields: dict[str, Any]) -> None:
        """Write the other fields."""
        rest = json.dumps(to_jsonable(fields), indent=1, allow_nan=False)
        self._file.write("\n]," + rest[1:] + "\n")


class XlsxTable:
    """A spreadsheet, in as many sheets as the rows need; needs XlsxWriter (`UsageError` if it is not there)."""

    binary = True

    def __init__(self, file: IO[Any]) -> None:
        check_xlsx()
        import xlsxwriter

        options = {"constant_memory": True, "strings_to_formulas": False, "strings_to_urls": False}
        self._book = xlsxwriter.Workbook(file, options)
        self._row = _SHEET_ROWS

    def add(self, cells: Cells) -> None:
        """Write a row."""
        if self._row >= _SHEET_ROWS:
            self._sheet = self._book.add_worksheet()
            self._sheet.freeze_panes(1, 0)
            self._row = 0
            self._write(COLUMNS)
        self._write([cells.get(name) for name in COLUMNS])

    def _write(self, values: Any) -> None:
        for column, value in enumerate(values):
            if isinstance(value, str):
                self._sheet.write_string(self._row, column, harmless(value))
            elif isinstance(value, int | float) and math.isfinite(value):
                self._sheet.write_number(self._row, column, value)
            elif value is not None:
                self._sheet.write_string(self._row, column, str(value))
        self._row += 1

    def finish(self, _fields: dict[str, Any]) -> None:
        """Write the sheets into the file."""
        self._book.close()


KINDS: dict[str, type[CsvTable | JsonTable | XlsxTable]] = {"json": JsonTable, "csv": CsvTable, "xlsx": XlsxTable}
"""By the option that asks for it."""


def check_xlsx() -> None:
    """Say before the work, and not after it, that no spreadsheet can be written; raises `UsageError`."""
    if find_spec("xlsxwriter") is None:
        raise UsageError("--xlsx needs XlsxWriter: pip install 'bitwitness[xlsx]'; or use --csv")
