"""A seal: what a checkpoint's files and tensors were when they were written, as JSON beside them.

    .model.pt.seal.json             of a file, beside it: hidden from a script that takes the newest of its files
    CHECKPOINT/bitwitness.seal.json of a folder, in it
    CHECKPOINT/bitwitness.seal-00003.json   what rank 3 wrote of a folder that several ranks wrote

A file is known by its length and SHA-256, a tensor by the 64-bit hash of its bits in their logical order
(`stats.digest.bit_hash`). The seal has a checksum of its own: a damaged seal is no damage of the checkpoint. It is no
signature: whoever can write the checkpoint can write the seal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bitwitness.errors import UnreadError
from bitwitness.files.reading import read_object
from bitwitness.files.shown import quoted, shown
from bitwitness.files.writing import write_text
from bitwitness.store.entry import inside, is_shape
from bitwitness.store.seal import is_intact, sealed

IN_FOLDER = "bitwitness.seal.json"
BESIDE = ".seal.json"
FORMAT = "bitwitness seal 1"
KINDS = ("dcp", "safetensors", "torch")
_LARGEST = 256 << 20  # bytes, read as a whole: about a hundred for each tensor
_MOST_PARTS = 1 << 20  # ranks
_EXPECTED = "a seal of bitwitness"
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_HASH = re.compile(r"[0-9a-f]{16}", re.ASCII)


@dataclass(frozen=True, slots=True)
class SealedFile:
    """A file when it was sealed; ``mtime_ns`` and ``inode`` tell it from one that was put in its place."""

    length: int
    sha256: str
    mtime_ns: int
    inode: int


@dataclass(frozen=True, slots=True)
class SealedTensor:
    """A tensor, or with ``offsets`` a chunk of one; ``file`` is empty where a DCP checkpoint's metadata says it."""

    name: str
    file: str
    offsets: tuple[int, ...] | None
    hash: str

    @property
    def key(self) -> tuple[str, str, tuple[int, ...] | None]:
        """What it is known by within its checkpoint."""
        return self.name, self.file, self.offsets


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a seal says.

    Attributes
    ----------
    kind
        One of `KINDS`.
    files, tensors
        What was sealed.
    step
        The training's, where it is known.
    of
        Which save it belongs to: the SHA-256 of a DCP checkpoint's metadata; empty for other kinds.
    parts
        How many ranks have a seal of their own beside this one.

    """

    kind: str
    files: Mapping[str, SealedFile]
    tensors: tuple[SealedTensor, ...] = ()
    step: int | None = None
    of: str = ""
    parts: int = 0
    problems: tuple[str, ...] = field(default=(), compare=False)
    """What of it could not be read: seals of other ranks."""


def seal_of(path: Path) -> Path:
    """Return where the seal of a checkpoint is."""
    return path / IN_FOLDER if path.is_dir() else path.with_name(f".{path.name}{BESIDE}")


def part_of(folder: Path, rank: int) -> Path:
    """Return where a rank's own seal is."""
    return folder / f"bitwitness.seal-{rank:05d}.json"


def write_manifest(place: Path, manifest: Manifest) -> None:
    """Write a seal, whole or not at all, and through to the disk; raises `UnwrittenError`."""
    fields = {
        "format": FORMAT,
        "kind": manifest.kind,
        "step": manifest.step,
        "of": manifest.of,
        "parts": manifest.parts,
        "files": {
            name: {"length": one.length, "sha256": one.sha256, "mtime_ns": one.mtime_ns, "inode": one.inode}
            for name, one in manifest.files.items()
        },
        "tensors": [[one.name, one.file, one.offsets, one.hash] for one in manifest.tensors],
    }
    write_text(place, json.dumps(sealed(fields)) + "\n")


def read_manifest(path: Path) -> Manifest:
    """Read the seal of a checkpoint, and those of the ranks that wrote it.

    Raises
    ------
    UsageError
        If there is no seal.
    UnreadError
        If it is damaged, of another format, or names files outside of the checkpoint's folder.

    """
    place = seal_of(path)
    manifest = _read(place)
    if not manifest.parts:
        return manifest
    files, tensors, problems = dict(manifest.files), list(manifest.tensors), []
    for rank in range(manifest.parts):
        part = part_of(path, rank)
        try:
            one = _read(part)
        except UnreadError as error:
            problems.append(str(error))
            continue
        except Exception as error:  # not there
            problems.append(f"{shown(part)} is missing: {shown(error)}")
            continue
        if one.of != manifest.of:
            problems.append(f"{shown(part)} is of another save; what rank {rank} wrote cannot be checked")
            continue
        files |= one.files
        tensors += one.tensors
    return replace(manifest, files=files, tensors=tuple(tensors), problems=tuple(problems))


def _read(place: Path) -> Manifest:
    fields = read_object(inside(place.parent, place.name), _EXPECTED, _LARGEST)
    try:
        whole = is_intact(fields)
    except (ValueError, RecursionError):  # numbers that are none, nests without end
        whole = False
    if fields.get("format") != FORMAT:
        raise UnreadError(
            f"{shown(place)} has the format {quoted(fields.get('format'))}; expected {quoted(FORMAT)}: seal the checkpoint anew"
        )
    if not whole:
        raise UnreadError(
            f"{shown(place)} is damaged (its checksum differs), which says nothing of the checkpoint: it cannot be checked. "
            "If you trust it, seal it anew"
        )
    try:
        return _manifest(fields, place.parent)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UnreadError(
            f"{shown(place)} is damaged: {type(error).__name__}: {shown(error, 200)}; expected {_EXPECTED}"
        ) from error


def _manifest(fields: Mapping[str, Any], folder: Path) -> Manifest:
    files = {}
    for name, one in fields["files"].items():
        inside(folder, name)  # raises for one that leads elsewhere
        files[name] = SealedFile(
            _count(one["length"]), _matching(_SHA256, one["sha256"]), _count(one["mtime_ns"]), _count(one["inode"])
        )
    tensors = []
    for name, file, offsets, hashed in fields["tensors"]:
        if offsets is not None and not is_shape(tuple(offsets)):
            raise ValueError("offsets")
        if type(name) is not str or type(file) is not str:
            raise ValueError("a tensor's name")
        place = None if offsets is None else tuple(offsets)
        tensors.append(SealedTensor(name, file, place, _matching(_HASH, hashed)))
    step, parts = fields["step"], _count(fields["parts"])
    if fields["kind"] not in KINDS or parts > _MOST_PARTS:
        raise ValueError("kind or parts")
    return Manifest(
        fields["kind"],
        files,
        tuple(tensors),
        None if step is None else _count(step),
        str(fields["of"]),
        parts,
    )


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise ValueError(f"{quoted(value)} is no count")
    return value


def _matching(form: re.Pattern[str], value: Any) -> str:
    if type(value) is not str or not form.fullmatch(value):
        raise ValueError(f"{quoted(value)} is no hash")
    return value
