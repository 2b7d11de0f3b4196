"""``bitwitness record SCRIPT``: what a training computes, written as it goes."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Any

from bitwitness.cli.ending import add_ending, check_ending, run_written
from bitwitness.cli.folders import add_out, check_out
from bitwitness.cli.script import Script, add_script_arguments
from bitwitness.config.recording import CONTENTS, LEVELS, RecordConfig, read_msprobe


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "record",
        help="record what a training script computes, to be compared later",
        usage="bitwitness record [options] [-m] SCRIPT [ARGS …]",
        description="Runs SCRIPT as python would and records every model that it calls, a frozen teacher, too. With "
        "several ranks: torchrun --nproc-per-node N -m bitwitness record SCRIPT …",
    )
    add_out(parser, "the run folder (default: recording)")
    parser.add_argument("--level", choices=tuple(LEVELS), help="what is recorded (default: mix, modules and operators)")
    parser.add_argument("--content", choices=CONTENTS, help="how much of each value (default: stats)")
    parser.add_argument("--steps", metavar="A-B,C", help="optimizer steps, from 0 (default: all)")
    parser.add_argument("--ranks", metavar="A-B,C", help="ranks (default: all)")
    parser.add_argument(
        "--sites", metavar="GLOB", action="append", help="only sites like this, e.g. 'layers.3.*'; may be repeated"
    )
    parser.add_argument(
        "--phases", metavar="PHASE,…", help="forward, backward, grad, comm, optim, param (default: all)"
    )
    parser.add_argument("--max-elements", metavar="N", type=int, help="of larger tensors keep every n-th element only")
    parser.add_argument(
        "--async", dest="async_dump", action="store_true", default=None, help="never wait for the device"
    )
    parser.add_argument("--zeros", action="store_true", default=None, help="count zeros, too")
    parser.add_argument(
        "--optimizer-state", action="store_true", default=None, help="record the optimizer's state, too"
    )
    parser.add_argument(
        "--config", metavar="FILE", help="msprobe's config.json, read as it is; options here come before it"
    )
    add_ending(parser)
    add_script_arguments(parser)
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Check what was asked for before torch is imported, then run; return the exit code."""
    script = Script.of(args)
    config, out = settings(args)
    check_ending(args, out)
    check_out(out, args)
    from bitwitness.record.auto import AutoRecorder

    return run_written(script, args, lambda: AutoRecorder(config, out))


def settings(args: argparse.Namespace) -> tuple[RecordConfig, str]:
    """Return what to record and where to, options before the file."""
    config, out = RecordConfig(), None
    if args.config is not None:
        found = read_msprobe(args.config)
        config, out = found.config, found.dump_path
        for warning in found.warnings:
            sys.stderr.write(f"bitwitness: {warning}\n")
    given: dict[str, Any] = {
        "level": args.level,
        "content": args.content,
        "steps": args.steps,
        "ranks": args.ranks,
        "sites": tuple(args.sites) if args.sites else None,
        "phases": tuple(args.phases.split(",")) if args.phases else None,
        "max_elements": args.max_elements,
        "async_dump": args.async_dump,
        "zeros": args.zeros,
        "optimizer_state": args.optimizer_state,
    }
    return replace(
        config, **{name: value for name, value in given.items() if value is not None}
    ), args.out or out or "recording"
