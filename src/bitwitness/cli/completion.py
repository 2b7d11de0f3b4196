"""``bitwitness completion SHELL``: a script by which a shell completes verbs and options."""

from __future__ import annotations

import argparse
from typing import Any

from bitwitness.errors import UsageError

_SHELLS = ("bash", "zsh", "tcsh")


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "completion",
        help="print a script for a shell that completes verbs and options",
        description='For bash: eval "$(bitwitness completion bash)", in ~/.bashrc; for zsh: bitwitness completion zsh > '
        "_bitwitness in a folder of $fpath. Needs shtab (pip install 'bitwitness[completion]').",
    )
    parser.add_argument("shell", choices=_SHELLS, help="whose script")
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Print the script; return the exit code."""
    try:
        import shtab
    except ImportError as error:
        raise UsageError(
            "completion needs shtab, which is not installed; pip install 'bitwitness[completion]', or pip install shtab"
        ) from error
    from bitwitness.cli import parsers

    print(shtab.complete(parsers()[0], shell=args.shell))
    return 0
