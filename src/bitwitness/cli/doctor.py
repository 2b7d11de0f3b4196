"""``bitwitness doctor``: what is covered on this machine, each sensor proven on a self-test fault."""

from __future__ import annotations

import argparse
from typing import Any

from bitwitness.cli.options import add_json, add_quiet, answer
from bitwitness.errors import EXIT_FINDINGS


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "doctor",
        help="what is covered here, each sensor proven on a self-test fault",
        description="Shows devices, torch's inner names that the guard needs, and lets every sensor prove that it sees.",
    )
    add_json(parser, "the same as JSON; '-', the default, prints it")
    add_quiet(parser)
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Examine this machine; return 1 if something failed its proof."""
    from bitwitness.guard.doctor import examine, is_healthy, show

    found = examine()
    healthy = is_healthy(found)
    told: dict[str, Any] = {"status": "fine" if healthy else "findings", "problems": []}
    answer(args, lambda: told | found, lambda: show(found))
    return 0 if healthy else EXIT_FINDINGS
