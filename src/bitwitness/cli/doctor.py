"""``bitwitness doctor [SCRIPT]``: what is covered on this machine, or of a script, each sensor proven on a self-test fault."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from bitwitness.cli.folders import rank_here
from bitwitness.cli.options import add_json, add_quiet, answer
from bitwitness.cli.script import Script, ScriptError
from bitwitness.errors import EXIT_FINDINGS, UsageError

_STEPS = 6
_DEADLINE_S = 600.0


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "doctor",
        help="what is covered here, or of a script, each sensor proven on a self-test fault",
        usage="bitwitness doctor [options] [[-m] SCRIPT [ARGS …]]",
        description="Shows devices, torch's inner names that the guard needs, and lets every sensor prove that it sees. With "
        "SCRIPT: runs it under guard for a few steps, ends it, and prints what is covered, what keeps it from repeating its "
        "bits, and what is not protected. With several ranks: torchrun --nproc-per-node N -m bitwitness doctor SCRIPT …",
        epilog="Exit code with SCRIPT: its own if it failed; 0: it trained and every sensor saw its self-test fault; 1: one "
        "did not, or something was found; 3: something could not be looked at.",
    )
    parser.add_argument("--steps", type=int, default=_STEPS, metavar="N", help=f"steps of SCRIPT (default {_STEPS})")
    parser.add_argument(
        "--deadline", type=float, default=_DEADLINE_S, metavar="S", help=f"seconds for them (default {_DEADLINE_S:g})"
    )
    parser.add_argument("--determinism", action="store_true", help="say what makes a script repeat its bits")
    parser.add_argument("--config", metavar="FILE", help="settings in TOML, as for run")
    add_json(parser, "the same as JSON; '-', the default, prints it")
    add_quiet(parser)
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name, as in python -m")
    parser.add_argument("command", metavar="SCRIPT", nargs=argparse.REMAINDER, help="the script, and its own arguments")
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Examine this machine, or a script; return the exit code."""
    _check(args)
    if args.command:
        return _examine_script(args)
    from bitwitness.guard.doctor import examine, is_healthy, show

    found = examine()
    healthy = is_healthy(found)
    told: dict[str, Any] = {"status": "fine" if healthy else "findings", "problems": []}
    answer(args, lambda: told | found, lambda: show(found))
    if args.determinism and not args.quiet and args.json != "-":
        from bitwitness.guard.repeats import SETTINGS

        print("\n".join(f"  repeats its bits with: {setting}: {why}" for setting, why in SETTINGS))
    return 0 if healthy else EXIT_FINDINGS


def _check(args: argparse.Namespace) -> None:
    """Make sure of what is asked before torch is imported; raises `UsageError`."""
    if args.steps < 1:
        raise UsageError(f"--steps {args.steps}: expected at least 1 step; the default is {_STEPS}")
    if not args.deadline > 0:
        raise UsageError(f"--deadline {args.deadline:g}: expected seconds, more than 0")
    if args.json not in (None, "-") and not args.command and _is_script(args):
        raise UsageError(
            f"--json {args.json} would write the answer over a script; say '--json - {Path(args.json).name}' to print JSON, or "
            "name the file: --json answer.json"
        )
    if not args.command and (args.module or args.config is not None):
        raise UsageError("-m and --config are of a script's run; name the SCRIPT")


def _is_script(args: argparse.Namespace) -> bool:
    """Tell whether what ``--json`` took for its file is rather the script: nothing else was named, and it is no JSON."""
    path = Path(args.json)
    return args.module or path.suffix == ".py" or (path.is_file() and path.read_bytes()[:1] not in (b"", b"{"))


def _examine_script(args: argparse.Namespace) -> int:
    from bitwitness.config import load_config

    script = Script.of(args)
    loaded = load_config(args.config, {"quiet": True, "act": "observe"})
    from bitwitness.guard.auto import AutoGuard
    from bitwitness.guard.prognosis import exit_code, prognosis, told
    from bitwitness.guard.tryout import EnoughSteps, Tryout

    state: dict[str, Any] = {"code": 0, "error": None}

    def finish() -> int:
        """Tell what was found, on the first rank; return the exit code."""
        found = prognosis(tryout, code=state["code"], lines=[])
        if rank_here() == 0:
            try:
                answer(args, lambda: found, lambda: print("\n".join(told(found, determinism=args.determinism))))
            except UsageError as error:
                sys.stderr.write(f"bitwitness: --json: {error}\n")
                return error.exit_code
        return exit_code(found)

    tryout = Tryout(AutoGuard(loaded.config, loaded.warnings), steps=args.steps, deadline_s=args.deadline, last=finish)
    try:
        with tryout:
            script.run()
    except EnoughSteps:
        pass
    except KeyboardInterrupt:
        if not tryout.late:
            raise
    except SystemExit as end:
        state["code"] = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(end.code + "\n")
    except ScriptError as error:
        state["code"] = error.show()
    return finish()
