"""``bitwitness compare --checkpoints A B``: which parameters differ, how far, and which the most."""

from __future__ import annotations

import argparse
import csv
import sys
from io import StringIO
from typing import TYPE_CHECKING, Any

from bitwitness.cli.options import write_json
from bitwitness.cli.progress import progress_bar
from bitwitness.errors import EXIT_FINDINGS, EXIT_UNREAD, UsageError
from bitwitness.files.shown import harmless
from bitwitness.files.writing import distinct, target_of, write_text

if TYPE_CHECKING:
    from bitwitness.comparison.checkpoints import CheckpointReport

_CODES = {"fine": 0, "findings": EXIT_FINDINGS, "unread": EXIT_UNREAD}
_SHOWN = 15  # tensors on the terminal: half a screen; the CSV has all
_PROBLEMS = 5  # the table is what was asked for; --json has the rest
_COLUMNS = (
    "name", "name_a", "name_b", "result", "dtype_a", "dtype_b", "shape_a", "shape_b", "l2_relative", "cosine", "max_abs",
    "largest_error_at", "max_rel", "mean_rel", "rmse", "ulp_max", "nan_a", "nan_b", "inf_a", "inf_b", "nan_mismatch",
    "inf_mismatch", "why",
)  # fmt: skip


def run(a: str, b: str, json_path: str | None, csv_path: str | None, *, quiet: bool = False) -> int:
    """Compare two checkpoints and print what was found; return the exit code: 0 if all bits are the same.

    Raises
    ------
    UsageError
        If one of them cannot be read, or a file cannot be written.

    """
    from bitwitness.comparison.checkpoints import compare_checkpoints
    from bitwitness.store.checkpoints import open_checkpoint

    distinct({"--json": json_path, "--csv": csv_path})
    csv_target = None if csv_path is None else target_of(csv_path, "--csv")  # now, and not after the whole comparison
    if json_path not in (None, "-"):
        target_of(str(json_path), "--json")
    first, second = open_checkpoint(a), open_checkpoint(b)
    with progress_bar("parameters") as progress:
        report = compare_checkpoints(first, second, progress)
    if not quiet and json_path != "-":
        show(report)
    if json_path is not None:
        write_json(report.to_dict(), json_path)
    if csv_target is not None:
        write_text(csv_target, _csv(report))
    return _CODES[report.status]


def refuse(args: argparse.Namespace) -> None:
    """Refuse the options of `compare` that say nothing of checkpoints; raises `UsageError`."""
    idle = [name for name in ("xlsx", "steps", "ranks", "map", "propose_map") if getattr(args, name) is not None]
    if idle:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in idle)
        raise UsageError(
            f"{names} and --checkpoints do not go together: checkpoints have names and values only; leave it out"
        )


def show(report: CheckpointReport, shown: int = _SHOWN) -> None:
    """Print the parameters that are farthest apart, what was not compared, and the conclusion."""
    rows = [one for one in report.parameters if one.result not in ("equal", "same values")]
    if rows:
        print(_table(rows[:shown]))
        if len(rows) > shown:
            print(f"and {len(rows) - shown} more (--json and --csv have all)")
        print()
    for text in report.stripped:
        print(f"names: {text}")
    for problem in report.problems[:_PROBLEMS]:
        print(f"not compared: {harmless(problem)}")
    if len(report.problems) > _PROBLEMS:
        print(f"and {len(report.problems) - _PROBLEMS} more problems (--json has all)")
    if report.ignored_a or report.ignored_b:
        print(f"entries that are no tensors, not compared: {report.ignored_a} in A, {report.ignored_b} in B")
    print(report.conclusion)


def _table(rows: list[Any]) -> str:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    table.add_column("parameter", overflow="fold")
    for name in ("relative L2", "largest error", "at", "ULP", "cosine", "note"):
        table.add_column(name)
    for row in rows:
        metrics = row.metrics
        numbers = ["", "", "", "", ""]
        if metrics is not None:
            ulp = "NaN/Inf" if metrics.nan_mismatch + metrics.inf_mismatch else f"{metrics.ulp_max}"
            at = "" if row.where is None else str(list(row.where))
            numbers = [f"{metrics.l2_relative:.2e}", f"{metrics.max_abs:.3g}", at, ulp, f"{metrics.cosine:.6f}"]
        table.add_row(Text(harmless(row.name)), *numbers, Text(_note(row)))
    width = 200 if not sys.stdout.isatty() else None
    console = Console(file=StringIO(), width=width, markup=False, highlight=False)
    console.print(table)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines())


def _note(row: Any) -> str:
    notes = []
    if row.shape_a != row.shape_b:
        notes.append(f"shape {list(row.shape_a)} | {list(row.shape_b)}")
    if row.dtype_a != row.dtype_b:
        notes.append(f"{row.dtype_a} | {row.dtype_b}".replace("torch.", ""))
    if row.nan_a + row.nan_b + row.inf_a + row.inf_b:
        notes.append(f"NaN {row.nan_a} | {row.nan_b}, Inf {row.inf_a} | {row.inf_b}")
    if row.why:
        notes.append("unreadable" if row.result == "unreadable" else row.why.partition(":")[0])
    return "; ".join(notes)


def _csv(report: CheckpointReport) -> str:

    text = StringIO()
    writer = csv.writer(text)
    writer.writerow(_COLUMNS)
    for parameter in report.parameters:
        row = parameter.to_dict()
        cells = (row.get(name, "") for name in _COLUMNS)
        writer.writerow([harmless(str(cell)) if isinstance(cell, str | list) else cell for cell in cells])
    for side, key, names in (("A", "name_a", report.only_a), ("B", "name_b", report.only_b)):
        for name in names:
            row = {"name": name, key: name, "result": f"only in {side}"}
            writer.writerow([harmless(row.get(column, "")) for column in _COLUMNS])
    return text.getvalue()
