"""``bitwitness doctor``: what is covered on this machine, each sensor proven on a self-test fault."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "doctor",
        help="what is covered here, each sensor proven on a self-test fault",
        description="Shows devices, torch's inner names that the guard needs, and lets every sensor prove that it sees.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Run it."""
    from bitwitness.guard.doctor import main as doctor

    return doctor(args)
