"""``bitwitness compare A B`` where both are monitored runs: their series, held against each other."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from bitwitness.errors import EXIT_FINDINGS, EXIT_UNREAD, UsageError
from bitwitness.files.shown import shown

_CODES = {"fine": 0, "findings": EXIT_FINDINGS, "unread": EXIT_UNREAD}
_SHOWN = 10
_NOT_HERE = ("csv", "xlsx", "steps", "ranks", "map", "propose_map")


def are_monitored(a: str, b: str) -> bool:
    """Tell whether both folders hold series, and not both a recording, which says more."""
    from bitwitness.store.monitored import is_monitored
    from bitwitness.store.run import is_recording

    try:
        return bool(is_monitored(a) and is_monitored(b)) and not (is_recording(Path(a)) and is_recording(Path(b)))
    except (OSError, ValueError):  # no folders: the recordings' own reader says what is wrong
        return False


def run_monitored(args: argparse.Namespace) -> int:
    """Compare; return the exit code."""
    from bitwitness.cli.options import write_json
    from bitwitness.monitor.compare import compare_monitored

    for name in _NOT_HERE:
        if getattr(args, name, None) is not None:
            raise UsageError(f"--{name.replace('_', '-')} is for recordings, and {shown(args.a)} holds series")
    report = compare_monitored(args.a, args.b)
    told = report.to_dict()
    if args.json == "-":
        print(json.dumps(_plain(told), indent=1, allow_nan=False))
        return _CODES[report.status]
    if args.json is not None:
        write_json(_plain(told), args.json)
    if not args.quiet:
        _show(report)
    return _CODES[report.status]


def _show(report: object) -> None:
    from bitwitness.monitor.compare import MonitorReport

    assert isinstance(report, MonitorReport)  # noqa: S101 - for the type checker
    print(shown(report.conclusion))
    print(f"A: {shown(report.a)}   B: {shown(report.b)}   {report.steps} steps, {report.series} series")
    for one in report.first[:_SHOWN]:
        print(
            f"rank {one.rank}, {one.kind}: first at step {one.step}, {shown(one.name)}: {one.change:+.3g}, "
            f"at most {one.worst:.3g}, {one.steps} steps"
        )
    for trend in [t for t in report.trends if abs(t.a - t.b) > 0.5][:_SHOWN]:
        print(
            f"rank {trend.rank}, {shown(trend.name)}: goes with the total gradient by {trend.a:+.2f} in A, {trend.b:+.2f} in "
            f"B; its share {trend.share_a:.2%}, {trend.share_b:.2%}"
        )
    for problem in report.problems[:_SHOWN]:
        print(f"not read: {shown(problem)}")


def _plain(value: object) -> object:
    from bitwitness.finding import to_jsonable

    return to_jsonable(value)
