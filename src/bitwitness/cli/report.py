"""``bitwitness report RUN``: the verdict, what to do and the evidence, as one HTML file, Markdown and JSON."""

from __future__ import annotations

import argparse
from typing import Any

from bitwitness.cli.options import add_quiet
from bitwitness.cli.progress import progress_bar
from bitwitness.errors import EXIT_FINDINGS, EXIT_UNREAD, UsageError

_CODES = {"fine": 0, "findings": EXIT_FINDINGS, "unread": EXIT_UNREAD}
_PAGE = "report.html"


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "report",
        help="a report to hand on: the verdict, what to do, the evidence",
        description="Makes one HTML file that opens offline. Two recordings are compared, the second being the one to compare "
        "with. Exit code as status and compare: 0 fine, 1 something was found, 3 not everything was looked at.",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run folders: what --out named")
    parser.add_argument(
        "-o", "--out", metavar="FILE", help=f"the page (default {_PAGE}, where no other form is asked for)"
    )
    parser.add_argument("--markdown", metavar="FILE", help="the same story for a ticket; '-' prints it")
    parser.add_argument("--json", metavar="FILE", help="the same for a machine; '-' prints it")
    add_quiet(parser)
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Make it; return the exit code."""
    from bitwitness.files.writing import distinct, target_of, write_text
    from bitwitness.report.build import build_report
    from bitwitness.report.markdown import to_markdown
    from bitwitness.report.page import check_jinja, to_html

    page = args.out or (_PAGE if args.markdown is None and args.json is None else None)
    if page == "-":
        raise UsageError("--out -: the page is a file of some megabytes; name it, or print --markdown - or --json -")
    named = {"--out": page, "--markdown": args.markdown, "--json": args.json}
    distinct(named)
    targets = {option: target_of(path, option) for option, path in named.items() if path is not None and path != "-"}
    if page is not None:
        check_jinja()
    with progress_bar("steps") as progress:
        report = build_report(args.runs, progress)
    makers = {"--out": to_html, "--markdown": to_markdown, "--json": _json}
    for option, path in named.items():
        if option in targets:
            write_text(targets[option], makers[option](report))
        elif path == "-":
            print(makers[option](report), end="")
    if not args.quiet and "-" not in named.values():
        written = ", ".join(str(named[option]) for option in targets)
        print(f"{report.story.headline}\nwritten: {written}")
    return _CODES[report.story.status]


def _json(report: Any) -> str:
    import json

    return json.dumps(report.to_dict(), indent=1, allow_nan=False) + "\n"
