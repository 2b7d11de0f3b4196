"""``bitwitness compare A B``: where two runs part, in one line; and the whole table."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bitwitness.cli.options import add_json, add_quiet
from bitwitness.cli.progress import progress_bar
from bitwitness.errors import EXIT_FINDINGS, EXIT_UNREAD
from bitwitness.files.shown import harmless

_SHOWN = 10  # places on the terminal: the first ones matter, the rest follow from them; the CSV has all
_CODES = {"fine": 0, "findings": EXIT_FINDINGS, "unread": EXIT_UNREAD}
_WIDTH = 110  # columns where no terminal says its own: a place and its figures fit one line


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "compare",
        help="the first operator at which two recorded runs part",
        description="Compares two recordings (run folders, msprobe's dump folders, Ascend dump folders), two monitored runs, "
        "or with --checkpoints two checkpoints. Exit code 0: no operator made an error; 1: one did, and is named; 3: not "
        "everything could be read or compared, or the two share too little.",
    )
    parser.add_argument("a", metavar="A", help="a recording")
    parser.add_argument("b", metavar="B", help="the one to compare with: the benchmark, where there is one")
    add_json(parser, "everything as JSON; '-', the default, prints it without the table")
    add_quiet(parser)
    parser.add_argument("--csv", metavar="FILE", help="write the table, a row for each compared value")
    parser.add_argument("--xlsx", metavar="FILE", help="the same as a spreadsheet (needs XlsxWriter)")
    parser.add_argument("--steps", metavar="A-B,C", help="only these steps")
    parser.add_argument("--ranks", metavar="A-B,C", help="only these ranks")
    parser.add_argument(
        "--map", metavar="FILE", help="JSON object of module paths: A's name to B's; '*' stands for any part"
    )
    parser.add_argument("--propose-map", metavar="FILE", help="write such a file, from the two structures, and stop")
    parser.add_argument("--checkpoints", action="store_true", help="A and B are checkpoints (safetensors, torch DCP)")
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Compare; return the exit code."""
    if args.checkpoints:
        from bitwitness.cli.checkpoints import refuse, run

        refuse(args)
        code: int = run(args.a, args.b, args.json, args.csv, quiet=args.quiet)
        return code
    from bitwitness.cli.compare_monitored import are_monitored, run_monitored

    if are_monitored(args.a, args.b):
        return run_monitored(args)
    from bitwitness.comparison.beside import compare_processes
    from bitwitness.comparison.matching.renamed import proposed, read_map
    from bitwitness.comparison.table import rows_of
    from bitwitness.store.opening import open_source

    if args.propose_map is not None:
        return _propose(proposed(open_source(args.a), open_source(args.b)), args.propose_map)
    outputs = _outputs(args)
    modules = read_map(Path(args.map)) if args.map is not None else None
    with _tables(outputs) as tables, progress_bar("steps") as progress:

        def sink(*step: Any) -> None:
            for cells in rows_of(*step):
                for table in tables:
                    table.add(cells)

        sinks = [sink] if tables else []
        asked = {"modules": modules, "ranks": args.ranks, "steps": args.steps}
        report, others = compare_processes(args.a, args.b, **asked, sinks=sinks, progress=progress)
        earlier = others.earlier(report)
        conclusion = "; ".join(filter(None, (earlier, report.conclusion)))
        told = report.to_dict() | others.to_dict() | {"status": others.worst(report.status), "conclusion": conclusion}
        for table in tables:
            table.finish(told)
    if args.json == "-":
        print(json.dumps(told, indent=1, allow_nan=False))
    elif not args.quiet:
        _show_all(report, earlier, others.lines())
    return _CODES[told["status"]]


def _show_all(report: Any, earlier: str, others: Sequence[str]) -> None:
    """Print what was found of one model, and a line for each of the others: ``earlier`` before it, which parts before."""
    print(f"{harmless(earlier)}\n" * bool(earlier), end="")
    _show(report)
    print("".join(f"{harmless(line)}\n" for line in others if line != earlier), end="")


@contextmanager
def _tables(outputs: dict[str, Path]) -> Iterator[list[Any]]:
    """Open a table for each file that was asked for; they bear their names when all is written, and none if not."""
    from bitwitness.comparison.table import KINDS
    from bitwitness.files.writing import new_file

    with ExitStack() as stack:
        yield [
            kind(stack.enter_context(new_file(outputs[name], binary=kind.binary)))
            for name, kind in KINDS.items()
            if name in outputs
        ]


def _outputs(args: argparse.Namespace) -> dict[str, Path]:
    """Return the files to be written, by option, checked before the work; not what goes to standard output."""
    from bitwitness.comparison.table import check_xlsx
    from bitwitness.files.writing import distinct, target_of

    if args.xlsx is not None:
        check_xlsx()
    named = {f"--{name}": getattr(args, name) for name in ("json", "csv", "xlsx")}
    distinct(named)
    return {option[2:]: target_of(path, option) for option, path in named.items() if path is not None and path != "-"}


def _propose(modules: dict[str, str], path: str) -> int:
    from bitwitness.files.writing import target_of, write_text

    write_text(target_of(path, "--propose-map"), json.dumps(modules, indent=1) + "\n")
    print(f"{len(modules)} modules of A have another name in B: {path}; check it, and give it with --map")
    return 0


def _show(report: Any) -> None:

    print(harmless(report.conclusion))
    if report.first is not None:
        _show_suspects(report)
    print(f"A: {report.a}   B: {report.b}")
    for note in report.notes:
        print(harmless(note))
    rounding = f"; rounding in single operators: up to {report.noise:.2g}" if report.noise else ""
    print(f"{report.rows} values of {report.steps} steps compared; {report.differing} differ{rounding}")
    if report.merged:
        print("the runs are spread differently over ranks: all ranks of each were put together, operators left out")
    for old, new in list(report.modules.items())[:3]:
        print(
            f"renamed: {harmless(old)} in A is {harmless(new)} in B (of {len(report.modules)}; --propose-map writes all)"
        )
    for side, sites in (("A", report.only_a), ("B", report.only_b)):
        if sites:
            print(f"only in {side}: {len(sites)} operators: {_some(sites)}")
    for ours, theirs in report.groups[:3]:
        print(f"equivalent: {_some(ours)} in A ({len(ours)}), {_some(theirs)} in B ({len(theirs)})")
    for problem in report.problems[:_SHOWN]:
        print(f"not read: {harmless(problem)}")
    if len(report.problems) > _SHOWN:
        print(f"… and {len(report.problems) - _SHOWN} more")


def _some(sites: Sequence[str]) -> str:
    """Return the first of some sites: a loop that is written out has thousands, and --json tells all."""
    return ", ".join(map(harmless, sites[:4])) + ", …" * (len(sites) > 4)


def _show_suspects(report: Any) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if report.first.line:
        print(f"called at {harmless(report.first.line)}")
    if report.parting is not None and report.parting.site != report.first.site:
        print(f"first whose inputs agree and result does not: {harmless(report.parting.site)}")
    places = {one.site: one for one in reversed(report.suspects)}  # each once: where it ranks highest
    times = Counter(one.site for one in report.suspects)
    ranked = sorted(places.values(), key=report.suspects.index)
    table = Table(title=f"suspects ({len(ranked)} places)", title_justify="left")
    for name in ("step", "rank", "site", "reason", "change", "x rounding", "times"):
        table.add_column(name, justify="left" if name in ("site", "reason") else "right")
    for one in ranked[:_SHOWN]:
        numbers = f"{one.change:.3g}", f"{one.score:.3g}", str(times[one.site])
        table.add_row(str(one.step), str(one.rank), Text(harmless(one.site)), one.reason, *numbers)
    Console(width=None if sys.stdout.isatty() else _WIDTH).print(table)
