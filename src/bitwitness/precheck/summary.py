"""A pre-check in a few lines for the terminal: what is wrong first, then what nobody knows; and the exit code."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from bitwitness.errors import EXIT_FINDINGS, EXIT_UNREAD
from bitwitness.files.shown import shown
from bitwitness.trial.result import CRASH, ERROR, FAIL, NOT_JUDGED, PASS, TIMEOUT, WARN, CaseResult, OutputResult

VERDICTS = (FAIL, CRASH, TIMEOUT, ERROR, WARN, NOT_JUDGED, PASS)
"""The worst first."""
JUDGED, LOST = (FAIL, WARN, PASS), (CRASH, TIMEOUT, ERROR)
_TOLD = (FAIL, CRASH, TIMEOUT, ERROR, WARN)
_NAMED = 6  # operators that were not judged for one reason
_NUMBER = re.compile(r"-?\d[\d.,]*(e[+-]?\d+)?", re.IGNORECASE)


def summarize(results: Sequence[CaseResult], most: int = 20) -> list[str]:
    """Return the lines of a summary, fit for a terminal.

    Parameters
    ----------
    results
        In any order.
    most
        Groups of cases (of one operator, dtype and reason) that are told of each kind; those beyond are counted.

    """
    lines = [headline(results)]
    groups: dict[tuple[str, str, str, str], list[CaseResult]] = {}
    for one in sorted(results, key=lambda case: VERDICTS.index(case.verdict)):
        if one.verdict in _TOLD:
            groups.setdefault((one.verdict, one.operator, one.dtype, _kind(one.reason)), []).append(one)
    for cases in list(groups.values())[:most]:
        lines += _told(cases)
    lines += _more(list(groups.values())[most:])
    unjudged = Counter(_kind(one.reason) for one in results if one.verdict == NOT_JUDGED)
    first = {_kind(one.reason): one.reason for one in reversed(results) if one.verdict == NOT_JUDGED}
    for kind, count in unjudged.most_common(most):
        whose = sorted({one.operator for one in results if one.verdict == NOT_JUDGED and _kind(one.reason) == kind})
        named = ", ".join(map(shown, whose[:_NAMED])) + (
            f" and {len(whose) - _NAMED} others" if len(whose) > _NAMED else ""
        )
        lines.append(f"not judged, {_cases(count)}: {shown(first[kind]) or 'no reason was given'} ({named})")
    if len(unjudged) > most:
        count = sum(count for _, count in unjudged.most_common()[most:])
        lines.append(f"… and {count} more, not judged for {len(unjudged) - most} other reasons")
    if (calls := sum(one.calls for one in results)) > len(results):
        lines.append(f"of {calls} calls those alike were tried once, the first of them (--every-call: each)")
    return lines


def headline(results: Sequence[CaseResult]) -> str:
    """Return the conclusion in one sentence: never an all-clear where nothing was judged or something was lost."""
    count = count_of(results)
    judged, lost = (sum(count[verdict] for verdict in which) for which in (JUDGED, LOST))
    also = [
        f"{count[verdict]} {word}"
        for verdict, word in (
            (CRASH, "crashed"),
            (TIMEOUT, "timed out"),
            (ERROR, "raised an error"),
            (NOT_JUDGED, "could not be judged"),
        )
        if count[verdict]
    ]
    rest = f"; {', '.join(also)}" if also else ""
    if not judged:
        return f"No case was judged, so nothing is known of any operator{rest or '; there was no case'}."
    warned = (
        f", {count[WARN]} of them less carefully than {'it' if count[WARN] == 1 else 'they'} should"
        if count[WARN]
        else ""
    )
    if count[FAIL]:
        operators = len({one.operator for one in results if one.verdict == FAIL})
        said = f"Wrong numbers: {count[FAIL]} of {_cases(judged, 'judged')} failed, in {_many(operators, 'operator')}"
        return f"{said}{f', and {count[WARN]} passed with a warning' if count[WARN] else ''}{rest}."
    if lost:
        return f"Not everything is known: {_cases(judged, 'judged')} passed{warned}{rest}."
    return f"{_cases(judged, 'judged')} passed{warned}{rest}."


def exit_code(results: Sequence[CaseResult]) -> int:
    """Return 1 where a case failed; 3 where none was judged, or some crashed, timed out or raised; else 0."""
    count = count_of(results)
    if count[FAIL]:
        return EXIT_FINDINGS
    lost = any(count[verdict] for verdict in LOST)
    return EXIT_UNREAD if lost or not any(count[verdict] for verdict in JUDGED) else 0


def count_of(results: Sequence[CaseResult]) -> dict[str, int]:
    """Return how many cases have each verdict, the worst verdict first, those that none has included."""
    found = Counter(one.verdict for one in results)
    return {verdict: found[verdict] for verdict in VERDICTS}


def worst_output(case: CaseResult) -> OutputResult | None:
    """Return the output that the case's verdict rests on: of the worst verdict and, among those, the largest ratio."""
    order = {verdict: number for number, verdict in enumerate(VERDICTS)}
    return min(case.outputs, key=lambda one: (order[one.verdict], -one.ratio), default=None)


def _told(cases: list[CaseResult]) -> Iterator[str]:
    """Tell of cases of one operator, dtype and kind of reason, of which the one with the largest ratio stands for all."""
    one = max(cases, key=lambda case: max((output.ratio for output in case.outputs), default=0.0))
    what = f"{shown(one.operator)} [{shown(one.dtype)}]"
    yield f"{one.verdict.upper()} {what}, {_cases(len(cases))}: {shown(one.reason) or 'no reason was given'}"
    output = worst_output(one)
    plain = output is None or one.verdict in LOST or not output.allowed  # another standard tells no single element
    said = "" if plain or output is None else f", {_element(output)}"
    yield f"  worst: {shown(one.name)}{said}" if len(cases) > 1 else f"  case {shown(one.name)}{said}"
    if one.reproducer:
        yield f"  run it alone: python {shown(one.reproducer)}"


def _element(output: OutputResult) -> str:
    off = f"{output.value:.9g}, expected {output.expected:.9g}, may be off by {output.allowed:.3g}"
    return f"{shown(output.slot)}{list(output.at) if output.at else ''} is {off} ({output.ratio:.3g} times that)"


def _more(groups: list[list[CaseResult]]) -> Iterator[str]:
    if groups:
        found = Counter(one.verdict for cases in groups for one in cases)
        yield f"… and {sum(found.values())} more: " + ", ".join(
            f"{count} {verdict}" for verdict, count in found.items()
        )


def _kind(reason: str) -> str:
    """Return a reason without its numbers, so that those of one kind are told together."""
    return _NUMBER.sub("#", reason[:1000])


def _cases(count: int, what: str = "") -> str:
    return _many(count, f"{what} case".strip())


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"
