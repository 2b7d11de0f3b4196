"""One way out: a file is written beside its place, reaches the disk, and gets its name when it is whole."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import IO, Any

from bitwitness.errors import UnwrittenError, UsageError
from bitwitness.files.reading import kind_of
from bitwitness.files.shown import shown

_numbers = count()
_FREE = "name a file in a folder that exists and may be written to"


def target_of(path: str | os.PathLike[str], option: str = "") -> Path:
    """Return where a file that a user named is to be written: behind links, and only in the place of a regular file or of none.

    Parameters
    ----------
    option
        What named it, e.g. ``--json``, for the message.

    Raises
    ------
    UsageError
        If it names a folder, a device, a FIFO, a socket or nothing, or its folder is not there or may not be written to.

    """
    said = f"{option} {shown(path)}".strip()
    if not os.fspath(path):
        raise UsageError(f"{option} is empty; {_FREE}, or - for standard output".strip())
    try:
        place = Path(os.path.realpath(path))
        mode = place.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        mode = stat.S_IFREG
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write {said}: {getattr(error, 'strerror', None) or error}; {_FREE}") from error
    if not stat.S_ISREG(mode):
        raise UsageError(f"cannot write {said}: it {kind_of(mode)}; {_FREE}, or - for standard output")
    if not place.parent.is_dir():
        raise UsageError(f"cannot write {said}: there is no folder {shown(place.parent)}; {_FREE}")
    if not os.access(place.parent, os.W_OK | os.X_OK):
        raise UsageError(f"cannot write {said}: Permission denied; {_FREE}")
    return place


def distinct(named: dict[str, str | None], inputs: dict[str, str] | None = None) -> None:
    """Refuse options that name one file twice, or one that is read.

    Raises
    ------
    UsageError
        Naming both.

    """
    seen = {os.path.realpath(path): option for option, path in (inputs or {}).items() if path}
    for option, path in named.items():
        if not path or path == "-":
            continue
        place = os.path.realpath(path)
        if place in seen:
            raise UsageError(f"{option} and {seen[place]} name one file, {shown(path)}; give each a name of its own")
        seen[place] = option


@contextmanager
def new_file(path: str | os.PathLike[str], *, binary: bool = False, mode: int = 0o666) -> Iterator[IO[Any]]:
    """Open a file that bears its name from the end of the block on, and never half-written; an error leaves nothing.

    Parameters
    ----------
    path
        Where. What is there already is replaced.
    mode
        Permissions, of which the process's umask is taken away.

    Raises
    ------
    UnwrittenError
        If the system refuses: a full disk, a folder that is gone or may not be written to.

    """
    place = Path(path)
    part = place.with_name(f".bitwitness-{os.getpid()}-{next(_numbers)}.part")
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            # A file's name need not be UTF-8, and JSON may hold halves of surrogate pairs: they are written as escapes.
            as_text: dict[str, Any] = (
                {} if binary else {"encoding": "utf-8", "errors": "backslashreplace", "newline": ""}
            )
            with os.fdopen(descriptor, "wb" if binary else "w", **as_text) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            part.replace(place)
            sync_folder(place.parent)
        except BaseException:
            with suppress(OSError):
                part.unlink()
            raise
    except OSError as error:
        raise UnwrittenError(
            f"cannot write {shown(path)}: {error.strerror or error}; {_FREE}, or free the space"
        ) from error


def write_text(path: str | os.PathLike[str], text: str, mode: int = 0o666) -> None:
    """Write a text file, whole or not at all; raises as `new_file`."""
    with new_file(path, mode=mode) as file:
        file.write(text)


def sync_folder(folder: Path) -> None:
    """Have the new name itself reach the disk, where the file system can be asked."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
