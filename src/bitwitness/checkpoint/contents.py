"""What a checkpoint consists of: its files, and the tensors in each, read without unpickling anything that could run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torch import Tensor

from bitwitness.checkpoint.manifest import BESIDE, SealedTensor
from bitwitness.errors import UnreadError, UsageError
from bitwitness.files.reading import listed, read_object
from bitwitness.files.shown import quoted, shown
from bitwitness.stats import in_hex
from bitwitness.stats.digest import bit_hash
from bitwitness.store.dcp import METADATA, DcpChunks
from bitwitness.store.entry import inside
from bitwitness.store.tensorfile import TensorReader
from bitwitness.store.torchfile import read_torch_file

_INDEX = ".index.json"
_LARGEST_INDEX = 256 << 20
_PICKLED = (".pt", ".pth", ".bin", ".ckpt")
_KINDS = (
    "a .safetensors file, a file of torch.save, a folder of these (with or without an index), or a folder of "
    "torch.distributed.checkpoint"
)


@dataclass(frozen=True, slots=True)
class Contents:
    """A checkpoint's kind, the folder that its files are in, and their plain names."""

    kind: str
    folder: Path
    files: tuple[str, ...]


def contents_of(path: str | os.PathLike[str]) -> Contents:
    """Tell what a checkpoint consists of.

    Raises
    ------
    UsageError
        If there is nothing at the path.
    UnreadError
        If it is no checkpoint, or so damaged that its files cannot be told.

    """
    place = Path(path)
    if not os.fspath(path) or "\0" in os.fspath(path) or not os.path.lexists(place):
        raise UsageError(f"{shown(path)} does not exist (seen from {Path.cwd()}); expected {_KINDS}")
    if not place.is_dir():
        return _file(place)
    names = [entry.name for entry in listed(place, _KINDS) if not entry.name.endswith(BESIDE)]
    if METADATA in names:
        return Contents("dcp", place, (METADATA, *DcpChunks(place).files))
    indexed = {name: _indexed(place, name) for name in names if name.endswith(_INDEX)}
    for kind, endings in (("safetensors", (".safetensors",)), ("torch", _PICKLED)):
        found = {name for name in names if name.endswith(endings)}
        for index, files in indexed.items():  # what an index names is part of it even where it is missing
            ours = {file for file in files if file.endswith(endings)}
            found |= {index, *ours} if ours else ours
        if found:
            return Contents(kind, place, tuple(sorted(found)))
    raise UnreadError(f"{shown(place)} holds no checkpoint; expected {_KINDS}")


def _file(place: Path) -> Contents:
    if place.name.endswith(_INDEX):
        files = sorted({place.name, *_indexed(place.parent, place.name)})
        kind = "safetensors" if all(file.endswith((".safetensors", _INDEX)) for file in files) else "torch"
        return Contents(kind, place.parent, tuple(files))
    return Contents("safetensors" if place.suffix == ".safetensors" else "torch", place.parent, (place.name,))


def _indexed(folder: Path, index: str) -> list[str]:
    names = read_object(inside(folder, index), "the index of a sharded checkpoint", _LARGEST_INDEX).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise UnreadError(f"{shown(folder / index)} is damaged: it has no weight_map of names to files")
    for file in set(names.values()):
        inside(folder, file)
    return sorted(set(names.values()))


@dataclass(slots=True)
class TensorHashes:
    """The tensors of some files: their hashes, and of those that cannot be read why.

    ``unread``: by (file, name, offsets); a name is empty where it is the file that cannot be read.
    """

    sealed: list[SealedTensor] = field(default_factory=list)
    home: dict[tuple[str, str, tuple[int, ...] | None], str] = field(default_factory=dict)
    """The file of each tensor, by its key."""
    unread: dict[tuple[str, str, tuple[int, ...] | None], str] = field(default_factory=dict)


def hashes_in(contents: Contents, files: tuple[str, ...] | None = None, *, damaged: bool = False) -> TensorHashes:
    """Read the tensors of some files, or of all, and hash them; nothing is raised for what is damaged.

    ``damaged``: the files are known to be; what can still be read is.
    """
    found = TensorHashes()
    wanted = set(contents.files if files is None else files)
    if contents.kind == "dcp":
        _read(found, contents, wanted, "", partial(_chunks, contents.folder), damaged=damaged)
        return found
    for file in sorted(wanted):
        if not file.endswith(_INDEX):
            opened = _safetensors if contents.kind == "safetensors" else _pickled
            _read(found, contents, {file}, file, partial(opened, contents.folder / file), damaged=damaged)
    return found


_Reads = Iterator[tuple[str, tuple[int, ...] | None, str, Callable[[], Tensor]]]


def _read(
    found: TensorHashes,
    contents: Contents,
    wanted: set[str],
    file: str,
    opened: Callable[..., _Reads],
    *,
    damaged: bool,
) -> None:
    try:
        for name, offsets, where, read in opened(damaged=damaged):
            home = where or file
            if home not in wanted:
                continue
            key = (name, "" if contents.kind == "dcp" else home, offsets)
            found.home[key] = home
            try:
                found.sealed.append(SealedTensor(*key, in_hex(bit_hash(read()))))
            except Exception as error:  # whatever damaged bytes make a reader raise
                found.unread[key] = _short(error)
    except Exception as error:
        found.unread["", file, None] = _short(error)


def _chunks(folder: Path, *, damaged: bool) -> _Reads:
    del damaged
    yield from DcpChunks(folder)


def _safetensors(path: Path, *, damaged: bool) -> _Reads:
    del damaged
    reader = TensorReader(path)
    for name in reader.keys():  # noqa: SIM118 - not a mapping
        yield name, None, "", partial(reader.read, name)


def _pickled(path: Path, *, damaged: bool) -> _Reads:
    for name, entry in read_torch_file(path, damaged=damaged).entries.items():
        yield name, None, "", entry.read


def _short(error: BaseException) -> str:
    text = ""
    with suppress(Exception):
        text = str(error)
    return shown((text.splitlines() or [type(error).__name__])[0])


def named(name: str, offsets: tuple[int, ...] | None) -> str:
    """Return how a tensor, or a chunk of one, is called in messages."""
    return quoted(name) if not offsets or not any(offsets) else f"{quoted(name)} (the chunk at {list(offsets)})"
