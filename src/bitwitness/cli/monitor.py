"""``bitwitness monitor SCRIPT``: what a training's numbers do, step by step, and what is unusual in them."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Any

from bitwitness.cli.ending import add_ending, check_ending, run_written
from bitwitness.cli.folders import add_out, check_out
from bitwitness.cli.script import Script, add_script_arguments
from bitwitness.config.monitoring import KINDS, METRICS, RULES, MonitorConfig
from bitwitness.config.msprobe_monitor import read_monitor_config


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "monitor",
        help="follow a training's numbers step by step, and be told what is unusual in them",
        usage="bitwitness monitor [options] [-m] SCRIPT [ARGS …]",
        description="Runs SCRIPT as python would and writes the series of each model that it calls: activations, gradients, "
        "weights, optimizer. Rules watch them; what they find is printed and recorded. Two such runs: bitwitness compare A B. "
        "With several ranks: torchrun --nproc-per-node N -m bitwitness monitor SCRIPT …",
    )
    add_out(parser, "the run folder (default: monitor)")
    parser.add_argument(
        "--targets", metavar="GLOB", action="append", help="only modules like this, e.g. 'layers.3.*'; may be repeated"
    )
    parser.add_argument("--kinds", metavar="KIND,…", help=f"some of {', '.join(KINDS)} (default: all)")
    parser.add_argument("--metrics", metavar="NAME,…", help=f"some of {', '.join(METRICS)} (default: none)")
    parser.add_argument("--steps", metavar="A-B,C", help="optimizer steps, from 0 (default: all)")
    parser.add_argument("--interval", metavar="N", type=int, help="every N-th step only")
    parser.add_argument("--ranks", metavar="A-B,C", help="ranks (default: all)")
    parser.add_argument("--zeros", action="store_true", default=None, help="count zeros, too")
    parser.add_argument("--rules", metavar="NAME,…", help=f"some of {', '.join(RULES)} (default: all)")
    parser.add_argument("--no-watch", dest="watch", action="store_false", default=None, help="no rules, series only")
    parser.add_argument(
        "--sink",
        metavar="NAME[=WHERE]",
        action="append",
        default=[],
        help="send the step's numbers there, too: tensorboard=DIR, wandb=PROJECT, mlflow, trackio, prometheus=PORT",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="msprobe's monitor configuration, read as it is; options here come before it"
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
    from bitwitness.monitor.auto import AutoMonitor
    from bitwitness.monitor.sinks import sink_of

    return run_written(script, args, lambda: AutoMonitor(config, out, [sink_of(text) for text in args.sink]))


def settings(args: argparse.Namespace) -> tuple[MonitorConfig, str]:
    """Return what to look at and where to write, options before the file."""
    config, out = MonitorConfig(), None
    if args.config is not None:
        found = read_monitor_config(args.config)
        config, out = found.config, found.output_dir
        for warning in found.warnings:
            sys.stderr.write(f"bitwitness: {warning}\n")
    given: dict[str, Any] = {
        "targets": tuple(args.targets) if args.targets else None,
        "steps": args.steps,
        "interval": args.interval,
        "ranks": args.ranks,
        "zeros": args.zeros,
        "watch": args.watch,
    }
    for name in ("kinds", "metrics", "rules"):
        text = getattr(args, name)
        given[name] = None if text is None else tuple(part.strip() for part in text.split(",") if part.strip())
    chosen = {name: value for name, value in given.items() if value is not None}
    return replace(config, **chosen), args.out or out or "monitor"
