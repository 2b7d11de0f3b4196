"""``bitwitness launch``: a script on torch's elastic agent, relaunched without the devices that were convicted."""

from __future__ import annotations

import argparse
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

from bitwitness.cli.folders import add_out
from bitwitness.cli.script import Script
from bitwitness.cli.torchrun import Given, add_torchrun
from bitwitness.errors import UsageError
from bitwitness.files.shown import shown

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "launch",
        help="a script on several ranks, relaunched without a device that is convicted",
        description="Starts ranks as torchrun does (its options are taken), each under 'bitwitness run'. A device that a "
        "verdict convicts goes into quarantine, and the job begins again on a spare, or with a rank fewer, from a checkpoint "
        "of before the fault. Exit code: the script's; 17: no relaunch is allowed, or possible, after a verdict; 18: after a "
        "lost rank.",
    )
    parser.add_argument("--nproc-per-node", "--nproc_per_node", metavar="N", help="ranks on this node")
    parser.add_argument(
        "--spares", type=int, default=0, metavar="S", help="devices kept to take a convicted one's place (0)"
    )
    parser.add_argument(
        "--min-nproc", type=int, default=1, metavar="N", help="the fewest ranks on this node to go on with (1)"
    )
    parser.add_argument(
        "--max-relaunches", type=int, default=3, metavar="K", help="relaunches after verdicts and lost ranks (3)"
    )
    parser.add_argument(
        "--max-restarts", "--max_restarts", type=int, metavar="K", help="restarts after errors of the script (0)"
    )
    parser.add_argument("--quarantine", metavar="FILE", help="the list of devices that are left out")
    parser.add_argument("--expires", default="7d", metavar="TIME", help="how long a device stays in it: 12h, 7d (7d)")
    add_out(parser, "folder for the attempts' run folders")
    parser.add_argument("--config", metavar="FILE", help="the guard's settings in TOML")
    parser.add_argument(
        "--act",
        choices=("observe", "protect", "stop"),
        default="protect",
        help="as of 'bitwitness run'; only protect and stop lead to a relaunch (protect)",
    )
    parser.add_argument("--json", metavar="FILE", help="at the end write the history of the attempts ('-': print it)")
    parser.add_argument("-q", "--quiet", action="store_true", help="print verdicts and warnings only")
    add_torchrun(parser)
    parser.add_argument("command", metavar="SCRIPT", nargs=argparse.PARSER, help="the script, and its own arguments")
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Launch; return the exit code."""
    from bitwitness.config import load_config
    from bitwitness.launch.decide import Limits
    from bitwitness.launch.launcher import Launcher
    from bitwitness.launch.quarantine import Quarantine

    given = Given(args)
    for name in ("spares", "max_relaunches"):
        if getattr(args, name) < 0:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)}: expected 0 or more")
    restarts = given.number("max_restarts", args.max_restarts, 0)
    loaded = load_config(args.config, {} if args.out is None else {"out": args.out})
    out = _folder(args, loaded.config.out, alone=given.alone)
    job = _job(args, given, out)
    launcher = Launcher(job, Limits(args.max_relaunches, restarts), Quarantine(args.quarantine), quiet=args.quiet)
    try:
        return launcher.run()
    finally:
        if args.json is not None:
            from bitwitness.cli.options import write_json

            write_json(launcher.history.to_dict(), args.json)


def _job(args: argparse.Namespace, given: Given, out: Path) -> Any:
    from bitwitness.launch.launcher import Job

    ranks = given.ranks(args.nproc_per_node)
    if not 1 <= args.min_nproc <= ranks:
        raise UsageError(f"--min-nproc {args.min_nproc}: expected 1 to --nproc-per-node, {ranks}")
    words = args.command[1:] if args.command[0] == "--" else args.command
    if given.no_python:  # the guard is inside, if it is: it is told by the environment what it is to do
        command, environment = words, {"BITWITNESS_OUT": "{run}", "BITWITNESS_ACT": args.act}
    else:
        Script(words[0], words[1:], module=given.module)  # says now, and once, if there is none
        command, environment = ["bitwitness", "run", *_options(args), *(["-m"] if given.module else []), *words], {}
    return Job(
        out=out,
        command=command,
        python=not given.no_python,
        module=not given.no_python,
        ranks=ranks,
        spares=args.spares,
        least=args.min_nproc,
        options=given.passed,
        alone=given.alone,
        shutdown_s=given.shutdown_s,
        join_s=given.join_s,
        expires=duration(args.expires),
        environment=environment,
    )


def _options(args: argparse.Namespace) -> list[str]:
    """Return the options of the ranks' ``bitwitness run``; a rank that the agent starts anew records beside the first."""
    config = [] if args.config is None else ["--config", os.path.abspath(args.config)]
    return ["--out", "{run}", "--number", "--act", args.act, *config, *(["--quiet"] if args.quiet else [])]


def _folder(args: argparse.Namespace, out: str | None, *, alone: bool) -> Path:
    """Return the launcher's folder, absolute: fresh, numbered or cleared, as it was asked for."""
    from bitwitness.store.launched import clear_launch, free_folder, launch_lives, launches_in

    if not out:
        raise UsageError("verdicts are read from the run folder; name one with --out DIR")
    folder = Path(os.path.abspath(out))
    if folder.exists() and not folder.is_dir():
        raise UsageError(
            f"--out {shown(folder)}: there is a file of that name; expected a folder, or a name that is free"
        )
    if not alone and (args.number or args.overwrite):
        raise UsageError("--number and --overwrite: the launchers of several nodes share one folder; name a fresh one")
    # those of other nodes have begun already, or will
    taken = (folder / "run.json").exists() or any(alone or not launch_lives(one) for one in launches_in(folder))
    if not taken:
        return folder
    if args.number:
        return free_folder(folder)
    if not args.overwrite:
        raise UsageError(
            f"--out {shown(folder)} holds a run already; give the name of a fresh folder, or --overwrite to delete what was "
            "launched there, or --number to record beside it"
        )
    try:
        clear_launch(folder)
    except OSError as error:
        raise UsageError(f"--overwrite: cannot delete {shown(error.filename)}: {error.strerror}") from error
    return folder


def duration(text: str) -> timedelta:
    """Return a time as 90s, 30m, 12h or 7d say it; raises `UsageError`."""
    number, unit = text[:-1], text[-1:]
    if unit not in _UNITS or not number.isdecimal() or len(number) > 6 or int(number) == 0:
        raise UsageError(f"--expires {shown(text)}: expected a number with s, m, h or d, as in 12h or 7d")
    return timedelta(seconds=int(number) * _UNITS[unit])
