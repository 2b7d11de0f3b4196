"""One way in: files are opened without waiting, are regular and of bounded size; what is wrong with one is said in a line."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from bitwitness.errors import UnreadError, UsageError
from bitwitness.files.shown import shown

MOST_BYTES = 1 << 30
"""Of a file that is read whole: documents of a gigabyte are not written by anybody's tool."""
_KINDS = (
    (stat.S_ISDIR, "is a folder"),
    (stat.S_ISFIFO, "is a FIFO"),
    (stat.S_ISSOCK, "is a socket"),
    (stat.S_ISCHR, "is a device"),
    (stat.S_ISBLK, "is a device"),
)


def open_file(path: str | os.PathLike[str], expected: str) -> BinaryIO:
    """Open a regular file for reading; never wait for one that is not.

    Parameters
    ----------
    path
        A file, or a link to one.
    expected
        What should be there, for the message.

    Raises
    ------
    UsageError
        If there is no such file.
    UnreadError
        If it is no regular file, or may not be read.

    """
    name = shown(path)
    try:
        # A FIFO without a writer, or a device without a medium, would be waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise unread(path, error, expected) from error
    except ValueError as error:  # a null byte
        raise UsageError(f"{name} is no path: {error}; expected {expected}") from error
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise UnreadError(f"{name} {kind_of(mode)}; expected {expected}")
    return os.fdopen(descriptor, "rb")


@contextmanager
def opened(path: str | os.PathLike[str], expected: str) -> Iterator[BinaryIO]:
    """Open a file as `open_file` does; what the system refuses while it is read is an `UnreadError`, too."""
    with open_file(path, expected) as file:
        try:
            yield file
        except OSError as error:
            raise unread(path, error, expected) from error


def kind_of(mode: int) -> str:
    """Say what a file is that is not a regular one; ``mode``: of `os.stat`."""
    return next((words for test, words in _KINDS if test(mode)), "is no regular file")


def unread(path: str | os.PathLike[str], error: OSError, expected: str) -> UsageError:
    """Return the error that tells of a path which the system refuses."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP):
        return UsageError(f"cannot read {shown(path)}: {reason} (seen from {Path.cwd()}); expected {expected}")
    return UnreadError(f"cannot read {shown(path)}: {reason}; expected {expected}")


def read_bytes(path: str | os.PathLike[str], expected: str, most: int = MOST_BYTES) -> bytes:
    """Return a file's contents; raises as `open_file`, and `UnreadError` for more than ``most`` bytes."""
    with opened(path, expected) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise UnreadError(f"{shown(path)} has {size:,} bytes, of at most {most:,}; expected {expected}")
        data = file.read(most + 1)
    if len(data) > most:  # it grew meanwhile, or its size is not known beforehand
        raise UnreadError(f"{shown(path)} has more than {most:,} bytes; expected {expected}")
    return data


def read_text(path: str | os.PathLike[str], expected: str, most: int = MOST_BYTES) -> str:
    """Return a file's contents as UTF-8; raises as `read_bytes`, and `UnreadError` where they are none."""
    try:
        return read_bytes(path, expected, most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnreadError(
            f"{shown(path)} is no UTF-8 text: byte {error.start} is wrong; expected {expected}"
        ) from error


def read_json(path: str | os.PathLike[str], expected: str, most: int = MOST_BYTES) -> Any:
    """Return what a JSON file holds; raises as `read_text`, and `UnreadError` where it holds none."""
    return parsed_json(read_text(path, expected, most), path, expected)


def read_object(
    path: str | os.PathLike[str], expected: str, most: int = MOST_BYTES, *, strict: bool = False
) -> dict[str, Any]:
    """Return the object that a JSON file holds; raises as `read_json`, and `UnreadError` where it holds something else.

    ``strict``: NaN and Infinity, which are no JSON, are damage; other tools write them.
    """
    found = parsed_json(read_text(path, expected, most), path, expected, strict=strict)
    if not isinstance(found, dict):
        raise UnreadError(f"{shown(path)} holds no JSON object; expected {expected}")
    return found


def parsed_json(text: str | bytes, where: str | os.PathLike[str], expected: str, *, strict: bool = False) -> Any:
    """Return what a JSON text says; ``strict``: see `read_object`.

    Raises
    ------
    UnreadError
        If it is none, is nested too deeply, or holds an integer of thousands of digits.

    """
    try:
        return json.loads(text, parse_constant=_refused if strict else None)
    except RecursionError as error:
        raise UnreadError(f"{shown(where)} is damaged: nested too deeply; expected {expected}") from error
    except ValueError as error:
        raise UnreadError(f"{shown(where)} is damaged: {shown(error)}; expected {expected}") from error


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def listed(folder: str | os.PathLike[str], expected: str) -> list[os.DirEntry[str]]:
    """Return a folder's entries, sorted by name; raises as `open_file`."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise unread(folder, error, expected) from error
    except ValueError as error:
        raise UsageError(f"{shown(folder)} is no path: {error}; expected {expected}") from error


def files_below(
    folder: str | os.PathLike[str], expected: str, failed: Callable[[str], None]
) -> Iterator[tuple[Path, list[str]]]:
    """Yield each folder below and with this one, and the names of its regular files, sorted; links to folders are not followed.

    A link to a folder that is walked anyway is passed over in silence, one to another is told.

    Parameters
    ----------
    failed
        Told, in one line each, of folders that cannot be listed and of files of another kind that bear a name: what is below a
        folder that may not be read is missing from what is yielded.

    Raises
    ------
    UsageError, UnreadError
        If the folder itself cannot be listed.

    """
    listed(folder, expected)

    def refused(error: OSError) -> None:
        failed(f"cannot read {shown(error.filename or folder)}: {error.strerror}; what is in it is missing here")

    root = os.path.realpath(folder)

    for path, folders, names in os.walk(folder, onerror=refused):
        folders.sort()
        for name in folders:
            link = Path(path, name)
            if link.is_symlink() and os.path.commonpath([root, os.path.realpath(link)]) != root:
                failed(f"{shown(link)} is a link to a folder elsewhere, and was not followed; name that folder, too")
        regular = []
        for name in sorted(names):
            file = Path(path, name)
            try:
                mode = file.stat().st_mode
            except OSError as error:
                failed(f"cannot read {shown(file)}: {error.strerror}")
                continue
            if stat.S_ISREG(mode):
                regular.append(name)
            else:
                failed(f"{shown(file)} {kind_of(mode)}, and was not read")
        yield Path(path), regular
