"""Options that mean the same in all verbs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any


def add_json(parser: argparse.ArgumentParser, what: str) -> None:
    """Add ``--json [FILE|-]``."""
    parser.add_argument("--json", metavar="FILE", nargs="?", const="-", help=f"write {what}")


def add_quiet(parser: argparse.ArgumentParser) -> None:
    """Add ``--quiet``."""
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing but errors; the exit code tells")


def answer(args: argparse.Namespace, found: Callable[[], Any], show: Callable[[], None]) -> None:
    """Give an answer: JSON where it was asked for, and words on standard output unless that has the JSON, or is to be quiet."""
    if args.json is not None:
        write_json(found(), args.json)
    if args.json != "-" and not args.quiet:
        show()


def write_json(found: Any, where: str) -> None:
    """Write JSON to a file, or to standard output for ``-``; raises `UsageError` where the file cannot be written."""
    from bitwitness.files.writing import target_of, write_text

    text = json.dumps(found, indent=1, allow_nan=False)
    if where == "-":
        print(text)
    else:
        write_text(target_of(where, "--json"), text + "\n")
