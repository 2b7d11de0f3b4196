"""``bitwitness trace SCRIPT``: who makes the first NaN or Inf of a training script, unchanged."""

from __future__ import annotations

import argparse
from typing import Any

from bitwitness.cli.ending import add_ending
from bitwitness.cli.folders import add_out
from bitwitness.cli.run import add_tracing_options, tracing_settings, watch
from bitwitness.cli.script import add_script_arguments


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "trace",
        help="look for NaN and Inf only, and name the operator that made the first",
        usage="bitwitness trace [options] [-m] SCRIPT [ARGS …]",
        description="Runs SCRIPT as python would and, where a loss, a gradient or a buffer is not finite, names the operator "
        "and the line that made it so. With several ranks: torchrun --nproc-per-node N -m bitwitness trace SCRIPT …",
    )
    add_out(parser, "folder for what is recorded (nothing by default)")
    parser.add_argument("--config", metavar="FILE", help="settings in TOML")
    add_tracing_options(parser)
    add_ending(parser)
    add_script_arguments(parser)
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Run the verb; return the exit code."""
    return watch(args, tracing_settings(args), traces=True)
