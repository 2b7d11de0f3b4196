"""``bitwitness precheck RUN``, ``bitwitness precheck --suite opinfo``: every operator on trial."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from bitwitness.cli.options import add_json, add_quiet, answer
from bitwitness.cli.progress import progress_bar
from bitwitness.errors import UsageError

_CASES = 8  # recorded cases that one process tries after another, before it is asked for the next
_SAID = "precheck.json"
_FILES = ("results.csv", "results.json", "junit.xml", "report.html")


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "precheck",
        help="every operator of a recording, or of PyTorch, against float64",
        description="Runs every operator call of RUN (a recording of ours, or a folder that msprobe recorded), forward and "
        "backward, on the device and in float64 on the CPU, and judges whether the device computes what its dtype allows. Exit "
        "code 0: all that was judged passed; 1: an operator computes wrongly, and is named; 3: nothing could be judged, or "
        "something crashed.",
    )
    parser.add_argument("run", metavar="RUN", nargs="?", help="a recording (bitwitness record, msprobe)")
    parser.add_argument("--suite", choices=["opinfo"], help="instead: PyTorch's own sample inputs of its operators")
    parser.add_argument(
        "--only", metavar="GLOB", action="append", default=[], help="only these operators; may be repeated"
    )
    parser.add_argument(
        "--dtypes", metavar="A,B", help="with --suite: float32,bfloat16,float16 by default; all for every one"
    )
    parser.add_argument(
        "--samples", metavar="N", type=int, default=0, help="with --suite: at most N of an operator and dtype (0: all)"
    )
    parser.add_argument("--every-call", action="store_true", help="with RUN: calls that are alike are tried each, too")
    parser.add_argument("--device", default="cpu", help="the device on trial: cpu (default), cuda, npu:0, …")
    parser.add_argument("--standard", default="model", help="model (default), or another tool's rules: see the guide")
    parser.add_argument("-o", "--out", metavar="DIR", default="precheck", help="where results go (default: precheck)")
    parser.add_argument("--overwrite", action="store_true", help="where DIR holds another pre-check, delete that first")
    parser.add_argument(
        "--jobs", metavar="N", type=int, default=0, help="processes (0, the default: one, or as many as CPUs for cpu)"
    )
    parser.add_argument(
        "--timeout", metavar="S", type=float, default=120.0, help="seconds after which a case is stopped"
    )
    add_json(parser, "everything as JSON; '-', the default, prints it instead of the summary")
    add_quiet(parser)
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Run the pre-check; return the exit code."""
    from bitwitness.precheck.attempt import Terms
    from bitwitness.precheck.runner import run_groups
    from bitwitness.precheck.summary import exit_code, summarize
    from bitwitness.precheck.tables import told

    if (args.run is None) == (args.suite is None):
        raise UsageError(
            "expected a RUN to take operators from, or --suite opinfo for PyTorch's own; give one of the two"
        )
    _check(args)
    groups = _groups(args)
    if not groups:
        raise UsageError(f"{args.run or args.suite} holds no operator call{_chosen(args)}; nothing was tried")
    out = _folder(args)
    terms = Terms(args.device, args.standard, str(out / "reproducers"))
    jobs = args.jobs or ((os.cpu_count() or 1) if args.device == "cpu" else 1)
    with progress_bar("operators") as progress:
        count = 0

        def heard(_: Any) -> None:
            nonlocal count
            count += 1
            progress(count, len(groups))

        results = run_groups(
            groups,
            terms,
            done=out / "results.jsonl",
            processes=min(jobs, len(groups)),
            seconds=args.timeout,
            heard=heard,
        )
    _write(out, results, str(args.run or f"PyTorch's operators ({args.suite})"))
    code = exit_code(results)
    files = [*_FILES, *(["reproducers/"] if (out / "reproducers").is_dir() else [])]
    answer(args, lambda: told(results), lambda: print("\n".join([*summarize(results), f"{out}: {', '.join(files)}"])))
    return code


def _check(args: argparse.Namespace) -> None:
    """Raise UsageError for a device that is not there, and for a standard that is none."""
    from bitwitness.cli.usable import usable
    from bitwitness.precheck.attempt import MODEL
    from bitwitness.trial.standards import STANDARDS

    if args.standard != MODEL and args.standard not in STANDARDS:
        raise UsageError(
            f"there is no standard {args.standard!r}; expected one of {', '.join((MODEL, *sorted(STANDARDS)))}"
        )
    for name, value, least in (
        ("--jobs", args.jobs, 0),
        ("--samples", args.samples, 0),
        ("--timeout", args.timeout, 1),
    ):
        if value < least:
            raise UsageError(f"{name} {value:g} is too little; expected {least} or more")
    usable(args.device)


def _groups(args: argparse.Namespace) -> list[dict[str, Any]]:
    import torch

    if args.suite is not None:
        from bitwitness.precheck.suite import DTYPES, groups

        dtypes = args.dtypes.split(",") if args.dtypes else DTYPES
        found = groups(args.only, dtypes, torch.device(args.device))
        return [{**g, "key": f"{g['operator']}[{g['dtype']}]", "most": args.samples} for g in found]
    from bitwitness.precheck.sources import run_cases

    cases = [c.as_dict() for c in run_cases(args.run, only=args.only, alike=not args.every_call)]
    parts = [cases[i : i + _CASES] for i in range(0, len(cases), _CASES)]
    return [{"key": part[0]["name"] + f" +{len(part) - 1}", "kind": "cases", "cases": part} for part in parts]


def _chosen(args: argparse.Namespace) -> str:
    return f" that is {' or '.join(args.only)}" if args.only else ""


def _folder(args: argparse.Namespace) -> Path:
    """Return the folder of results, made; a pre-check of the same that was stopped goes on there."""
    import shutil

    from bitwitness.files.writing import write_text

    out = Path(args.out)
    same = {
        n: getattr(args, n) for n in ("run", "suite", "only", "dtypes", "samples", "every_call", "device", "standard")
    }
    text = json.dumps(same, sort_keys=True)
    said = out / _SAID
    if args.overwrite and said.is_file():
        shutil.rmtree(out)
    if said.is_file() and said.read_text() != text:
        raise UsageError(
            f"{out} holds a pre-check of something else; name another folder with --out, or give --overwrite"
        )
    if out.exists() and not said.is_file() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} is there and holds no pre-check; name another folder with --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_text(said, text)
    except OSError as error:
        raise UsageError(f"{out} cannot be made: {error.strerror or error}; name another folder with --out") from error
    return out


def _write(out: Path, results: list[Any], title: str) -> None:
    from bitwitness.files.writing import write_text
    from bitwitness.precheck.junit import write_junit
    from bitwitness.precheck.tables import write_csv, write_json
    from bitwitness.report.prechecked import precheck_page

    write_csv(out / "results.csv", results)
    write_json(out / "results.json", results)
    write_junit(out / "junit.xml", results)
    try:
        page = precheck_page(results, title)
    except UsageError:  # the report's templates are an extra
        page = "<p>Install bitwitness[report] for this page; results.json holds all.</p>\n"
    write_text(out / "report.html", page)
