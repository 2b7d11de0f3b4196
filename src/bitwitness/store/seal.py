"""Checksums of what a run leaves behind, so that a flipped bit is named as damage and not as an operator's error.

    RUN/rank00000/seal.jsonl    a line for each file of the recording: its name, length and CRC-32, and the line's own
    RUN/run.json, events.jsonl  objects that hold the CRC-32 of their other fields as ``crc``

A file of tensors is sealed up to the end of its header, which holds the checksum of each tensor: one that is not read is not
checked either, so that a comparison of a few values of a large recording stays quick.
"""

from __future__ import annotations

import json
import os
import stat
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from bitwitness.errors import UsageError
from bitwitness.files.reading import kind_of, open_file, read_bytes, unread
from bitwitness.files.shown import shown

SEAL = "seal.jsonl"
FIELD = "crc"
"""Where an object keeps its checksum."""
NUMBER = "number"
"""Where an event keeps its place among those that its writer has written to the file, from 1: a line that is gone is missed."""
_CHUNK = 1 << 20
_SETTLED_S = 5.0
_MOST = 256 << 20  # bytes of a seal: a line for each of a million files


def sealed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object of JSON with the checksum of its fields."""
    return {**fields, FIELD: _crc_of_fields(fields)}


def is_intact(fields: Mapping[str, Any]) -> bool:
    """Return whether an object that was read is what was written; one without a checksum is not."""
    return fields.get(FIELD) == _crc_of_fields({name: value for name, value in fields.items() if name != FIELD})


def _crc_of_fields(fields: Mapping[str, Any]) -> str:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return f"{zlib.crc32(text.encode()):08x}"


def crc_of_file(path: Path, length: int | None = None) -> int:
    """Return the CRC-32 of a file, or of its first ``length`` bytes; raises as `open_file`, and `OSError`."""
    crc, left = 0, length
    with open_file(path, "a file of a recording") as file:
        while (left is None or left > 0) and (chunk := file.read(_CHUNK if left is None else min(_CHUNK, left))):
            crc = zlib.crc32(chunk, crc)
            left = None if left is None else left - len(chunk)
    return crc


def _crc_of_sealed(path: Path, covered: int) -> int:
    """Return the CRC-32 as `crc_of_file` does; of a file that has not changed for a while, it is computed once.

    Whoever looks at a run as it grows asks again and again, and its files are many.
    """
    found = path.stat()
    if time.time() - found.st_ctime < _SETTLED_S:  # clocks of file systems are coarse
        return crc_of_file(path, covered)
    return _crc_once(path, covered, found.st_size, found.st_ino, found.st_ctime_ns)


@lru_cache(maxsize=4096)
def _crc_once(path: Path, covered: int, _size: int, _inode: int, _changed: int) -> int:
    return crc_of_file(path, covered)


@dataclass(frozen=True, slots=True)
class SealedFile:
    """What a seal says of a file: its length, how much of it the checksum covers, and the checksum."""

    length: int
    covered: int
    crc: int


class Seal:
    """Writes a rank's seal: a line for each file, before that bears its name. Methods raise `OSError`."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / SEAL

    def add(self, name: str, part: Path, covered: int | None = None) -> None:
        """Seal a file that is whole, under the name that it will have in the rank's folder."""
        length = part.stat().st_size
        covered = length if covered is None else covered
        fields = {"file": name, "length": length, "covered": covered, "crc32": f"{crc_of_file(part, covered):08x}"}
        line = json.dumps(sealed(fields)) + "\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "a", encoding="utf-8") as file:
            file.write(line)


class SealedFolder:
    """A rank's folder and what its seal says of it.

    Attributes
    ----------
    problems
        What is wrong with the seal itself, and which files are missing.

    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.problems: list[str] = []
        self._files: dict[str, SealedFile] = {}
        self._read()
        for name, known in self._files.items():
            if problem := self._unlike(folder / name, known):
                self.problems.append(problem)

    def _read(self) -> None:
        path = self._folder / SEAL
        if not path.exists() and not path.is_symlink():
            self.problems.append(f"{path} is missing: whether the files beside it are what was written cannot be told")
            return
        try:
            lines = read_bytes(path, "the seal of a recording", _MOST).splitlines()
        except UsageError as error:
            self.problems.append(str(error))
            return
        for number, line in enumerate(lines, start=1):
            if not self._known(line):
                self.problems.append(f"{path}:{number} is damaged: the file that it is about cannot be checked")

    def _known(self, line: bytes) -> bool:
        """Take a line of the seal; return whether it is what was written."""
        try:
            fields = json.loads(line)
            if not is_intact(fields):
                return False
            known = SealedFile(int(fields["length"]), int(fields["covered"]), int(fields["crc32"], 16))
            name = Path(str(fields["file"]))
            if name.is_absolute() or ".." in name.parts:
                return False
            self._files[name.as_posix()] = known
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
            return False
        return True

    @staticmethod
    def _unlike(path: Path, known: SealedFile) -> str | None:
        """Return what can be told of a file without reading it."""
        try:
            found = path.stat()
        except FileNotFoundError:
            return f"{path} is missing: it was recorded, or was being written at the end"
        except OSError as error:
            return str(unread(path, error, "a file of a recording"))
        if not stat.S_ISREG(found.st_mode):
            return f"{path} {kind_of(found.st_mode)}; expected a file of a recording"
        if found.st_size != known.length:
            return f"{path} is damaged: it has {found.st_size} bytes, and was written with {known.length}"
        return None

    def all_damage(self) -> Iterator[str]:
        """Yield what is wrong with any sealed file, beside `problems`; reads them all, but of tensors the headers."""
        for name, known in self._files.items():
            path = self._folder / name
            if self._unlike(path, known) is None and (damage := self.damage(path)):
                yield damage

    def damage(self, path: Path) -> str | None:
        """Return what is wrong with a file beside the seal, or None if it is what was written."""
        name = path.relative_to(self._folder).as_posix()
        known = self._files.get(name)
        if known is None:
            return (
                None if self.problems else f"{shown(path)} is not in the seal beside it: it was not written by this run"
            )
        if unlike := self._unlike(path, known):
            return unlike
        try:
            if _crc_of_sealed(path, known.covered) != known.crc:
                return f"{shown(path)} is damaged: its bytes are not those that were written (CRC-32 differs)"
        except (OSError, UsageError) as error:
            return str(error)
        return None
