"""The command line. ``--help`` answers without importing torch; each verb imports what it needs when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bitwitness.cli import (
    alerts,
    ascend,
    checkpoint,
    compare,
    completion,
    demo,
    diff_env,
    doctor,
    launch,
    monitor,
    precheck,
    quarantine,
    record,
    report,
    run,
    status,
    stress,
    trace,
    verify_op,
    view,
)
from bitwitness.cli.exitcode import CODES, ended, flushed, shown_streams
from bitwitness.cli.script import torch_lacks, unusable
from bitwitness.errors import UsageError
from bitwitness.files.shown import say
from bitwitness.version import __version__

_RUNS = {"compare": 2, "checkpoint": 2}
"""How many runs a verb wants, where that is not one."""
_SCRIPTS = frozenset({"run", "trace", "record", "monitor"})
"""Verbs in whose process a script runs: its signals, streams and errors are its own."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments; what a verb does not know is that verb's error, with its usage."""
    top, verbs = parsers()
    args, unknown = top.parse_known_args(_json_alone(sys.argv[1:] if argv is None else argv))
    if unknown:
        verbs[args.verb].error(f"unrecognized arguments: {' '.join(unknown)}")
    return args


def _json_alone(argv: Sequence[str]) -> list[str]:
    """Return the arguments with ``--json RUN`` read as it is meant: a folder is no file that JSON could be written into."""
    found = list(argv)
    if found[:1] and found[0] in {*_SCRIPTS, "launch"}:  # what follows may be the script's own
        return found
    named = [one for one in found[1:] if not one.startswith("-")]
    wanted = _RUNS.get(found[0], 1) if found else 1
    if len(named) > wanted:  # the runs are there without it, and it is asked for as a file
        return found
    for place in reversed(range(len(found) - 1)):
        if found[place] == "--json" and "--" not in found[:place] and Path(found[place + 1]).is_dir():
            found.insert(place + 1, "-")
    return found


def parsers() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Return the parser of the command line, and that of each verb."""
    top = argparse.ArgumentParser(
        prog="bitwitness",
        description="Are the numbers of your training run true? Senses a wrong number, proves it by re-execution, names the "
        "rank, device, operator and line, heals or stops.",
        epilog="Exit codes: "
        + "; ".join(f"{code} {meaning}" for code, meaning in CODES)
        + ". 'run', 'trace', 'record' and 'monitor' otherwise pass the script's own code on.",
    )
    top.add_argument("--version", action="version", version=f"bitwitness {__version__}")
    verbs = top.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb in (
        run,
        launch,
        quarantine,
        status,
        alerts,
        report,
        trace,
        record,
        monitor,
        compare,
        precheck,
        verify_op,
        stress,
        view,
        diff_env,
        checkpoint,
        ascend,
        demo,
        doctor,
        completion,
    ):
        verb.add_parser(verbs)
    return top, verbs.choices


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; return the exit code."""
    with shown_streams():
        try:
            args = parse(argv)
        except SystemExit as done:  # --help and --version print, too
            if (code := flushed()) is not None:
                return code
            raise done from None
    if args.verb in _SCRIPTS or (args.verb == "doctor" and args.command):
        return _with_script(args)
    with shown_streams():
        return ended(lambda: _with_torch(args))


def _with_script(args: argparse.Namespace) -> int:
    """Run a script; only what was wrong before it began is ours to tell."""
    try:
        return _with_torch(args)
    except UsageError as error:
        say(str(error))
        return error.exit_code


def _with_torch(args: argparse.Namespace) -> int:
    """Do the work; a torch that is missing or lacks a name is no fault of ours."""
    try:
        code: int = args.main(args)
    except ImportError as error:
        if not torch_lacks(error):
            raise
        raise UsageError(unusable(error)) from error
    return code
