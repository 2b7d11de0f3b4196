"""A pre-check's results as JUnit XML, which Jenkins, GitLab and others show beside a project's tests."""

from __future__ import annotations

import math
import os
import xml.etree.ElementTree as ET
from collections.abc import Sequence

from bitwitness.files.shown import shown
from bitwitness.files.writing import new_file
from bitwitness.precheck.summary import LOST
from bitwitness.trial.result import FAIL, NOT_JUDGED, WARN, CaseResult, OutputResult

_LONGEST = 2000  # characters of a name or a message


def write_junit(
    path: str | os.PathLike[str], results: Sequence[CaseResult], suite: str = "bitwitness precheck"
) -> None:
    """Write one test case for each case; raises `UnwrittenError` if the system refuses.

    A fail is a ``failure``; a case that raised, crashed or ran out of time an ``error``; one that could not be judged is
    ``skipped``; a warning passes, and its reason is in ``system-out``. What XML cannot hold is written as Python's escapes.
    Times are seconds.
    """
    seconds = sum(_time(one) for one in results)
    counts = {
        "tests": len(results),
        "failures": sum(one.verdict == FAIL for one in results),
        "errors": sum(one.verdict in LOST for one in results),
        "skipped": sum(one.verdict == NOT_JUDGED for one in results),
    }
    told = {name: str(count) for name, count in counts.items()} | {"time": f"{seconds:.6f}"}
    root = ET.Element("testsuites", {"name": _text(suite), **told})
    inner = ET.SubElement(root, "testsuite", {"name": _text(suite), **told})
    for one in results:
        _add(inner, one)
    ET.indent(root, " ")
    with new_file(path, binary=True) as file:
        file.write(ET.tostring(root, encoding="utf-8", xml_declaration=True) + b"\n")


def _add(suite: ET.Element, case: CaseResult) -> None:
    named = {"classname": f"precheck.{_text(case.operator)}", "name": _text(case.name), "time": f"{_time(case):.6f}"}
    found = ET.SubElement(suite, "testcase", named)
    reason = _text(case.reason) or "no reason was given"
    if case.verdict == FAIL or case.verdict in LOST:
        kind = "failure" if case.verdict == FAIL else "error"
        ET.SubElement(found, kind, {"message": reason, "type": case.verdict}).text = _details(case)
    elif case.verdict == NOT_JUDGED:
        ET.SubElement(found, "skipped", {"message": reason})
    elif case.verdict == WARN:
        ET.SubElement(found, "system-out").text = f"warning: {reason}\n{_details(case)}"


def _details(case: CaseResult) -> str:
    lines = [f"{_text(case.operator)} {_text(case.dtype)} {_text(case.shapes)}"]
    lines += [_of_output(one) for one in case.outputs]
    if case.reproducer:
        lines.append(f"run it alone: python {_text(case.reproducer)}")
    return "\n".join(lines)


def _of_output(one: OutputResult) -> str:
    said = f"{_text(one.slot)} {one.verdict}" + (f": {_text(one.reason)}" if one.reason else "")
    worst = f"worst element {list(one.at)} is {one.value!r}, expected {one.expected!r}, may be off by {one.allowed!r}"
    return f"{said}; {worst}, ratio {one.ratio:.4g}"


def _text(text: str) -> str:
    """Return a text that XML can hold: `shown` escapes control characters, surrogates and what is no character."""
    return shown(text, _LONGEST)


def _time(case: CaseResult) -> float:
    return case.seconds if math.isfinite(case.seconds) and case.seconds > 0 else 0.0
