"""``bitwitness checkpoint seal|verify|list PATH``: are they what was written; if not, which file, which tensor."""

from __future__ import annotations

import argparse
from typing import Any

from bitwitness.cli.options import add_json, add_quiet, answer
from bitwitness.errors import EXIT_FINDINGS, EXIT_UNREAD, UnreadError
from bitwitness.files.shown import shown

_CODES = {"fine": 0, "findings": EXIT_FINDINGS, "unread": EXIT_UNREAD}


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "checkpoint",
        help="seal checkpoints, and verify that they are what was written",
        description="seal: write hashes of a checkpoint's files and tensors beside it. verify: hold it against them; names the "
        "file and the tensor that is damaged. list: verify every checkpoint in a folder of bw.checkpoint.save. Exit code 0: "
        "intact; 1: damaged; 2: there is nothing at PATH; 3: it cannot be read, or has no seal.",
    )
    parser.add_argument("action", choices=("seal", "verify", "list"))
    parser.add_argument(
        "path",
        metavar="PATH",
        help="a .safetensors file, a file of torch.save, a folder of these, a folder of torch.distributed.checkpoint; list: a "
        "folder of step-00000040",
    )
    add_json(parser, "the answer as JSON; '-', the default, prints it")
    add_quiet(parser)
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Do it; return the exit code."""
    return {"seal": _seal, "verify": _verify, "list": _list}[args.action](args)


def _seal(args: argparse.Namespace) -> int:
    from bitwitness.checkpoint import seal

    manifest = seal(args.path)
    found = {
        "path": args.path,
        "status": "fine",
        "problems": [],
        "kind": manifest.kind,
        "files": {name: one.sha256 for name, one in manifest.files.items()},
        "tensors": len(manifest.tensors),
    }
    said = f"sealed {shown(args.path)}: {len(manifest.files)} files, {len(manifest.tensors)} tensors"
    if not manifest.tensors:
        said += "; its tensors cannot be told apart without running what it holds: damage will be named by file alone"
    answer(args, lambda: found, lambda: print(said))
    return 0


def _verify(args: argparse.Namespace) -> int:
    from bitwitness.checkpoint import verify

    checked = verify(args.path)
    status = "findings" if checked.damage else "unread" if checked.unchecked else "fine"
    problems = [*map(str, checked.damage), *checked.unchecked]
    answer(args, lambda: {"status": status, "problems": problems, **checked.to_dict()}, lambda: print(checked))
    return _CODES[status]


def _list(args: argparse.Namespace) -> int:
    from pathlib import Path

    from bitwitness.checkpoint.steps import name_of, steps_in, unsealed_in
    from bitwitness.checkpoint.verifying import verify
    from bitwitness.errors import UsageError
    from bitwitness.files.reading import listed

    folder = Path(args.path)
    listed(folder, "a folder of checkpoints")
    rows: list[dict[str, Any]] = []
    for step in steps_in(folder):
        try:
            checked = verify(folder / name_of(step))
            state = "intact" if checked.intact else "damaged" if checked.damage else "unread"
            rows.append({"step": step, "name": name_of(step), "state": state, "said": str(checked)})
        except UsageError as error:
            rows.append({"step": step, "name": name_of(step), "state": "unread", "said": str(error)})
    bare = [f"{shown(folder / name)} has no seal, and is not taken" for name in unsealed_in(folder)]
    if not rows and not bare:
        raise UnreadError(f"{shown(folder)} holds no checkpoint; expected folders such as step-00000040")
    problems = [row["said"] for row in rows if row["state"] != "intact"] + bare
    damaged = any(row["state"] == "damaged" for row in rows)
    status = "findings" if damaged else "unread" if problems else "fine"
    newest = next((row["name"] for row in rows if row["state"] == "intact"), None)

    def show() -> None:
        for row in rows:
            print(row["said"])
        for line in bare:
            print(line)
        print(f"to go on from: {newest}" if newest else "to go on from: none")

    found = {"status": status, "problems": problems, "checkpoints": rows, "newest": newest}
    answer(args, lambda: found, show)
    return _CODES[status]
