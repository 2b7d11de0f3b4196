"""The report as one HTML file that opens offline and asks nobody for anything.

All text goes through Jinja2's autoescape, all data through `embedded`. The page's own policy (Content-Security-Policy) lets
no script run but the three that are in it, by their hashes, and no request leave.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

from bitwitness.errors import UsageError
from bitwitness.report.assets import asset, marked, policy, templates
from bitwitness.report.build import Report
from bitwitness.report.clean import number, text
from bitwitness.version import __version__

_SIGN = {"fine": "✔", "findings": "✘", "unread": "?"}
_ESCAPES = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&'\u2028\u2029"}
_OWN = ("common.js", "timeline.js", "heatmap.js", "tree.js", "graph.js", "table.js", "main.js")


def check_jinja() -> None:
    """Say before the work, and not after it, that no page can be made; raises `UsageError`."""
    if find_spec("jinja2") is None:
        raise UsageError(
            "the report as HTML needs Jinja2: pip install 'bitwitness[report]'; or use --markdown or --json"
        )


def to_html(report: Report) -> str:
    """Return a report as a page; raises `UsageError` where Jinja2 is not installed."""
    check_jinja()
    environment = templates()
    environment.filters |= {"short": lambda value: text(value, 400), "figure": number}
    scripts = _scripts(report.charts)
    style = asset("static", "report.css")
    page: str = environment.get_template("report.html.j2").render(
        story=report.story,
        charts=report.charts,
        comparison=report.comparison,
        beside=report.beside,
        look="unread" if report.story.attention else report.story.status,
        sign="!" if report.story.attention else _SIGN[report.story.status],
        word=report.story.word,
        version=__version__,
        policy=policy(scripts, style),
        style=marked(style),
        scripts=[marked(script) for script in scripts],
        data=marked(embedded(report.charts)),
    )
    return page


def embedded(data: Any) -> str:
    """Return data as JSON that cannot end the element that it stands in, nor a line of a script."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).translate(_ESCAPES)


def _scripts(charts: dict[str, Any]) -> list[str]:
    """Return the page's scripts: libraries only where there is something for them to draw."""
    found = []
    if charts.get("timeline", {}).get("lines"):
        found.append(asset("vendor", "echarts.min.js"))
    if "graph" in charts:
        found.append(asset("vendor", "dagre.min.js").rpartition("\n//# sourceMappingURL=")[0])
    return [*found, "\n".join(asset("static", name) for name in _OWN)]
