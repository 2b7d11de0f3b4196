"""What ``bitwitness doctor SCRIPT`` tells: coverage, self-tests, what keeps bits from repeating, what is not protected."""

from __future__ import annotations

import textwrap
from typing import Any

from bitwitness.errors import EXIT_FINDINGS, EXIT_UNREAD
from bitwitness.guard.repeats import SETTINGS
from bitwitness.guard.tryout import Tryout
from bitwitness.store.covered import WIDTH, expected_json, lines_of, not_protected, tables_of

_NOTHING = "not protected: anything: the script trained no model that the guard could watch"


def prognosis(tryout: Tryout, *, code: int, lines: list[str]) -> dict[str, Any]:
    """Return what was found, ready for JSON.

    Parameters
    ----------
    tryout
        The script's steps.
    code
        The script's own exit code, 0 where it was ended from here.
    lines
        What is to be said besides: of models that nobody watched.

    """
    tables = tryout.tables
    first = tables[0] if tables else {}
    census = first.get("operators", {}).get("census", {})
    called = {op: count for row in census.get("kinds", {}).values() for op, count in row["ops"].items()}
    problems = list(_problems(tryout, first, code)) + lines
    tests = first.get("sensors", {}).get("self_tests", {})
    blind = [name for name, result in tests.items() if result != "seen"]
    bad = blind or first.get("verdicts") or first.get("nonfinite", {}).get("bad")
    return {
        "status": "findings" if bad else "unread" if problems else "fine",
        "problems": problems,
        "script": {"exit_code": code, "ended_by_doctor": tryout.ended, "steps": first.get("steps", {}).get("held", 0)},
        "ranks": {"watched_together": first.get("ranks", 1)},
        "not_protected": not_protected(first) if first else _NOTHING,
        "coverage": tables,
        "expected_steps": expected_json(first) if first else None,
        "repeats": {
            "replayed": {name: first["replay"][name] for name in ("calibrations", "same_bits")} if first else None,
            "reasons": [
                {"what": one.what, "line": one.line, "to_do": one.to_do, "sure": one.sure}
                for one in tryout.repeats.reasons(called)
            ],
        },
    }


def exit_code(found: dict[str, Any]) -> int:
    """Return the script's own code where it failed; 1 where a sensor is blind or found something, 3 where not all was seen."""
    code: int = found["script"]["exit_code"]
    return code or {"fine": 0, "findings": EXIT_FINDINGS, "unread": EXIT_UNREAD}[found["status"]]


def _problems(tryout: Tryout, table: dict[str, Any], code: int) -> list[str]:
    problems = []
    if tryout.late:
        problems.append("the deadline passed before the steps were done")
    if code:
        problems.append(f"the script failed, with exit code {code}; what is told is of the steps before")
    if not table:
        problems.append("no model was trained under guard")
    elif not table["steps"]["held"]:
        problems.append("no step was judged: no optimizer stepped after a backward of the model")
    elif not table["steps"]["deep"]:
        problems.append("no step was deep: the script made too few; single operators were not looked at")
    problems += [f"the guard failed in its {part}: {why}" for part, why in table.get("failures", {}).items()]
    return problems


def told(found: dict[str, Any], *, determinism: bool) -> list[str]:
    """Return it for a terminal, 100 columns wide."""
    script = found["script"]
    ended = "ended here" if script["ended_by_doctor"] else "as far as it went"
    lines = [f"doctor: {script['steps']} steps under guard, {ended}"]
    lines += [line for one in found["problems"] for line in _wrapped(f"not known: {one}")]
    for number, table in enumerate(found["coverage"]):
        if number:
            lines += ["", f"model {number + 1} of this process:"]
        lines += ["", *lines_of(tables_of(table))] if not number else lines_of(tables_of(table)[:1])
    lines += ["", *_repeats(found["repeats"])]
    if determinism:
        lines += ["", "To make it repeat its bits (bitwitness run --determinism sets the first four in the process):"]
        lines += [line for setting, why in SETTINGS for line in _wrapped(f"  {setting}: {why}")]
    return [*lines, "", *_wrapped(found["not_protected"])]


def _repeats(found: dict[str, Any]) -> list[str]:
    replayed, reasons = found["replayed"] or {}, found["reasons"]
    sure = [one for one in reasons if one["sure"]]
    if sure:
        lines = [f"This script does not repeat its bits, for {len(sure)} reason{'s' * (len(sure) > 1)}:"]
    else:
        lines = [
            "Nothing was seen that keeps this script from repeating its bits" + (", but look at:" if reasons else ".")
        ]
    for one in sorted(reasons, key=lambda one: not one["sure"]):
        where = f"{one['line']}: " if one["line"] else ""
        lines += _wrapped(f"  {where}{one['what']}; {one['to_do']}")
    if replayed.get("calibrations"):
        same = "with the same bits" if replayed["same_bits"] else "and came out otherwise"
        count = replayed["calibrations"]
        lines += _wrapped(f"{count} of its steps {'was' if count == 1 else 'were'} run again, {same}.")
    return lines


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, WIDTH, subsequent_indent="    ", break_long_words=False)
