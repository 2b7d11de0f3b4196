"""``bitwitness quarantine``: which devices are left out, and why; add one by hand, take one out."""

from __future__ import annotations

import argparse
from typing import Any

from bitwitness.cli.launch import duration
from bitwitness.cli.options import add_json, add_quiet, answer
from bitwitness.errors import EXIT_FINDINGS, UsageError
from bitwitness.files.shown import shown


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "quarantine",
        help="the devices that 'bitwitness launch' leaves out",
        description="Lists the devices in quarantine, adds one, or clears one or all. With list, exit code 1 says that a "
        "device is in quarantine (--here: of this host), 0 that none is.",
    )
    parser.add_argument("what", choices=("list", "add", "clear"), nargs="?", default="list")
    parser.add_argument("device", metavar="DEVICE", nargs="?", help="cuda:UUID, GPU-UUID, npu:SERIAL or KIND:HOST:SLOT")
    parser.add_argument(
        "--quarantine", metavar="FILE", help="the list; default: BITWITNESS_QUARANTINE, else the user's own"
    )
    parser.add_argument("--expires", default="7d", metavar="TIME", help="with add: how long it stays: 12h, 7d (7d)")
    parser.add_argument("--reason", default="added by hand", metavar="TEXT", help="with add: why")
    parser.add_argument("--here", action="store_true", help="with list: the devices of this host only")
    add_json(parser, "the same as JSON; '-', the default, prints it")
    add_quiet(parser)
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Do it; return the exit code."""
    import socket

    from bitwitness.launch.quarantine import Quarantine, device_named

    quarantine = Quarantine(args.quarantine)
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


def _show(what: str, found: list[dict[str, Any]], path: str) -> None:
    if not found:
        print(f"no device is in quarantine ({path})")
    for row in found:
        verb = {"list": "until", "add": "added, until", "clear": "cleared; it was to stay until"}[what]
        run = f" ({row['run']})" if row["run"] else ""
        where = f"{row['kind']} slot {row['index']} on {row['host']}"
        print(f"{row['device']}  {where}, {verb} {row['expires']}: {shown(row['reason'])}{run}")
