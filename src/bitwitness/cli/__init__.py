"""The command line. ``--help`` answers without importing torch; each verb imports what it needs when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence

from bitwitness.cli import ascend, compare, demo, diff_env, doctor, record, run, trace
from bitwitness.cli.script import torch_lacks, unusable
from bitwitness.errors import EXIT_USAGE, UsageError
from bitwitness.version import __version__


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments; what a verb does not know is that verb's error, with its usage."""
    top, verbs = parsers()
    args, unknown = top.parse_known_args(argv)
    if unknown:
        verbs[args.verb].error(f"unrecognized arguments: {' '.join(unknown)}")
    return args


def parsers() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Return the parser of the command line, and that of each verb."""
    top = argparse.ArgumentParser(
        prog="bitwitness",
        description="Are the numbers of your training run true? Senses a wrong number, proves it by re-execution, names the "
        "rank, device, operator and line, heals or stops.",
        epilog="Exit codes: 0 clean, 1 findings, 2 usage or input error; 'run' and 'trace' pass the script's own code on, or "
        "16 (stopped unproven: resume elsewhere), 17 (a device was convicted), 18 (a rank was lost).",
    )
    top.add_argument("--version", action="version", version=f"bitwitness {__version__}")
    verbs = top.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb in (run, trace, record, compare, diff_env, ascend, demo, doctor):
        verb.add_parser(verbs)
    return top, verbs.choices


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; return the exit code."""
    args = parse(argv)
    try:
        code: int = args.main(args)
    except UsageError as error:
        sys.stderr.write(f"bitwitness: {error}\n")
        return EXIT_USAGE
    except ImportError as error:
        if not torch_lacks(error):
            raise
        sys.stderr.write(f"bitwitness: {unusable(error)}\n")
        return EXIT_USAGE
    return code
