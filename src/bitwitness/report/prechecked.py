"""A pre-check's results as one HTML file that opens offline and asks nobody for anything: the verdict first."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from bitwitness.precheck.summary import LOST, VERDICTS, count_of, exit_code, headline, worst_output
from bitwitness.report.assets import asset, marked, policy, templates
from bitwitness.report.clean import name, number, text
from bitwitness.report.page import check_jinja
from bitwitness.trial.result import FAIL, NOT_JUDGED, WARN, CaseResult, OutputResult
from bitwitness.version import __version__

_TOLD = 100  # cases that are told in full
_OUTPUTS = 20  # of one of them
_ROWS = 3000  # of the table
_REASONS = 50  # for which cases were not judged
_BARS = 80  # of a histogram: float64 has 65 buckets
_WIDE = 220  # of the longest bar, in the drawing's units
_SHORT = 400  # characters of a reason in the table
_LOOKS = {0: ("fine", "✔", "right"), 1: ("findings", "✘", "wrong"), 3: ("unread", "?", "not known")}


def precheck_page(results: Sequence[CaseResult], title: str) -> str:
    """Return the page; raises `UsageError` where Jinja2 is not installed.

    Names and reasons may come from anybody: they are escaped and cut. Beyond bounds (3000 rows, 100 cases told in full) the
    worst cases are on the page, and the others are counted.
    """
    check_jinja()
    worst_first = sorted(results, key=lambda case: (VERDICTS.index(case.verdict), -_ratio(case)))
    told = [case for case in worst_first if case.verdict in (FAIL, WARN, *LOST)]
    look, sign, word = _LOOKS[exit_code(results)]
    style, script = asset("static", "report.css") + asset("static", "precheck.css"), asset("static", "precheck.js")
    page: str = (
        templates()
        .get_template("precheck.html.j2")
        .render(
            title=name(title),
            headline=headline(results),
            look=look,
            sign=sign,
            word=word,
            counts=[(verdict, count) for verdict, count in count_of(results).items() if count],
            told=[_case(case) for case in told[:_TOLD]],
            told_more=max(len(told) - _TOLD, 0),
            unjudged=_unjudged(results),
            rows=[_row(case) for case in worst_first[:_ROWS]],
            rows_said=_rows_said(len(results)),
            version=__version__,
            policy=policy([script], style),
            style=marked(style),
            script=marked(script),
        )
    )
    return page


def _rows_said(count: int) -> str:
    said = f"{count} case{'s' * (count != 1)}, the worst first"
    return said if count <= _ROWS else f"{said}; {_ROWS} are on this page"


def _unjudged(results: Sequence[CaseResult]) -> list[tuple[str, int]]:
    """Return why cases were not judged, and how many each."""
    found = Counter(text(case.reason, _SHORT) for case in results if case.verdict == NOT_JUDGED)
    told = [(reason or "no reason was given", count) for reason, count in found.most_common(_REASONS)]
    if len(found) > _REASONS:
        told.append(("other reasons", sum(count for _, count in found.most_common()[_REASONS:])))
    return told


def _ratio(case: CaseResult) -> float:
    ratios = [math.inf if math.isnan(one.ratio) else one.ratio for one in case.outputs]
    return max(ratios, default=0.0)


def _shared(case: CaseResult, longest: int) -> dict[str, str]:
    return {
        "verdict": case.verdict,
        "name": name(case.name),
        "operator": name(case.operator),
        "dtype": name(case.dtype),
        "shapes": name(case.shapes),
        "calls": number(case.calls),
        "reason": text(case.reason, longest),
    }


def _row(case: CaseResult) -> dict[str, str]:
    ulp = max((one.ulp_max for one in case.outputs), default=0.0)
    judged = {"ratio": number(_ratio(case)), "ulp": number(ulp)} if case.outputs else {"ratio": "", "ulp": ""}
    return _shared(case, _SHORT) | judged


def _case(case: CaseResult) -> dict[str, Any]:
    first = worst_output(case)
    others = [one for one in case.outputs if one is not first]
    outputs = [_output(one) for one in ([] if first is None else [first, *others])[:_OUTPUTS]]
    return {**_shared(case, 2000), "reproducer": name(case.reproducer), "outputs": outputs}


def _output(one: OutputResult) -> dict[str, Any]:
    bars = _bars(one.ulp_histogram)
    return {
        "slot": name(one.slot),
        "verdict": one.verdict,
        "reason": text(one.reason),
        "facts": [
            ("result", f"{name(one.dtype)} {name(list(one.shape))}"),
            ("worst element", name(list(one.at))),
            ("value", _digits(one.value)),
            ("expected", _digits(one.expected)),
            ("may be off by", number(one.allowed)),
            ("is off by, times that", number(one.ratio)),
            ("largest distance in ULP", number(one.ulp_max)),
            ("L2 distance, relative", f"{number(one.euclidean)}, {number(one.relative)}"),
        ],
        "bars": bars,
        "bars_said": "; ".join(f"{bar['count']} at {bar['label']} ULP" for bar in bars),
    }


def _digits(value: float) -> str:
    """Return a number with as many digits as tell it from its neighbours in float64."""
    return repr(float(value))


def _bars(histogram: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return a histogram's bars from the nearest to the farthest bucket, the label being the bucket's upper end."""
    counts = {str(end): max(int(count), 0) for end, count in list(histogram.items())[:_BARS]}
    most = math.log1p(max(counts.values(), default=0))
    return [
        {
            "label": name(end) if end in ("0", "1") or _end(end) == math.inf else f"≤ {name(end)}",
            "count": number(count),
            "width": round(_WIDE * math.log1p(count) / most, 1) if most else 0,
            "beyond": _end(end) == math.inf,
        }
        for end, count in sorted(counts.items(), key=lambda pair: _end(pair[0]))
    ]


def _end(label: str) -> float:
    try:
        return float(label)
    except ValueError:
        return math.inf
