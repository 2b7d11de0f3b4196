"""``bitwitness quarantine``: which devices are left out, and why; add one by hand, take one out."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from bitwitness.cli.launch import duration
from bitwitness.cli.options import add_json, add_quiet, answer
from bitwitness.errors import EXIT_FINDINGS, UsageError
from bitwitness.files.shown import shown

if TYPE_CHECKING:
    from bitwitness.launch.quarantine import Quarantine


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "quarantine",
        help="the devices that 'bitwitness launch' leaves out",
        description="Lists the devices in quarantine, adds one, or clears one or all. With list, exit code 1 says that a "
        "device is in quarantine (--here: of this host), 0 that none is; check says the same of this node as a health line for "
        "other launchers and schedulers, and serve answers it on a Unix socket.",
    )
    parser.add_argument("what", choices=("list", "add", "clear", "check", "serve"), nargs="?", default="list")
    parser.add_argument("device", metavar="DEVICE", nargs="?", help="cuda:UUID, GPU-UUID, npu:SERIAL or KIND:HOST:SLOT")
    parser.add_argument(
        "--quarantine", metavar="FILE", help="the list; default: BITWITNESS_QUARANTINE, else the user's own"
    )
    parser.add_argument("--expires", default="7d", metavar="TIME", help="with add: how long it stays: 12h, 7d (7d)")
    parser.add_argument("--reason", default="added by hand", metavar="TEXT", help="with add: why")
    parser.add_argument("--here", action="store_true", help="with list: the devices of this host only")
    parser.add_argument("--run", metavar="DIR", help="with check and serve: take in what a job's verdicts convict")
    parser.add_argument("--socket", metavar="PATH", help="with serve: where")
    parser.add_argument("--nvidia", action="store_true", help="with serve: by gRPC, as NVIDIA's ft_launcher asks")
    add_json(parser, "the same as JSON; '-', the default, prints it")
    add_quiet(parser)
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Do it; return the exit code."""
    import socket

    from bitwitness.launch.quarantine import Quarantine, device_named

    quarantine = Quarantine(args.quarantine)
    if args.what in ("check", "serve"):
        return _tell_health(args, quarantine)
    if args.what == "add":
        if not args.device:
            raise UsageError("quarantine add: name the device, as in cuda:UUID or cpu:HOST:SLOT")
        entries = [quarantine.add(device_named(args.device), args.reason, expires=duration(args.expires))]
    elif args.what == "clear":
        entries = quarantine.clear(args.device)
        if args.device and not entries:
            raise UsageError(
                f"{shown(args.device)} is not in {quarantine.path}; 'bitwitness quarantine list' shows what is"
            )
    else:
        if args.device:
            raise UsageError(f"quarantine list takes no device, and {shown(args.device)} was given")
        entries = [one for one in quarantine.entries() if not args.here or one.device.host == socket.gethostname()]
    found = [entry.to_dict() for entry in entries]
    answer(
        args,
        lambda: {"file": str(quarantine.path), "devices": found},
        lambda: _show(args.what, found, str(quarantine.path)),
    )
    return EXIT_FINDINGS if args.what == "list" and found else 0


def _tell_health(args: argparse.Namespace, quarantine: Quarantine) -> int:
    """Tell, once or whenever it is asked for, whether this node is fit."""
    from pathlib import Path
    from threading import Event

    from bitwitness.launch.adapters import health, resume_before, serve, serve_nvidia, take_in

    def told() -> dict[str, Any]:
        if args.run is None:
            return health(quarantine)
        take_in(quarantine, Path(args.run), expires=duration(args.expires))
        return health(quarantine) | {"resume_before": resume_before(Path(args.run))}

    def answered() -> dict[str, Any]:
        try:
            return told()
        except UsageError as error:  # that it cannot be known here takes no node away
            return {"healthy": True, "fail_count": 0, "failed_checks": [], "action": "none", "error": str(error)}

    if args.what == "check":
        found = told()
        print(json.dumps(found))
        return 0 if found["healthy"] else EXIT_FINDINGS
    if not args.socket:
        raise UsageError("quarantine serve: name the socket with --socket PATH")
    (serve_nvidia if args.nvidia else serve)(args.socket, answered, Event())  # SIGTERM and Ctrl-C end it
    return 0


def _show(what: str, found: list[dict[str, Any]], path: str) -> None:
    if not found:
        print(f"no device is in quarantine ({path})")
    for row in found:
        verb = {"list": "until", "add": "added, until", "clear": "cleared; it was to stay until"}[what]
        run = f" ({row['run']})" if row["run"] else ""
        where = f"{row['kind']} slot {row['index']} on {row['host']}"
        print(f"{row['device']}  {where}, {verb} {row['expires']}: {shown(row['reason'])}{run}")
