"""Where a verb writes a run: checked before the work begins, and never where a run is, unless that was asked for."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from bitwitness.errors import UsageError
from bitwitness.files.shown import shown


def add_out(parser: argparse.ArgumentParser, what: str) -> None:
    """Add ``--out``, and what is to be done where a run lies there."""
    parser.add_argument("-o", "--out", metavar="DIR", help=what)
    taken = parser.add_mutually_exclusive_group()
    taken.add_argument(
        "--overwrite", action="store_true", help="where DIR holds a run, delete that (and DIR-2, …) first"
    )
    taken.add_argument("--number", action="store_true", help="where DIR holds a run, record in DIR-2, DIR-3, … instead")


def check_out(out: str | None, args: argparse.Namespace) -> None:
    """Make sure now, and not after an hour of training, that a run can be recorded in ``out``.

    Only the first rank looks: it will have taken the folder when the others come. A job that a launcher starts again goes
    beside what its first attempt left.

    Raises
    ------
    UsageError
        If it holds a run, is no folder, or cannot be written to.

    """
    if out is None:
        if args.overwrite or args.number:
            raise UsageError("--overwrite and --number say what to do with the folder of --out; give that, too")
        return
    if not out:
        raise UsageError("--out is empty; name a folder")
    folder = Path(out)
    parent = next((p for p in (folder, *folder.absolute().parents) if os.path.lexists(p)), Path("/"))
    if not parent.is_dir():
        seen = "is no folder" if parent != folder else "there is a file of that name"
        raise UsageError(f"--out {shown(out)}: {shown(parent)} {seen}; expected a folder, or a name that is free")
    _try_to_write(parent, out)
    if rank_here() == 0:
        _make_room(folder, args)


def _try_to_write(parent: Path, out: str) -> None:
    """Write a file that has no name: rights alone say nothing of a file system that is read-only, full or none at all."""
    try:
        with tempfile.TemporaryFile(dir=parent) as file:
            file.write(b"bitwitness")
    except OSError as error:
        why = error.strerror or error
        message = f"--out {shown(out)}: {shown(parent)} may not be written to ({why}); name another place"
        raise UsageError(message) from error


def rank_here() -> int:
    """Return the rank that a launcher gave this process; 0 without one.

    Raises
    ------
    UsageError
        If ``RANK`` is no rank.

    """
    text = os.environ.get("RANK", "0")
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise UsageError(f"RANK = {shown(repr(text))} in the environment; expected a rank, as torchrun sets it")
    return int(text)


def _make_room(folder: Path, args: argparse.Namespace) -> None:
    from bitwitness.store.beside import clear_process
    from bitwitness.store.claim import holds_run

    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if args.number or restarted or not holds_run(folder):
        return
    if not args.overwrite:
        raise UsageError(
            f"--out {shown(folder)} holds a run already (or somebody's run.json); give the name of a fresh folder, or "
            "--overwrite to delete that run, or --number to record beside it"
        )
    try:
        clear_process(folder)
    except OSError as error:
        raise UsageError(f"--overwrite: cannot delete {shown(error.filename)}: {error.strerror}") from error
