"""``bitwitness status RUN``: is my run healthy? One line, and what to do; with -v the story."""

from __future__ import annotations

import argparse
from typing import Any

from bitwitness.cli.options import add_json, add_quiet, answer
from bitwitness.errors import EXIT_FINDINGS, EXIT_UNREAD

_CODES = {"fine": 0, "findings": EXIT_FINDINGS, "unread": EXIT_UNREAD}


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "status",
        aliases=["show"],
        help="is this run healthy, how much of it was looked at, what is to be done",
        description="Reads a run folder, also of a run that goes on or was killed, checks its checksums, and answers in a "
        "line. Exit code 0: healthy; 1: something was found; 3: not everything was looked at, settled or readable, or the run "
        "was killed.",
    )
    parser.add_argument("run", metavar="RUN", help="a run folder: what --out named")
    parser.add_argument("-v", "--verbose", action="store_true", help="tell the whole story, verdict by verdict")
    add_json(parser, "the same as JSON; '-', the default, prints it")
    add_quiet(parser)
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Answer; return the exit code."""
    from bitwitness.store.answer import answers, lines_of, status_together, told_together
    from bitwitness.store.launched import attempt_of

    run, launched = attempt_of(args.run) or (args.run, [])  # a launcher's folder: its last attempt is asked
    asked = answers(str(run))
    lines = [line for one in asked for line in lines_of(one, str(run), whole=args.verbose, named=len(asked) > 1)]
    answer(
        args,
        lambda: told_together(asked, str(run)) | ({"launched": launched} if launched else {}),
        lambda: print("\n".join([*lines, *launched])),
    )
    return _CODES[status_together(asked)]
