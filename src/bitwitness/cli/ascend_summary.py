"""``bitwitness ascend summary``: all overflows below a dump path, the earliest first."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitwitness.cli.options import add_json, add_quiet, answer
from bitwitness.errors import EXIT_FINDINGS, EXIT_UNREAD, UsageError

if TYPE_CHECKING:
    from bitwitness.store.ascend.summary import Overflow, Summary

_CODES = {"fine": 0, "findings": EXIT_FINDINGS, "unread": EXIT_UNREAD}
_EVERY = 20_000  # files between two words of progress
_SHOWN = 50  # overflows on the terminal, unless --all is given
_ADVICE = (
    "To do: look at that operator first (bitwitness ascend convert -d FILE turns its dump into arrays); run it in a wider "
    "dtype, or make its inputs smaller. Later overflows often follow from the first"
)


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "summary",
        help="all overflows below a dump path, decoded, the earliest first",
        description="Walks a dump path with all its timestamp and device folders, decodes the overflow records, and finds each "
        "one's operator among the dumps beside it or, with --log, in a runtime log.",
    )
    parser.add_argument("path", metavar="DUMP_PATH", help="the dump path, or any folder below it")
    parser.add_argument("--log", metavar="PATH", help="a runtime log of level INFO, or a folder of them")
    add_json(parser, "all as JSON; '-', the default, prints it")
    add_quiet(parser)
    parser.add_argument("--all", action="store_true", help=f"show all overflows, not the first {_SHOWN}")
    parser.add_argument("-o", "--out", metavar="DIR", help="write summary.json and summary.txt there, too")
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Sum up; return the exit code."""
    from bitwitness.store.ascend.summary import find_in_logs, summarise

    for value, what in ((args.path, "the dump path"), (args.log, "--log"), (args.out, "--out")):
        if value == "":
            raise UsageError(f"{what} is empty; name a folder")
    mode = os.environ.get("INF_NAN_MODE_ENABLE", "").strip()
    if args.json != "-" and not args.quiet:
        print(_mode(mode))
    with _progress() as tick:
        summary = summarise(Path(args.path), tick)
    if args.log is not None:
        summary.overflows = find_in_logs(Path(args.log), summary.overflows, summary.damaged.append)
    for message in summary.damaged:
        sys.stderr.write(f"bitwitness: {message}\n")
    result = {"inf_nan_mode": mode or None, "path": str(args.path), **summary.to_dict()}
    shown = summary.overflows if args.all else summary.overflows[:_SHOWN]
    text = _text(summary, shown)
    answer(args, lambda: result, lambda: print(text))
    if args.out is not None:
        _write(Path(args.out), result, text)
    return _CODES[summary.status]


def _mode(value: str) -> str:
    if value == "0":
        return (
            "INF_NAN_MODE_ENABLE = 0 here: saturation. Inf became the dtype's largest number and NaN became 0; a search for "
            "Inf and NaN in dumped tensors sees nothing, the records below do"
        )
    shown = f"INF_NAN_MODE_ENABLE = {value[:40]}" if value else "INF_NAN_MODE_ENABLE is not set (1 by default)"
    return f"{shown} here: an overflow shows as Inf, an undefined result as NaN"


@contextmanager
def _progress() -> Iterator[Callable[[int], None]]:
    """Show how many files were seen: a bar on a terminal, a line now and then in a log."""
    if not sys.stderr.isatty():
        told = 0

        def tell(count: int) -> None:
            nonlocal told
            if count >= told + _EVERY:
                told = count
                sys.stderr.write(f"bitwitness: {count} files seen\n")

        yield tell
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.completed:.0f} files seen"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("files", total=None)
        yield lambda count: progress.update(task, completed=count)


def _text(summary: Summary, shown: list[Overflow]) -> str:
    if not summary.overflows:
        if not summary.files:
            return "there are no files: nothing was looked at"
        if not summary.known:
            return (
                f"none of the {summary.files} files is a dump or an overflow record by its name: is this a dump path?"
            )
        if summary.damaged:
            return f"no overflow in {summary.files} files, but NOT ALL were read: {len(summary.damaged)} problems (named above)"
        return f"no overflow in {summary.files} files"
    first = summary.overflows[0]
    lines = [_table(shown), ""]
    if len(shown) < len(summary.overflows):
        lines.append(
            f"{len(summary.overflows) - len(shown)} later ones are not shown (--all shows them, --json has them)"
        )
    dump = f"; its dump: {first.file.parent / first.operator_file}" if first.operator_file else ""
    log = f"; log: {first.log.file}:{first.log.line}: {first.log.text[:200]}" if first.log else ""
    lines.append(
        f"{len(summary.overflows)} overflows in {summary.files} files. The earliest, iteration {first.place.iteration}: "
        f"{first.what} on {first.record.unit}: {first.record.decoded.text}{dump}{log}"
    )
    lines.append(_ADVICE)
    return "\n".join(lines)


def _table(overflows: list[Overflow]) -> str:
    from io import StringIO

    from rich.console import Console
    from rich.table import Table

    names = ("iteration", "time/device", "model", "unit", "stream", "task", "block", "status", "cause", "operator")
    table = Table(*names, box=None, pad_edge=False)
    for overflow in overflows:
        record, place = overflow.record, overflow.place
        model = "/".join(part for part in (place.model_name, str(record.number("model_id"))) if part)
        block = "" if overflow.block is None else str(overflow.block)
        numbers = (str(record.number("stream_id")), str(record.number("task_id")), block, hex(record.number("status")))
        where = f"{place.time}/{place.device}"
        table.add_row(str(place.iteration), where, model, record.unit, *numbers, record.decoded.text, overflow.what)
    width = 200 if not sys.stdout.isatty() else None
    console = Console(file=StringIO(), width=width, markup=False, highlight=False)
    console.print(table)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines())


def _write(folder: Path, result: dict[str, Any], text: str) -> None:
    from bitwitness.files.writing import target_of, write_text

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}; give another folder with -o") from error
    for name, content in (("summary.json", json.dumps(result, indent=2)), ("summary.txt", text)):
        write_text(target_of(folder / name), content + "\n")
