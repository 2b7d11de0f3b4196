"""``bitwitness alerts``: clear a device that reads Warning; the rules by which Prometheus alerts."""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitwitness.cli.options import add_json, add_quiet, answer
from bitwitness.errors import UsageError

if TYPE_CHECKING:
    from bitwitness.store.folder import Run
    from bitwitness.store.warned import Clearance, Warned

RULES = Path(__file__).parents[1] / "respond" / "alerts" / "bitwitness.rules.yml"


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "alerts",
        help="clear a device that reads Warning; rules for Prometheus",
        description="Who is told of a run's verdicts is set under [alerts] in its configuration; see docs/alerts.md.",
    )
    what = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    clear = what.add_parser(
        "clear",
        help="have convicted devices of a run read OK again",
        description="Notes in the run folder who cleared which device, and when; the run's verdicts stay. Whoever its "
        "[alerts] told of a verdict is told of this, too.",
    )
    clear.add_argument("run", metavar="RUN", help="a run folder: what --out named")
    clear.add_argument("--device", metavar="X", help="only this one: its uuid, cuda:3, or rank 3; all by default")
    clear.add_argument("--reason", metavar="TEXT", default="", help="why, e.g. the number of the ticket")
    add_json(clear, "the same as JSON; '-', the default, prints it")
    add_quiet(clear)
    clear.set_defaults(main=clear_devices)
    rules = what.add_parser("rules", help="print alert rules for Prometheus")
    rules.set_defaults(main=print_rules)


def print_rules(args: argparse.Namespace) -> int:
    """Print the rules; return the exit code."""
    del args
    from bitwitness.files.reading import read_text

    sys.stdout.write(read_text(RULES, "the rules that are shipped", 1 << 20))
    return 0


def clear_devices(args: argparse.Namespace) -> int:
    """Clear; return the exit code."""
    from bitwitness.store.folder import Run
    from bitwitness.store.warned import clear, read_clearances, warned_of

    run = Run(args.run)
    path = Path(run.path).resolve()
    from bitwitness.files.shown import shown

    cleared, problems = read_clearances(path)
    known = warned_of(run.verdicts(), cleared)
    if args.device is not None:
        known = _named(known, args.device, args.run)
    on = [one for one in known if one.on]
    done = clear(path, on, args.reason) if on else []
    told = _tell(run, path, on, done, whole=args.device is None)
    lines = [
        f"device {shown(str(one.device))} (rank {one.rank}): cleared at {how.time}"
        for one, how in zip(on, done, strict=True)
    ]
    lines += ["no device reads Warning; nothing was changed"] if not on else []
    lines += [*told, *(f"not read: {shown(one)}" for one in (*run.problems, *problems))]
    found = {"cleared": [one.to_dict() for one in on], "told": told, "run": str(path)}
    answer(args, lambda: found, lambda: print("\n".join(lines)))
    return 0


def _named(known: list[Warned], device: str, run: str) -> list[Warned]:
    """Return the devices that a user may mean; raise `UsageError` where there is none."""
    rank = device.removeprefix("rank").strip()
    names = {
        id(one): {one.device.uuid, f"{one.device.kind}:{one.device.index}", str(one.device)}
        | ({str(one.rank)} if rank == str(one.rank) else set())
        for one in known
    }
    found = [one for one in known if {device, rank} & names[id(one)]]
    if not found:
        from bitwitness.files.shown import quoted, shown

        there = "; ".join(shown(f"{one.device}, rank {one.rank}") for one in known[:8]) or "none was convicted"
        raise UsageError(f"--device {quoted(device)}: no convicted device of {shown(run)} is called so; there: {there}")
    return found


def _tell(run: Run, path: Path, on: list[Warned], done: list[Clearance], *, whole: bool) -> list[str]:
    """Tell whoever the run told of its verdicts, and take text files away that it left; return what was done."""
    from bitwitness.config import AlertsConfig
    from bitwitness.respond.alerts.clearing import remove_files, tell_of
    from bitwitness.store.life import life_of

    section: dict[str, Any] = {}
    with suppress(UsageError):
        section = (run.description.get("config") or {}).get("alerts") or {}
    try:
        config = AlertsConfig(**section)
    except (TypeError, UsageError) as error:
        return [f"not told: the run's [alerts] are not understood: {error}"]
    lives = False
    with suppress(UsageError):
        lives = life_of(run.description).state == "running"
    told = tell_of(config, path, list(zip(on, done, strict=True)))
    return told if lives else told + remove_files(config, path, None if whole else [one.rank for one in on])
