"""A pre-check's results for other programs: CSV, a row an output, and JSON, all that is known."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from bitwitness.files.shown import harmless
from bitwitness.files.writing import new_file
from bitwitness.finding import to_jsonable
from bitwitness.precheck.summary import count_of, exit_code, headline
from bitwitness.trial.result import CaseResult, OutputResult

COLUMNS = (
    "case", "operator", "dtype", "shapes", "calls", "case_verdict", "case_reason", "slot", "verdict", "reason",
    "output_dtype", "output_shape", "ratio", "at", "value", "expected", "allowed", "ulp_max", "euclidean", "relative",
    "seconds", "reproducer",
)  # fmt: skip
SCHEMA = 1
"""Of the JSON; counted up when a field changes its meaning or goes."""


def write_csv(path: str | os.PathLike[str], results: Sequence[CaseResult]) -> None:
    """Write a row for each output, and one for each case without any; raises `UnwrittenError` if the system refuses.

    Text is written so that no spreadsheet takes it for a formula; numbers are plain, ``nan`` and ``inf`` among them.
    """
    with new_file(path) as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for result in results:
            writer.writerows([_cell(value) for value in row] for row in _rows(result))


def write_json(path: str | os.PathLike[str], results: Sequence[CaseResult]) -> None:
    """Write all that is known as one JSON object; raises `UnwrittenError` if the system refuses.

    What no JSON number can be is written as ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``.
    """
    with new_file(path) as file:
        json.dump(told(results), file, indent=1, allow_nan=False)
        file.write("\n")


def told(results: Sequence[CaseResult]) -> dict[str, Any]:
    """Return all that is known as JSON takes it."""
    return {
        "schema": SCHEMA,
        "conclusion": headline(results),
        "exit_code": exit_code(results),
        "counts": count_of(results),
        "results": [to_jsonable(result.as_dict()) for result in results],
    }


def _rows(case: CaseResult) -> Iterator[list[Any]]:
    head = [case.name, case.operator, case.dtype, case.shapes, case.calls, case.verdict, case.reason]
    tail = [case.seconds, case.reproducer]
    if not case.outputs:
        yield [*head, *[""] * (len(COLUMNS) - len(head) - len(tail)), *tail]
    for output in case.outputs:
        yield [*head, *_of_output(output), *tail]


def _of_output(one: OutputResult) -> list[Any]:
    said = [one.slot, one.verdict, one.reason, one.dtype, str(list(one.shape))]
    worst = [one.ratio, str(list(one.at)), one.value, one.expected, one.allowed]
    return [*said, *worst, one.ulp_max, one.euclidean, one.relative]


def _cell(value: Any) -> Any:
    return harmless(value) if isinstance(value, str) else value
