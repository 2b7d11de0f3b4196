"""``bitwitness ascend``: Ascend dump and overflow files, read without the vendor's toolkit."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from bitwitness.cli import ascend_summary
from bitwitness.cli.options import add_json, add_quiet, answer
from bitwitness.errors import EXIT_UNREAD, UnreadError, UsageError
from bitwitness.files.shown import quoted, shown

_UNITS = {"aicore": "AI Core", "dha": "DHA Atomic Add", "l2": "L2 Atomic Add"}


def add_parser(verbs: Any) -> None:
    """Add the verb with its own verbs."""
    parser = verbs.add_parser(
        "ascend",
        help="read Ascend overflow and dump files",
        description="Reads dump and overflow files of Ascend devices: converts them, decodes status numbers, sums folders up.",
    )
    inner = parser.add_subparsers(dest="ascend_verb", metavar="VERB", required=True)
    convert = inner.add_parser(
        "convert",
        help="tensors to .npy or .safetensors, overflow records to JSON",
        description="Converts a dump file, or all in a folder: tensors to <file>.{input|output}.<i>.npy, overflow records to "
        "<file>.output.0.json in the vendor's shape.",
    )
    convert.add_argument("path", metavar="FILE|DIR", nargs="?", help="a dump file, or a folder of them")
    convert.add_argument("-d", dest="source", metavar="FILE|DIR", help="the same, as the vendor's tool has it")
    convert.add_argument(
        "-out", "-o", "--out", dest="out", metavar="DIR", default=".", help="where to write (here by default)"
    )
    convert.add_argument("--format", dest="form", choices=("npy", "safetensors"), default="npy", help="for tensors")
    add_quiet(convert)
    convert.set_defaults(main=convert_main)
    decode = inner.add_parser(
        "decode",
        help="a status number in words",
        description="Says what an overflow record's status means, unit by unit.",
    )
    decode.add_argument("status", metavar="STATUS", help="decimal (272) or hexadecimal (0x110)")
    decode.add_argument("--unit", choices=tuple(_UNITS), help="only this unit's meaning")
    add_json(decode, "the same as JSON; '-', the default, prints it")
    add_quiet(decode)
    decode.set_defaults(main=decode_main)
    ascend_summary.add_parser(inner)


def convert_main(args: argparse.Namespace) -> int:
    """Convert; return the exit code."""
    from bitwitness.store.ascend.convert import convert_file, dump_files

    source, out = _places(args)
    count = 0
    damaged: list[str] = []
    for path in dump_files(source, damaged.append):
        folder = out / path.parent.relative_to(source) if source.is_dir() else out
        try:
            written = convert_file(path, folder, args.form)
        except UnreadError as error:
            if path == source:
                raise
            damaged.append(str(error))
            continue
        count += 1
        for target, what in written if not args.quiet else ():
            print(f"{os.path.relpath(target) if not out.is_absolute() else target}: {what}")
    for message in damaged:
        sys.stderr.write(f"bitwitness: {shown(message, None)}\n")
    if not args.quiet:
        files = "1 file" if count == 1 else f"{count} files"
        print(f"{files} converted" + (f", {len(damaged)} could not be read (named above)" if damaged else ""))
    return EXIT_UNREAD if damaged or not count else 0


def _places(args: argparse.Namespace) -> tuple[Path, Path]:
    """Return what to convert, and the folder to write to."""
    if not args.out:
        raise UsageError("-o is empty; name a folder to write to")
    out = Path(args.out)
    if out.exists() and not out.is_dir():
        raise UsageError(f"{shown(out)} is a file; expected a folder to write to (-o DIR)")
    if args.path is not None and args.source is not None:
        raise UsageError("name one dump file, or one folder of them: either by itself or with -d")
    if not (named := args.path or args.source):
        raise UsageError("no path; name a dump file, or a folder of them")
    return Path(named), out


def decode_main(args: argparse.Namespace) -> int:
    """Print what a status means; return the exit code."""
    from bitwitness.store.ascend.status import UNITS, decode

    try:
        status = int(args.status, 0)
    except ValueError:
        status = -1
    if not 0 <= status < 1 << 64:
        raise UsageError(
            f"not a status: {quoted(args.status)}; expected a number of at most 64 bits, decimal (272) or hexadecimal (0x110)"
        )
    decoded = [decode(status, unit) for unit in ([_UNITS[args.unit]] if args.unit else UNITS)]
    told = {"status": "fine", "problems": [], "number": status, "decoded": [one.to_dict() for one in decoded]}
    lines = [f"  {one.unit + ':':<16}{one.text} (code {one.code:#x})" for one in decoded]
    answer(args, lambda: told, lambda: print("\n".join([f"status {status} = {status:#x} = {status:#b}", *lines])))
    return 0
