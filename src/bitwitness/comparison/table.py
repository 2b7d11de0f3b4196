"""The table of a comparison, a row for each value that was compared: written as CSV, JSON Lines or a spreadsheet."""

from __future__ import annotations

import csv
import json
import math
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Any

from bitwitness.comparison.differences import Differences
from bitwitness.comparison.matching.align import Pair
from bitwitness.comparison.measuring.values import KeptValues
from bitwitness.errors import UsageError
from bitwitness.files.shown import harmless
from bitwitness.finding import to_jsonable

COLUMNS = (
    "rank", "step", "micro", "kind", "site", "site_b", "dtype_a", "dtype_b", "shape_a", "shape_b", "result", "change",
    "cosine", "euclidean", "max_abs_error", "max_rel_error", "one_thousandth", "five_thousandths", "ulp",
    "max_a", "max_b", "max_diff", "min_a", "min_b", "min_diff", "mean_a", "mean_b", "mean_diff", "l2_a", "l2_b", "l2_diff",
    "l2_rel", "nan_a", "nan_b", "hash_a", "hash_b",
)  # fmt: skip
_SHEET_ROWS = 1_048_575  # that a spreadsheet holds below its header

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
    """A JSON object: the report's fields first, the rows under ``table`` last."""

    binary = False

    def __init__(self, file: IO[Any]) -> None:
        self._file = file
        self._rows = TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - closed by `finish`, or with this object
        self._first = True

    def add(self, cells: Cells) -> None:
        """Keep a row; what is not known is left out."""
        known = {name: to_jsonable(value) for name, value in cells.items() if value is not None}
        self._rows.write(("" if self._first else ",") + "\n" + json.dumps(known, allow_nan=False))
        self._first = False

    def finish(self, fields: dict[str, Any]) -> None:
        """Write the fields, and the rows after them."""
        head = json.dumps(to_jsonable(fields), indent=1, allow_nan=False)
        self._file.write(head[: head.rindex("\n")] + ',\n "table": [')
        self._rows.seek(0)
        shutil.copyfileobj(self._rows, self._file)
        self._rows.close()
        self._file.write("\n]}\n")


class XlsxTable:
    """A spreadsheet: what was found, then the rows in as many sheets as they need.

    Raises
    ------
    UsageError
        If XlsxWriter is not there.

    """

    binary = True

    def __init__(self, file: IO[Any]) -> None:
        check_xlsx()
        import xlsxwriter

        self._parts = TemporaryDirectory(prefix="bitwitness-")  # xlsxwriter leaves its own where it fails
        options = {"constant_memory": True, "strings_to_formulas": False, "strings_to_urls": False}
        self._book = xlsxwriter.Workbook(_FailsOnce(file), {**options, "tmpdir": self._parts.name})
        self._bold, self._wrapped = (self._book.add_format(how) for how in ({"bold": True}, {"text_wrap": True}))
        self._red = self._book.add_format({"bg_color": "#F4CCCC"})
        self._found = self._book.add_worksheet("result")
        self._row = _SHEET_ROWS
        self._sheet: Any = None

    def add(self, cells: Cells) -> None:
        """Write a row."""
        if self._row >= _SHEET_ROWS:
            self._end_sheet()
            self._sheet = self._book.add_worksheet()
            self._sheet.freeze_panes(1, 0)
            for column, name in enumerate(COLUMNS):
                self._sheet.set_column(column, column, 60 if name.startswith("site") else max(10, len(name) + 2))
            self._row = 0
            self._write(COLUMNS, self._bold)
        self._write([cells.get(name) for name in COLUMNS])

    def _write(self, values: Any, how: Any = None) -> None:
        for column, value in enumerate(values):
            if isinstance(value, str):
                self._sheet.write_string(self._row, column, harmless(value), how)
            elif isinstance(value, int | float) and math.isfinite(value):
                self._sheet.write_number(self._row, column, value, how)
            elif value is not None:
                self._sheet.write_string(self._row, column, str(value), how)
        self._row += 1

    def _end_sheet(self) -> None:
        if self._sheet is not None:
            last, result = self._row - 1, COLUMNS.index("result")
            self._sheet.autofilter(0, 0, last, len(COLUMNS) - 1)
            rule = {"type": "cell", "criteria": "==", "value": '"differs"', "format": self._red}
            self._sheet.conditional_format(1, result, max(last, 1), result, rule)

    def finish(self, fields: dict[str, Any]) -> None:
        """Write the first sheet, and all into the file."""
        self._end_sheet()
        self._found.set_column(0, 0, 24)
        self._found.set_column(1, 1, 110, self._wrapped)
        for row, (name, value) in enumerate(_summary(fields)):
            self._found.write_string(row, 0, name, self._bold)
            self._found.write_string(row, 1, harmless(value), self._wrapped)
        try:
            self._book.close()
        except Exception as error:
            if isinstance(cause := error.__context__, OSError):  # in which XlsxWriter's own error hides it
                raise cause from None
            raise
        finally:
            self._parts.cleanup()


class _FailsOnce:
    """A file that raises a failed write once: a ZipFile that is given up writes again, where nobody can catch it."""

    def __init__(self, file: IO[Any]) -> None:
        self._file = file
        self._failed = False

    def write(self, data: Any) -> int:
        if self._failed:
            return len(data)
        try:
            written: int = self._file.write(data)
        except OSError:
            self._failed = True
            raise
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _summary(fields: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what a report found as lines of two columns."""
    for name in ("conclusion", "status", "conditions"):
        if fields.get(name):
            yield name, str(fields[name])
    for name in ("lined_up", "unaligned", "problems"):
        for text in fields.get(name) or ():
            yield name, str(text)
    for number, one in enumerate(fields.get("suspects") or (), 1):
        where = f"{one['site']} (rank {one['rank']}, step {one['step']})"
        yield f"suspect {number}", f"{where}: {one['text']}" + (f"; called at {one['line']}" if one.get("line") else "")


KINDS: dict[str, type[CsvTable | JsonTable | XlsxTable]] = {"json": JsonTable, "csv": CsvTable, "xlsx": XlsxTable}
"""By the option that asks for it."""


def check_xlsx() -> None:
    """Say before the work, and not after it, that no spreadsheet can be written; raises `UsageError`."""
    if find_spec("xlsxwriter") is None:
        raise UsageError("--xlsx needs XlsxWriter: pip install 'bitwitness[xlsx]'; or use --csv")
