"""``bitwitness ascend``: Ascend dump and overflow files, read without the vendor's toolkit."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from bitwitness.cli import ascend_summary
from bitwitness.cli.options import add_json, write_json
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
    convert.add_argument(
        "-d", dest="source", metavar="FILE|DIR", required=True, help="a dump file, or a folder of them"
    )
    convert.add_argument(
        "-out", "-o", "--out", dest="out", metavar="DIR", default=".", help="where to write (here by default)"
    )
    convert.add_argument("--format", dest="form", choices=("npy", "safetensors"), default="npy", help="for tensors")
    convert.set_defaults(main=convert_main)
    decode = inner.add_parser(
        "decode",
        help="a status number in words",
        description="Says what an overflow record's status means, unit by unit.",
    )
    decode.add_argument("status", metavar="STATUS", help="decimal (272) or hexadecimal (0x110)")
    decode.add_argument("--unit", choices=tuple(_UNITS), help="only this unit's meaning")
    add_json(decode, "the same as JSON; '-', the default, prints it")
    decode.set_defaults(main=decode_main)
    ascend_summary.add_parser(inner)


def convert_main(args: argparse.Namespace) -> int:
    """Convert; return the exit code."""
    from bitwitness.store.ascend.convert import convert_file, dump_files

    if not args.out:
        raise UsageError("-o is empty; name a folder to write to")
    out = Path(args.out)
    if out.exists() and not out.is_dir():
        raise UsageError(f"{shown(out)} is a file; expected a folder to write to (-o DIR)")
    if not args.source:
        raise UsageError("-d is empty; name a dump file, or a folder of them")
    source, count = Path(args.source), 0
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
        for target, what in written:
            print(f"{os.path.relpath(target) if not out.is_absolute() else target}: {what}")
    for message in damaged:
        sys.stderr.write(f"bitwitness: {shown(message, None)}\n")
    print(f"{count} files converted" + (f", {len(damaged)} could not be read (named above)" if damaged else ""))
    return EXIT_UNREAD if damaged or not count else 0


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
    if args.json is not None:
        write_json([one.to_dict() for one in decoded], args.json)
        return 0
    print(f"status {status} = {status:#x} = {status:#b}")
    for one in decoded:
        print(f"  {one.unit + ':':<16}{one.text} (code {one.code:#x})")
    return 0
