"""``bitwitness demo``: the main job on this machine, start to end."""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext, redirect_stdout
from importlib.resources import files
from pathlib import Path
from typing import Any

from bitwitness.cli.ending import add_ending, check_ending, write_answer
from bitwitness.errors import UsageError

_MOST_STEPS = 10_000


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
    parser.add_argument("-o", "--out", metavar="DIR", help="keep the run folders and logs here, a fresh folder")
    parser.add_argument(
        "--faults-template", action="store_true", help="print a file of faults to begin with, for your own training"
    )
    parser.add_argument("--steps", type=int, default=45, help="steps of the fault-free run (default 45)")
    add_ending(parser)
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Run it."""
    if args.faults_template:
        print(files("bitwitness.inject").joinpath("template.toml").read_text(encoding="utf-8"), end="")
        return 0
    if not 1 <= args.steps <= _MOST_STEPS:
        raise UsageError(f"--steps {args.steps}: expected 1 to {_MOST_STEPS}; the second fault strikes from step 40 on")
    check_ending(args, args.out)
    from bitwitness.demo.main import main as demo

    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere) if args.quiet else nullcontext():
        code: int = demo(args)
    runs = sorted(str(path.parent) for path in Path(args.out).rglob("run.json")) if args.out else []
    return code or write_answer(args, runs)
