"""What the verbs that run a script tell at its end: status's answer as JSON, and how much they say until then."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from bitwitness.cli.faults import declared_faults
from bitwitness.cli.folders import rank_here
from bitwitness.cli.options import write_json
from bitwitness.cli.script import Script, ScriptError
from bitwitness.errors import EXIT_UNWRITTEN, UsageError
from bitwitness.files.writing import target_of

if TYPE_CHECKING:
    from bitwitness.session.everymodel import EveryModel


def add_ending(parser: argparse.ArgumentParser) -> None:
    """Add ``--json FILE`` (whose file cannot be left out: the script comes next) and ``--quiet``."""
    parser.add_argument(
        "--json", metavar="FILE", help="at the end write what 'bitwitness status' says of the run ('-': print it)"
    )
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="print verdicts and warnings only; nothing if all is well"
    )


def check_ending(args: argparse.Namespace, out: str | None) -> None:
    """Make sure before the script runs that the answer can be given; raises `UsageError`."""
    if args.json is None:
        return
    if out is None:
        raise UsageError("--json tells what the run folder holds at the end; give --out DIR, too")
    if args.json != "-":
        target_of(args.json, "--json")


def write_answer(args: argparse.Namespace, folders: Sequence[str]) -> int:
    """Write the answer, on the first rank; return the exit code of what prevented it, else 0."""
    from bitwitness.store.answer import answer_of

    if args.json is None or rank_here():
        return 0
    try:
        nothing = {"status": "unread", "sentence": "nothing was looked at", "problems": ["no model was watched"]}
        write_json(answer_of(folders[0]) if folders else nothing, args.json)
    except UsageError as error:
        sys.stderr.write(f"bitwitness: --json: {error}\n")
        return error.exit_code
    return 0


def run_written(script: Script, args: argparse.Namespace, watch: Callable[[], EveryModel[Any]]) -> int:
    """Run a script while its models are written into run folders; tell where, and return the exit code.

    ``watch`` makes what finds and writes them, once the declared faults are known to be understood.
    """
    faults = declared_faults()
    watching, code = watch(), 0
    watching.quiet = args.quiet
    try:
        with faults, watching:
            script.run()
    except ScriptError as error:
        code = error.show()
    finally:
        watching.say(quiet=args.quiet)
        unwritten = write_answer(args, watching.folders)
    # of several ranks none ends so: the launcher would end those that are still at work, for the sake of what we missed
    incomplete = watching.incomplete and int(os.environ.get("WORLD_SIZE") or 1) == 1
    return code or (EXIT_UNWRITTEN if incomplete else unwritten)
