"""Holding a checkpoint against its seal: every file, and of a damaged one which tensor."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bitwitness.checkpoint.contents import Contents, TensorHashes, contents_of, hashes_in, named
from bitwitness.checkpoint.filehash import hash_file
from bitwitness.checkpoint.manifest import Manifest, SealedFile, read_manifest, seal_of
from bitwitness.checkpoint.own import ours
from bitwitness.errors import UnreadError, UsageError
from bitwitness.files.shown import shown

Identity = Literal["same", "copy", "other"]
_SHOWN = 4  # damaged tensors in one sentence


@dataclass(frozen=True, slots=True)
class Damage:
    """What is wrong with a file; ``tensor``: which of its tensors is not what was written, as far as one can be named.

    ``identity``: ``same`` is the very file that was sealed, by its inode, length and time of writing to the nanosecond, to
    which nobody has written since; ``copy`` has that time and length, and is another file; ``other`` was written later, or is
    not there.
    """

    file: str
    tensor: str | None
    what: str
    identity: Identity = "other"

    def __str__(self) -> str:
        return f"{shown(self.file)}: {self.what}"

    def to_dict(self) -> dict[str, Any]:
        """Return the same for JSON."""
        return {"file": self.file, "tensor": self.tensor, "what": self.what, "identity": self.identity}


@dataclass(slots=True)
class Checked:
    """What came out of holding a checkpoint against its seal.

    Attributes
    ----------
    path, kind, step
        Which checkpoint.
    files, tensors
        How many the seal knows of those that were asked for.
    damage
        What is not what was sealed.
    unchecked
        What could not be checked: a rank's seal that is missing.

    """

    path: Path
    kind: str
    step: int | None
    files: int
    tensors: int
    damage: list[Damage] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    @property
    def intact(self) -> bool:
        """Whether all of it is what was sealed."""
        return not self.damage and not self.unchecked

    def __str__(self) -> str:
        if self.intact:
            return f"{shown(self.path)} is intact: {self.files} files, {self.tensors} tensors"
        said = [*map(str, self.damage), *self.unchecked]
        more = f"; and {len(said) - _SHOWN} more" if len(said) > _SHOWN else ""
        state = "is damaged" if self.damage else "cannot be checked whole"
        return f"{shown(self.path)} {state}: {'; '.join(said[:_SHOWN])}{more}"

    def to_dict(self) -> dict[str, Any]:
        """Return the same for JSON."""
        return {
            "path": str(self.path),
            "kind": self.kind,
            "step": self.step,
            "files": self.files,
            "tensors": self.tensors,
            "intact": self.intact,
            "damage": [one.to_dict() for one in self.damage],
            "unchecked": self.unchecked,
        }


def verify(path: str | os.PathLike[str], *, share: tuple[int, int] = (0, 1)) -> Checked:
    """Hold a checkpoint against its seal.

    Every byte of every file is read and hashed. Of a file whose bytes are not those that were sealed the tensors are read,
    as far as they can be, to name those that differ.

    Parameters
    ----------
    path
        As for `seal`.
    share
        Rank and number of ranks that share the files out; each looks at its own.

    Raises
    ------
    UsageError
        If there is no such checkpoint.
    UnreadError
        If it has no seal, or a damaged one: nothing can be said of the checkpoint.

    """
    place = Path(path)
    if not os.path.lexists(place):
        contents_of(path)  # raises, and says what is expected
    if not os.path.lexists(seal_of(place)):
        raise UnreadError(
            f"{shown(place)} has no seal (expected {shown(seal_of(place))}): whether it is what was written cannot be told. "
            "If you trust it, seal it: bitwitness checkpoint seal PATH"
        )
    with ours():
        return _verified(place, share)


def _verified(place: Path, share: tuple[int, int]) -> Checked:
    manifest = read_manifest(place)
    folder = place if place.is_dir() else place.parent
    rank, ranks = share
    names = sorted(manifest.files)[rank::ranks]
    checked = Checked(place, manifest.kind, manifest.step, len(names), len(manifest.tensors))
    checked.unchecked += manifest.problems if rank == 0 else ()
    bad = {}
    for name in names:
        if (found := _file_damage(folder, name, manifest.files[name])) is not None:
            bad[name] = found
    contents = Contents(manifest.kind, folder, tuple(manifest.files))
    checked.damage = list(_by_tensor(contents, manifest, bad))
    return checked


def _file_damage(folder: Path, name: str, known: SealedFile) -> Damage | None:
    """Return how a file differs from the sealed one, or None."""
    path = folder / name
    try:
        found = path.stat()
        same = _identity(found, known)
        if found.st_size != known.length:
            return Damage(name, None, f"it has {found.st_size:,} bytes, and was sealed with {known.length:,}", same)
        hashed = hash_file(path, settle=False)
    except UnreadError as error:
        return Damage(name, None, str(error))
    except (UsageError, OSError) as error:
        missing = isinstance(error, FileNotFoundError) or not os.path.lexists(path)
        return Damage(name, None, "it is missing" if missing else str(error))
    if hashed is None:
        return Damage(name, None, "it changed while it was read")
    if hashed.sha256 == known.sha256:
        return None
    what = "its bytes are not those that were sealed (SHA-256 differs)"
    if same == "other":
        written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.st_mtime_ns / 1e9))
        what += f"; it was written at {written}, after it was sealed"
    return Damage(name, None, what, same)


def _identity(found: os.stat_result, known: SealedFile) -> Identity:
    if found.st_mtime_ns != known.mtime_ns:
        return "other"
    if found.st_size != known.length:
        return "other"  # what rots keeps its length; who writes anew may keep the time
    return "same" if found.st_ino == known.inode else "copy"


def _by_tensor(contents: Contents, manifest: Manifest, bad: dict[str, Damage]) -> Iterator[Damage]:
    """Yield the damage of files, for each tensor by itself where these can be told."""
    readable = tuple(name for name, one in bad.items() if os.path.lexists(contents.folder / name))
    found = hashes_in(contents, readable, damaged=True) if readable else TensorHashes()
    for name, one in bad.items():
        own = list(_differing(manifest, found, name, one))
        yield from own or [one]


def _differing(manifest: Manifest, found: TensorHashes, file: str, known: Damage) -> Iterator[Damage]:
    """Yield the tensors of a damaged file that are not what was sealed."""
    actual = {one.key: one.hash for one in found.sealed}
    for one in manifest.tensors:
        if (one.file or found.home.get(one.key, "")) != file:
            continue
        what = None
        if one.key in found.unread:
            what = f"cannot be read: {found.unread[one.key]}"
        elif one.key in actual and actual[one.key] != one.hash:
            what = "is not what was written (its bits differ)"
        if what is not None:
            what = f"{named(one.name, one.offsets)} {what}; {known.what}"
            yield Damage(file, one.name, what, known.identity)
