"""``bitwitness run SCRIPT``: a training script under guard, unchanged."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from bitwitness.cli.ending import add_ending, check_ending, write_answer
from bitwitness.cli.faults import declared_faults
from bitwitness.cli.folders import add_out, check_out
from bitwitness.cli.script import Script, ScriptError, add_script_arguments, torch_lacks, unusable
from bitwitness.errors import UsageError


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "run",
        help="run a training script under guard, unchanged",
        usage="bitwitness run [options] [-m] SCRIPT [ARGS …]",
        description="Runs SCRIPT as python would, with every model that it trains under guard. With several ranks: "
        "torchrun --nproc-per-node N -m bitwitness run SCRIPT …",
    )
    add_out(parser, "folder for what is recorded (nothing by default)")
    parser.add_argument("--config", metavar="FILE", help="settings in TOML")
    parser.add_argument(
        "--act",
        choices=("observe", "protect", "stop"),
        help="observe: prove and report; protect: also heal or stop; stop: end at the anomaly, unproven",
    )
    parser.add_argument(
        "--nonfinite",
        action="store_true",
        help="look for NaN and Inf only, and name the operator that made the first (the same as: bitwitness trace)",
    )
    add_tracing_options(parser, "with --nonfinite: ")
    parser.add_argument(
        "--determinism",
        action="store_true",
        help="have it repeat its bits: deterministic kernels, seeds, cuBLAS's workspace; the script's own settings come after",
    )
    add_ending(parser)
    add_script_arguments(parser)
    parser.set_defaults(main=main)


def add_tracing_options(parser: argparse.ArgumentParser, when: str = "") -> None:
    """Add what says how NaN and Inf are looked for."""
    parser.add_argument(
        "--mode",
        choices=("compute", "accumulate", "all", "aicore_overflow", "atomic_overflow"),
        help=f"{when}operators that compute, those that accumulate (scatter_add, reductions), or all (the default)",
    )
    parser.add_argument("--all", action="store_true", help=f"{when}print every origin, not the earliest alone")


def main(args: argparse.Namespace) -> int:
    """Run the verb; return the exit code."""
    return watch(args, {"act": args.act, **nonfinite_settings(args)}, traces=args.nonfinite)


def watch(args: argparse.Namespace, overrides: dict[str, Any], *, traces: bool) -> int:
    """Check what was asked for before torch is imported, then run the script; return the exit code."""
    from bitwitness.config import load_config
    from bitwitness.respond.alerts.metrics import check as check_alerts

    script = Script.of(args)
    overrides = {**overrides, "out": args.out, "quiet": args.quiet or None}
    loaded = load_config(args.config, {key: value for key, value in overrides.items() if value is not None})
    check_alerts(loaded.config.alerts)
    check_ending(args, loaded.config.out)
    check_out(loaded.config.out, args)
    try:
        from bitwitness.guard.auto import AutoGuard
        from bitwitness.guard.guard import Guard
        from bitwitness.guard.tracer import NonfiniteTracer
        from bitwitness.respond.final import PROCESS
    except ImportError as error:
        if not torch_lacks(error):
            raise
        sys.stderr.write(f"bitwitness: {unusable(error)}. SCRIPT RUNS UNGUARDED\n")
        return unguarded(script)

    if getattr(args, "determinism", False):
        from bitwitness.guard.repeats import make_repeatable

        make_repeatable()
    faults = declared_faults()
    guards = AutoGuard(loaded.config, loaded.warnings, make=NonfiniteTracer if traces else Guard)
    try:
        with faults, guards:
            script.run()
    except ScriptError as error:  # shown last, after what the guard has to say
        return PROCESS.exit_code(error.show())
    finally:
        unwritten = write_answer(args, guards.folders)
    return PROCESS.exit_code(unwritten)


def unguarded(script: Script) -> int:
    """Run a script as python would: a guard that cannot be is no reason to stop a training."""
    try:
        script.run()
    except ScriptError as error:
        return error.show()
    return 0


def nonfinite_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that ``--nonfinite`` and its options stand for."""
    if not args.nonfinite:
        if args.mode is not None or args.all:
            raise UsageError("--mode and --all say how --nonfinite looks; give --nonfinite, too")
        return {}
    if args.act is not None:
        raise UsageError(f"--act {args.act} needs the whole guard; --nonfinite only reports: leave one of them out")
    return tracing_settings(args)


def tracing_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings under which NaN and Inf are looked for."""
    from bitwitness.config import TRACER_SETTINGS

    return {**TRACER_SETTINGS, "nonfinite.mode": args.mode, "nonfinite.show_all": args.all}
