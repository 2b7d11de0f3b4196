"""``bitwitness run SCRIPT``: a training script under guard, unchanged."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import traceback
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from bitwitness.errors import UsageError


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "run",
        help="run a training script under guard, unchanged",
        description="Runs SCRIPT as python would, with every model that it trains under guard. With several ranks: "
        "torchrun --nproc-per-node N -m bitwitness run SCRIPT …",
    )
    parser.add_argument("--out", metavar="DIR", help="folder for what is recorded (nothing by default)")
    parser.add_argument("--config", metavar="FILE", help="settings in TOML")
    parser.add_argument(
        "--act",
        choices=("observe", "protect", "stop"),
        help="observe: prove and report; protect: also heal or stop; stop: end at the anomaly, unproven",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name, as in python -m")
    parser.add_argument("script", metavar="SCRIPT", help="the training script")
    parser.add_argument("arguments", metavar="…", nargs=argparse.REMAINDER, help="the script's own arguments")
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Check what was asked for before torch is imported, then run."""
    _check_script(args)
    from bitwitness.config import load_config

    overrides = {"act": args.act, "out": args.out}
    loaded = load_config(args.config, {key: value for key, value in overrides.items() if value is not None})
    from bitwitness.guard.auto import AutoGuard
    from bitwitness.inject.device import FaultyDevice

    rank = int(os.environ.get("RANK", "0"))
    with ExitStack() as stack:
        faulty = FaultyDevice.from_environment(rank)
        if faulty is not None:
            stack.enter_context(faulty)
        stack.enter_context(AutoGuard(loaded.config, loaded.warnings))
        try:
            _run(args)
        except Exception as error:  # the script's own: shown as python shows it, without our frames around it
            traceback.print_exception(error.with_traceback(_of_script(error.__traceback__)))
            return 1
    return 0


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that begins with the script; all of it where the script has no part in it."""
    part = trace
    while part is not None and part.tb_frame.f_globals.get("__name__") != "__main__":
        part = part.tb_next
    while part is not None and part.tb_frame.f_code.co_filename.endswith(("bitwitness/__main__.py", "<frozen runpy>")):
        part = part.tb_next
        while part is not None and part.tb_frame.f_globals.get("__name__") != "__main__":
            part = part.tb_next
    return part or trace


def _check_script(args: argparse.Namespace) -> None:
    if args.module:
        sys.path.insert(0, str(Path.cwd()))
        try:
            known = find_spec(args.script) is not None
        except (ImportError, ValueError):
            known = False
        if not known:
            raise UsageError(
                f"no module named {args.script!r} can be found; check the name, or leave out -m for a file"
            )
        return
    path = Path(args.script)
    if path.is_dir():
        raise UsageError(f"{path} is a folder; expected a Python script")
    if not path.is_file():
        raise UsageError(f"there is no script {path}; check the path (seen from {Path.cwd()})")


def _run(args: argparse.Namespace) -> None:
    sys.argv = [args.script, *args.arguments]
    if args.module:
        runpy.run_module(args.script, run_name="__main__", alter_sys=True)
        return
    sys.path[0] = str(Path(args.script).resolve().parent)
    runpy.run_path(args.script, run_name="__main__")
