"""``bitwitness diff-env``: what differs between two runs before their numbers are compared."""

from __future__ import annotations

import argparse
import json
from itertools import groupby
from pathlib import Path
from typing import Any

from bitwitness.cli.options import add_json, add_quiet, answer
from bitwitness.errors import EXIT_FINDINGS, EXIT_UNREAD

_CODES = {"fine": 0, "findings": EXIT_FINDINGS, "unread": EXIT_UNREAD}
_SHOWN = 8  # differences of one kind: a screen holds all kinds; --json has the rest
_WIDTH = 60  # columns of one value: both sides fit a line


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "diff-env",
        help="what differs between two runs' environments",
        description="Compares what two run folders record of weights, data order, random states, hyperparameters, settings of "
        "determinism and precision, versions and variables: to be asked before their numbers are compared.",
    )
    parser.add_argument("a", metavar="RUN_A", help="a run folder")
    parser.add_argument("b", metavar="RUN_B", help="another")
    add_json(parser, "the same as JSON; '-', the default, prints it")
    add_quiet(parser)
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Compare; return the exit code."""
    from bitwitness.comparison.environment import PARTS, differences, masked, unknown
    from bitwitness.store.reader import read_description

    a, b = read_description(Path(args.a)), read_description(Path(args.b))
    found = differences(a, b)
    silent = sorted({*unknown(a), *unknown(b)})
    if "command" not in silent and masked(a, b):
        silent.append("arguments of the command that are masked as possible secrets (***)")
    one_sided = [f"{part} was recorded by one run only" for part in sorted(set(unknown(a)) ^ set(unknown(b)))]
    compared = len(PARTS) - len({*unknown(a), *unknown(b)})
    if not compared:
        one_sided.append("nothing was recorded by both runs: nothing could be compared")
    status = "unread" if one_sided else "findings" if found else "fine"
    told = {"status": status, "problems": one_sided, "compared": compared}
    told |= {"differences": [one.to_dict() for one in found], "not_recorded": silent}
    answer(args, lambda: told, lambda: _show(found, silent, one_sided))
    return _CODES[status]


def _show(found: list[Any], silent: list[str], one_sided: list[str]) -> None:
    from bitwitness.comparison.environment import explained

    for part, group in groupby(found, key=lambda one: one.part):
        members = list(group)
        print(f"{part}: {explained(part)}")
        for one in members[:_SHOWN]:
            print(f"  {one.name}: {_short(one.first)}  |  {_short(one.second)}")
        if len(members) > _SHOWN:
            print(f"  and {len(members) - _SHOWN} more (--json shows all)")
    if not found:
        print("nothing differs of what both runs recorded")
    if silent:
        print(f"not recorded by both, so not compared: {', '.join(silent)}")
    for text in one_sided:
        print(f"NOT ALL: {text}")


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"
