"""What a table of coverage says, as small tables that a terminal, a report and a ticket show alike, and in one line.

Everything is read from what the run itself counted (`guard.coverage`), by plain dictionaries, so that it can be told from a run
folder without torch. What an older release did not count is left out.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bitwitness.store.expected import Expected, Plan, all_expected, plan_of

WIDTH = 100
_LARGE = 0.05  # of the work: from here on a kind of operators is told by itself
_NAMES = 4  # of operators of one kind


@dataclass(slots=True)
class Table:
    """A title, a sentence, and cells as texts."""

    title: str
    note: str
    columns: list[str]
    rows: list[list[str]]

    def lines(self, width: int = WIDTH) -> list[str]:
        """Return it for a terminal; the last column is wrapped."""
        sizes = [max(len(row[at]) for row in [self.columns, *self.rows]) for at in range(len(self.columns) - 1)]
        indent = sum(sizes) + 2 * len(sizes)
        lines = textwrap.wrap(f"{self.title}. {self.note}" if self.note else self.title, width)
        for row in [self.columns, *self.rows]:
            head = "".join(cell.ljust(size) + "  " for cell, size in zip(row, sizes, strict=False))
            last = textwrap.wrap(row[-1], max(20, width - indent - 2)) or [""]
            lines += [f"  {head}{last[0]}".rstrip(), *(f"  {' ' * indent}{more}" for more in last[1:])]
        return lines


def coverage(table: Mapping[str, Any]) -> Table | None:
    """Return what was looked at of what there was; None where no guard was on."""
    if "parameters" not in table:
        return None
    rows = [
        row for part in (_parameters, _steps, _operators, _collectives, _replays, _self_tests) for row in part(table)
    ]
    return Table("Coverage", "Counted while it ran.", ["part", "seen", "not seen, and why"], rows)


def expected_steps(table: Mapping[str, Any]) -> Table | None:
    """Return, by class of faults, how likely one is seen and after how many steps; None where the plan is not known."""
    plan = plan_of(table)
    if plan is None:
        return None
    rows, nobody = [], []
    for fault, sorts in all_expected(plan).items():
        flip, pattern = sorts["flip"], sorts["pattern"]
        by = ", ".join(dict.fromkeys((*flip.by, *pattern.by)))
        nobody += [] if by else [fault]
        cells = [cell for one in (flip, pattern) for cell in (_share(one.once), _steps_until(one))]
        rows += [[fault, *cells, by]] if by else []
    note = _of_plan(plan) + (f" Nobody looks at: {', '.join(nobody)}." if nobody else "")
    columns = ["a fault in", "bit: once", "stays", "pattern: once", "stays", "seen by"]
    return Table("Expected steps until it is seen", note, columns, rows)


def expected_json(table: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the same as numbers, ready for JSON: ``steps`` is None where a share is never seen."""
    plan = plan_of(table)
    if plan is None:
        return None
    return {
        fault: {
            sort: {
                "seen_at_once": round(one.light, 4),
                "seen_if_once": round(one.once, 4),
                "steps": round(one.steps, 2) if math.isfinite(one.steps) else None,
                "by": list(one.by),
            }
            for sort, one in sorts.items()
        }
        for fault, sorts in all_expected(plan).items()
    }


def tables_of(table: Mapping[str, Any]) -> list[Table]:
    """Return all tables that a table of coverage gives."""
    return [one for one in (coverage(table), expected_steps(table)) if one is not None]


def not_protected(table: Mapping[str, Any]) -> str:
    """Say in one line what is not protected."""
    gaps = [*_unchecked(table), *_unproven(table)]
    steps = _of(table, "steps")
    if not steps.get("held"):
        gaps.insert(0, "anything: no step was judged")
    elif not steps.get("deep"):
        gaps.insert(0, "single operators: no step was deep")
    collectives = _of(table, "collectives")
    if collectives.get("begun") and not collectives.get("checked"):
        gaps.append(f"collectives ({collectives['begun']} begun, none checked by itself)")
    replay = _of(table, "replay")
    if (cannot := replay.get("of", 0) - replay.get("can", 0)) > 0:
        gaps.append(f"proof for {cannot} of {replay['of']} steps, which cannot be run again")
    gaps.append("operators of loss code outside the model, in its forward; data loading")
    if any("no second device" in str(gap) for gap in table.get("not_covered", ())):
        gaps.append("1 rank: nobody else to ask")
    return f"not protected: {'; '.join(gaps)}"


# -- rows ------------------------------------------------------------------------------------------------------------


def _parameters(table: Mapping[str, Any]) -> Iterator[list[str]]:
    found = _of(table, "parameters")
    watched, there = found.get("watched", 0), found.get("of", 0)
    left = f"{there - watched} ask for no gradient" if there > watched else ""
    yield ["parameters", f"{watched} of {there}", left]


def _steps(table: Mapping[str, Any]) -> Iterator[list[str]]:
    found = _of(table, "steps")
    held, deep, judged = (found.get(name, 0) for name in ("held", "deep", "judged"))
    left = [f"{found['paused']} while paused"] if found.get("paused") else []
    left += [
        f"{count} {kind} forward{'s' * (count > 1)}, which are no steps"
        for kind in ("evaluation", "inference", "transformed")
        if (count := found.get(f"{kind}_forwards"))
    ]
    times = "" if judged == held else f" ({judged} times gradients)"
    yield ["steps", f"{held}{times}: {max(held - deep, 0)} light, {deep} deep", "; ".join(left)]


def _operators(table: Mapping[str, Any]) -> Iterator[list[str]]:
    census = _of(_of(table, "operators"), "census")
    if not census.get("calls"):
        return
    checked, calls = census["calls_checked"], census["calls"]
    work = _ratio(census["operations_checked"], census["operations"])
    yield [
        "operators",
        f"{checked} of {calls} calls, {work} of the work",
        "on deep steps, in the model and the backward",
    ]
    for kind, row in census["kinds"].items():
        share = f"{row['checked']} of {row['calls']} calls{_again(row)}"
        what = f"{_ratio(row['operations'], census['operations'])} of the work"
        never = sorted(row["never"].items(), key=lambda pair: -pair[1])
        names = [f"{name} {count}" for name, count in never[:_NAMES]]
        names += [f"and {len(never) - _NAMES} more kinds"] if len(never) > _NAMES else []
        yield [f"  {kind}", share, what + (f"; never: {', '.join(names)}" if never else "")]


def _collectives(table: Mapping[str, Any]) -> Iterator[list[str]]:
    found = _of(table, "collectives")
    if not found.get("begun") and not found.get("on_deep_steps"):
        return
    kinds, checked = _of(found, "on_deep_steps"), _of(found, "checked")
    seen = ", ".join(f"{name} {count}" for name, count in kinds.items()) or "none"
    deep = _of(table, "steps").get("deep", 0)
    tested = f"{sum(checked.values())} checked" if checked else "none checked by itself"
    yield ["collectives", f"{seen}, on {deep} deep steps", f"{found.get('begun', 0)} begun in all; {tested}"]


def _replays(table: Mapping[str, Any]) -> Iterator[list[str]]:
    found = _of(table, "replay")
    if "of" not in found:
        return
    again = found.get("calibrations", 0)
    same = "" if not again else ", equal bits" if found.get("same_bits") else ", bits differ within the known spread"
    why = "; ".join(f"{count}: {reason}" for reason, count in _of(found, "why_not").items())
    can = f"{found['can']} of {found['of']} steps can be run again"
    yield ["replays", can, f"{again} were{same}{f'; {why}' if why else ''}"]


def _self_tests(table: Mapping[str, Any]) -> Iterator[list[str]]:
    sensors = _of(table, "sensors")
    if "self_tests" not in sensors:
        return
    tests = _of(sensors, "self_tests")
    saw = [name for name, result in tests.items() if result == "seen"]
    left = [f"{name}: {result}" for name, result in tests.items() if result != "seen"]
    left += [f"{name} was off: {why}" for name, why in _of(sensors, "off").items()]
    told = f"{len(saw)} of {len(tests)} saw their fault" if tests else "none was made (self_test = false)"
    yield ["self-tests", told, "; ".join([*left, *([f"seen by {', '.join(saw)}"] if saw else [])])]


# -- the line --------------------------------------------------------------------------------------------------------


def _unchecked(table: Mapping[str, Any]) -> Iterator[str]:
    """Yield the kinds of operators of which no call was checked; what was computed again shows what does not repeat."""
    census = _of(_of(table, "operators"), "census")
    calls, work = census.get("calls", 0), census.get("operations", 0)
    kinds = {kind: row for kind, row in _of(census, "kinds").items() if not row["checked"]}
    for kind, row in kinds.items():
        if row["operations"] > _LARGE * work:
            yield f"{kind}{_repeating(row)} ({_of_all([row], calls, work)})"
    small = {kind: row for kind, row in kinds.items() if not row["operations"] > _LARGE * work}
    for what in dict.fromkeys(map(_repeating, small.values())):
        rows = {kind: row for kind, row in small.items() if _repeating(row) == what}
        yield f"{', '.join(rows)}{what} ({_of_all(list(rows.values()), calls, work)})"


def _again(row: Mapping[str, Any]) -> str:
    return f", {row['again']} computed twice" if row.get("again") else ""


def _repeating(row: Mapping[str, Any]) -> str:
    return ", against a fault that repeats itself" if row.get("again") else ""


def _of_all(rows: Sequence[Mapping[str, Any]], calls: int, work: int) -> str:
    """Return the share of calls and of work that some kinds are."""
    parts = [sum(row[name] for row in rows) for name in ("calls", "operations")]
    return f"{_ratio(parts[0], calls)} of the calls, {_ratio(parts[1], work)} of the work"


def _unproven(table: Mapping[str, Any]) -> Iterator[str]:
    for name, result in _of(_of(table, "sensors"), "self_tests").items():
        if result != "seen":
            yield f"what {name} is to see (its self-test: {result})"


# -- words -----------------------------------------------------------------------------------------------------------


def _of_plan(plan: Plan) -> str:
    if not plan.every:
        return "No step is deep. Harmful faults, as bench/detect.py measured; 'once': in one step only, 'stays': steps."
    share = "every product" if plan.one_in == 1 else f"one product in {plan.one_in}"
    deep = f"One step in {plan.every} is deep and checks {share}"
    deep += "" if plan.measured else ", at the least: this price is not measured yet"
    return (
        f"{deep}. Harmful faults, recall as bench/detect.py measured. 'once': seen at all, if in one step only; 'stays': steps "
        "until it is seen."
    )


def _steps_until(one: Expected) -> str:
    if not math.isfinite(one.steps):
        return f"1; {_share(1 - one.light)} never" if one.light else "never"
    return f"{one.steps:.3g}"


def _share(share: float) -> str:
    percents = 100 * share
    return f"{percents:.0f} %" if percents > 99.5 or percents < 0.05 else f"{percents:.2g} %"


def _ratio(part: float, whole: float) -> str:
    if not whole:
        return "0 %"
    percents = 100 * part / whole
    if 0 < percents < 0.1:
        return "under 0.1 %"
    return f"{percents:.0f} %" if percents >= 1 or not part else f"{percents:.1f} %"


def _of(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = table.get(name)
    return found if isinstance(found, Mapping) else {}


def lines_of(tables: Sequence[Table]) -> list[str]:
    """Return several tables for a terminal."""
    return [line for one in tables for line in one.lines()]
