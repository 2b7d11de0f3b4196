"""``bitwitness demo``: the main job on this machine, start to end."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "demo",
        help="watch two faults being sensed, proven, named, healed or stopped",
        description="Trains a byte-level GPT on the Python standard library's own source, on 4 gloo ranks whose devices "
        "compute wrongly: a transient fault is healed, a persistent one is proven, named, and stops the run.",
    )
    parser.add_argument(
        "--seed", action="store_true", help="instead: the Ascend document's own demonstration, on 8 ranks"
    )
    parser.add_argument("--out", metavar="DIR", help="keep the run folders and logs here")
    parser.add_argument("--steps", type=int, default=45, help="steps of the fault-free run (default 45)")
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Run it."""
    from bitwitness.demo.main import main as demo

    return demo(args)
