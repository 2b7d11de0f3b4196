"""Checkpoints of `torch.distributed.checkpoint`: torch puts each tensor together from the chunks that the ranks wrote."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bitwitness.errors import UnreadError, UsageError
from bitwitness.files.reading import opened
from bitwitness.files.shown import quoted, shown
from bitwitness.store.dcp_metadata import Plain, read_metadata
from bitwitness.store.entry import FoundTensors, TensorEntry, inside, is_shape
from bitwitness.store.torchfile import tensor_from

METADATA = ".metadata"
_MOST_CHUNKS = 1 << 15  # of one tensor: each is held against all others

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A part of a tensor: where it begins, how large it is, and which bytes hold it."""

    offsets: Sizes
    sizes: Sizes
    file: str
    first: int
    length: int


def read_dcp(folder: Path) -> FoundTensors:
    """Open a checkpoint of `torch.distributed.checkpoint`.

    Raises
    ------
    UsageError
        If its metadata is damaged, or names anything but numbers, names and dtypes.

    """
    metadata = read_metadata(inside(folder, METADATA))
    described, stored = metadata.get("state_dict_metadata"), _stored(metadata.get("storage_data"))
    if not isinstance(described, dict):
        raise UnreadError(
            f"{folder / METADATA} is damaged: it describes no state; expected what torch's dcp.save writes"
        )
    found = FoundTensors({}, [])
    for name, about in described.items():
        if isinstance(name, str) and type(about).__name__ == "BytesStorageMetadata":
            found.ignored += 1  # numbers and objects are pickled one by one
            continue
        if not isinstance(name, str) or not isinstance(about, Plain):
            found.problems.append(f"{shown(folder)}: {quoted(name)} was left out: its description is damaged")
            continue
        try:
            found.entries[name] = _entry(folder, name, about, stored)
        except UsageError as error:
            found.problems.append(f"{shown(folder)}: {quoted(name)} was left out: {error}")
    return found


def _unread(error: UsageError) -> torch.Tensor:
    raise error


class DcpChunks:
    """The chunks of a checkpoint of `torch.distributed.checkpoint`, each by itself, and the files that hold anything.

    Attributes
    ----------
    files
        The plain names of all files that the metadata names, numbers' and objects' too, sorted.

    Raises
    ------
    UsageError
        As `read_dcp`, or if a file's name leads out of the folder.

    """

    def __init__(self, folder: Path) -> None:
        metadata = read_metadata(inside(folder, METADATA))
        described, stored = metadata.get("state_dict_metadata"), _stored(metadata.get("storage_data"))
        if not isinstance(described, dict):
            raise UnreadError(f"{folder / METADATA} is damaged: it describes no state")
        self._folder = folder
        self._undescribed: dict[str, UsageError] = {}
        self.files = _files_named(metadata)
        for name in self.files:
            inside(folder, name)
        self._chunks: list[tuple[str, torch.dtype, _Chunk]] = []
        for name, about in described.items():
            if isinstance(about, Plain) and type(about).__name__ != "BytesStorageMetadata":
                try:
                    dtype, _, chunks = _described(str(name), about, stored)
                except UsageError as error:
                    self._undescribed[str(name)] = UsageError(f"{quoted(name)}: {error}")
                    continue
                self._chunks += [(str(name), dtype, chunk) for chunk in chunks]

    def __iter__(self) -> Iterator[tuple[str, Sizes | None, str, Callable[[], torch.Tensor]]]:
        """Yield each chunk's tensor, its offsets, the file that holds it, and what reads it (raises `UnreadError`).

        A tensor whose description is damaged has no offsets, is the metadata's, and cannot be read (`UsageError`).
        """
        for name, error in self._undescribed.items():
            yield name, None, METADATA, partial(_unread, error)
        for name, dtype, chunk in self._chunks:
            yield name, chunk.offsets, chunk.file, partial(self._read, name, dtype, chunk)

    def _read(self, name: str, dtype: torch.dtype, chunk: _Chunk) -> torch.Tensor:
        return _loaded(inside(self._folder, chunk.file), f"{shown(self._folder)}: {quoted(name)}", chunk, dtype)


def _files_named(metadata: dict[Any, Any]) -> list[str]:
    data = metadata.get("storage_data")
    infos = data.values() if isinstance(data, dict) else ()
    names = {info.fields.get("relative_path") for info in infos if isinstance(info, Plain)}
    return sorted(name for name in names if isinstance(name, str))


def _stored(data: Any) -> dict[tuple[str, Sizes], dict[str, Any]]:
    """Return what holds each chunk, by the tensor's name and the chunk's offsets."""
    stored: dict[tuple[str, Sizes], dict[str, Any]] = {}
    for index, info in data.items() if isinstance(data, dict) else ():
        if isinstance(index, Plain) and isinstance(info, Plain):
            name, offsets = index.fields.get("fqn"), index.fields.get("offset")
            if isinstance(name, str) and is_shape(offsets):
                stored[name, offsets] = info.fields
    return stored


def _entry(folder: Path, name: str, about: Plain, stored: dict[tuple[str, Sizes], dict[str, Any]]) -> TensorEntry:
    dtype, shape, chunks = _described(name, about, stored)
    return TensorEntry(dtype, shape, lambda: _whole(folder, name, dtype, shape, chunks))


def _described(
    name: str, about: Plain, stored: dict[tuple[str, Sizes], dict[str, Any]]
) -> tuple[torch.dtype, Sizes, list[_Chunk]]:
    shape, parts, properties = (about.fields.get(key) for key in ("size", "chunks", "properties"))
    dtype = properties.first("dtype") if isinstance(properties, Plain) else None
    if not is_shape(shape) or not isinstance(parts, list) or not isinstance(dtype, torch.dtype):
        raise UnreadError("its description is damaged; expected dtype, size and chunks")
    chunks = {_chunk(part, name, shape, stored) for part in parts}
    return dtype, shape, sorted(chunks, key=lambda chunk: chunk.offsets)


def _chunk(part: Any, name: str, shape: Sizes, stored: dict[tuple[str, Sizes], dict[str, Any]]) -> _Chunk:
    fields = part.fields if isinstance(part, Plain) else {}
    offsets, sizes = fields.get("offsets"), fields.get("sizes")
    if not is_shape(offsets) or not is_shape(sizes) or not len(offsets) == len(sizes) == len(shape):
        raise UnreadError(f"a chunk of it is damaged; expected offsets and sizes of {len(shape)} dimensions")
    if any(first + size > end for first, size, end in zip(offsets, sizes, shape, strict=True)):
        raise UnreadError(f"a chunk at {list(offsets)} of {list(sizes)} does not fit into its shape {list(shape)}")
    info = stored.get((name, offsets), {})
    file, first, length = (info.get(key) for key in ("relative_path", "offset", "length"))
    place = (first, length)
    if not isinstance(file, str) or not is_shape(place):
        raise UnreadError(f"the metadata does not say where its chunk at {list(offsets)} is stored")
    if info.get("transform_descriptors"):
        raise UnreadError("it was stored compressed or otherwise transformed; save it without extensions")
    return _Chunk(offsets, sizes, file, *place)


def _whole(folder: Path, name: str, dtype: torch.dtype, shape: Sizes, chunks: list[_Chunk]) -> torch.Tensor:
    """Load the chunks and put them in their places."""
    where = f"{shown(folder)}: {quoted(name)}"
    _check_cover(where, shape, chunks)
    paths = {chunk.file: inside(folder, chunk.file) for chunk in chunks}
    sizes = {file: _size(path) for file, path in paths.items()}
    if math.prod(shape) * dtype.itemsize > sum(sizes.values()):
        raise UnreadError(
            f"{where} claims shape {list(shape)}, which is more than its files hold; the metadata is damaged"
        )
    whole: torch.Tensor | None = None
    for chunk in chunks:
        tensor = _loaded(paths[chunk.file], where, chunk, dtype)
        if chunk.sizes == shape:
            return tensor
        whole = torch.empty(shape, dtype=dtype) if whole is None else whole
        whole[tuple(slice(first, first + size) for first, size in zip(chunk.offsets, chunk.sizes, strict=True))] = (
            tensor
        )
    return torch.empty(shape, dtype=dtype) if whole is None else whole


def _loaded(path: Path, where: str, chunk: _Chunk, dtype: torch.dtype) -> torch.Tensor:
    size = _size(path)
    if chunk.first + chunk.length > size or math.prod(chunk.sizes) * dtype.itemsize > chunk.length:
        raise UnreadError(
            f"{where}: the chunk at {list(chunk.offsets)} should be {chunk.length} bytes from byte {chunk.first} of "
            f"{chunk.file!r}, which has {size}; the file was cut short or the metadata is damaged"
        )
    tensor = tensor_from(_bytes(path, chunk), f"{where}, chunk at {list(chunk.offsets)} in {chunk.file!r}")
    if tensor.dtype != dtype or tuple(tensor.shape) != chunk.sizes:
        raise UnreadError(
            f"{where}: the chunk at {list(chunk.offsets)} is {tensor.dtype} {list(tensor.shape)}; the metadata says "
            f"{dtype} {list(chunk.sizes)}: one of them is damaged"
        )
    return tensor


def _check_cover(where: str, shape: Sizes, chunks: list[_Chunk]) -> None:
    """Refuse chunks that leave something out, or lie on one another."""
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        raise UnreadError(
            f"{where}: its {len(chunks)} chunks do not make up its shape {list(shape)}; files of ranks are missing"
        )
    full = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    if len(full) < 2:
        return
    if len(full) > _MOST_CHUNKS:
        raise UnreadError(f"{where}: it has {len(full)} chunks; expected at most {_MOST_CHUNKS}, one for each rank")
    first = np.array([chunk.offsets for chunk in full], dtype=np.int64)
    end = first + np.array([chunk.sizes for chunk in full], dtype=np.int64)
    for i in range(len(full) - 1):
        if ((first[i] < end[i + 1 :]) & (first[i + 1 :] < end[i])).all(axis=1).any():
            raise UnreadError(f"{where}: the chunk at {first[i].tolist()} lies over another; the metadata is damaged")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise UnreadError(f"cannot read {path}: {error.strerror}; a file of the checkpoint is missing") from error


def _bytes(path: Path, chunk: _Chunk) -> bytes:
    try:
        with opened(path, "a file of a DCP checkpoint") as file:
            file.seek(chunk.first)
            return file.read(chunk.length)
    except ValueError as error:  # an offset that no file has
        raise UnreadError(f"cannot read {shown(path)}: {error}; the metadata is damaged") from error
