"""Tensors on disk as safetensors, written as they come: room for the header is left in front, and filled in at the end.

Torch is imported where a tensor is read, not before.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from bitwitness.errors import UnreadError
from bitwitness.files.reading import open_file, parsed_json
from bitwitness.store.seal import Seal

if TYPE_CHECKING:
    import torch

_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}

ENTRY_BYTES = 320
"""What an entry of a header may take beside its key, up to eight dimensions, with its checksum."""
_SUMS = "crc32"
"""Of the file's metadata: the CRC-32 of each tensor's bytes, in the order of the entries."""


class TensorFile:
    """One safetensors file in the making; it bears its name only when it is whole.

    Parameters
    ----------
    path
        Its final name.
    reserve
        Bytes of header for which room is left.

    Raises
    ------
    OSError
        From any method, if it cannot be written.

    """

    def __init__(self, path: Path, reserve: int) -> None:
        self.path = path
        self.reserve = reserve // 8 * 8
        self._part = path.with_name(path.name + ".part")
        self._entries: dict[str, Any] = {}
        self._sums: list[str] = []
        self._size = 0
        descriptor = os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._file: BinaryIO = os.fdopen(descriptor, "wb", buffering=0)
        self._file.seek(8 + self.reserve)

    def add(self, key: str, tensor: torch.Tensor) -> None:
        """Append a contiguous CPU tensor; one of a dtype that safetensors does not know lies there as bytes."""
        name = _NAMES.get(str(tensor.dtype).removeprefix("torch."))
        shape = list(tensor.shape)
        from bitwitness.stats.local import as_bytes  # with torch, which is there where a tensor is

        data = as_bytes(tensor).numpy()
        if name is None:
            name, shape = "U8", [data.nbytes]
        entry = {"dtype": name, "shape": shape, "data_offsets": [self._size, self._size + data.nbytes]}
        view = memoryview(data.data)
        while view:
            view = view[self._file.write(view) :]
        self._entries[key] = entry
        self._sums.append(f"{zlib.crc32(data.data):08x}")
        self._size += data.nbytes

    def close(self, seal: Seal | None = None) -> None:
        """Write the header and give the file its name; ``seal`` notes it first."""
        header = {**self._entries, "__metadata__": {_SUMS: ",".join(self._sums)}}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) > self.reserve:
            raise OSError(f"the header of {self.path.name} takes {len(text)} bytes; {self.reserve} were left for it")
        self._file.seek(0)
        self._file.write(struct.pack("<Q", self.reserve) + text.ljust(self.reserve))
        self._file.close()
        if seal is not None:
            seal.add(f"{self.path.parent.name}/{self.path.name}", self._part, 8 + self.reserve)
        self._part.replace(self.path)

    def abandon(self) -> None:
        """Leave nothing behind."""
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            self._part.unlink()


# -- reading -----------------------------------------------------------------------------------------------------

_LONGEST_HEADER = 256 << 20  # read as a whole: at `ENTRY_BYTES` each, some 800,000 tensors


class TensorReader:
    """Reads tensors of one safetensors file; nothing in it is trusted.

    Parameters
    ----------
    path
        The file.

    Raises
    ------
    UsageError
        If it is no such file, is cut short, or its header contradicts itself.

    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with open_file(path, "a safetensors file") as file:
            try:
                self._size = os.fstat(file.fileno()).st_size
                first = file.read(8)
                length = struct.unpack("<Q", first)[0] if len(first) == 8 else -1
                if not 2 <= length <= min(_LONGEST_HEADER, self._size - 8):
                    raise self._damaged("its header does not fit into the file")
                text = file.read(length)
            except OSError as error:
                raise self._damaged(error.strerror or str(error)) from error
        found = parsed_json(text, path, "a safetensors file with a header in JSON")
        if not isinstance(found, dict):
            raise self._damaged("its header is no object")
        sums = found.pop("__metadata__", None)
        self._entries: dict[str, Any] = found
        self._sums = _sums(sums, found)
        self._begin = 8 + length

    def damage(self) -> list[str]:
        """Return what is wrong with any tensor's bytes; reads them all, without torch."""
        found = []
        with open_file(self._path, "a safetensors file") as file:
            for key, crc in self._sums.items():
                entry = self._entries[key]
                try:
                    first, last = entry["data_offsets"]
                    file.seek(self._begin + first)
                    whole = f"{zlib.crc32(file.read(last - first)):08x}" == crc
                except (KeyError, TypeError, ValueError, OSError):
                    whole = False
                if not whole:
                    found.append(
                        str(self._damaged(f"the bytes of {key!r} are not those that were written (CRC-32 differs)"))
                    )
        return found

    def _damaged(self, why: str) -> UnreadError:
        return UnreadError(f"{self._path} is damaged: {why}; expected a whole safetensors file")

    def keys(self) -> list[str]:
        """Return the tensors' names."""
        return list(self._entries)

    def describe(self, key: str) -> tuple[torch.dtype, tuple[int, ...], int, int]:
        """Return a tensor's dtype, shape, and where its bytes begin and end in the file."""
        entry = self._entries.get(key)
        if not isinstance(entry, dict):
            raise UnreadError(f"{self._path} holds no tensor {key!r}; the recording is damaged or incomplete")
        known, shape, offsets = _DTYPES.get(str(entry.get("dtype"))), entry.get("shape"), entry.get("data_offsets")
        dtype: torch.dtype | None = None if known is None else getattr(_torch(), known)
        if dtype is None or not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2:  # type: ignore[arg-type]
            raise self._damaged(f"the entry of {key!r} is {str(entry)[:200]}")
        first, last = offsets  # type: ignore[misc]
        wanted = math.prod(shape) * dtype.itemsize  # type: ignore[arg-type]
        if last - first != wanted or self._begin + last > self._size:
            raise self._damaged(f"{key!r} needs {wanted} bytes and has {last - first}, of {self._size} in the file")
        return dtype, tuple(shape), self._begin + first, self._begin + last  # type: ignore[arg-type]

    def read(self, key: str) -> torch.Tensor:
        """Return a tensor as it lies there; mapped, not copied."""
        dtype, shape, first, last = self.describe(key)
        if first == last:
            empty: torch.Tensor = _torch().empty(shape, dtype=dtype)
            return empty
        data = np.memmap(self._path, dtype=np.uint8, mode="c", offset=first, shape=(last - first,))
        if key in self._sums and f"{zlib.crc32(data.data):08x}" != self._sums[key]:
            raise self._damaged(f"the bytes of {key!r} are not those that were written (CRC-32 differs)")
        if data.ctypes.data % dtype.itemsize:
            data = data.copy()  # torch reads aligned numbers only
        mapped: torch.Tensor = _torch().from_numpy(data)
        return mapped.view(dtype).view(shape)


def _sums(metadata: Any, entries: dict[str, Any]) -> dict[str, str]:
    """Return the tensors' checksums, where the file is one of ours."""
    text = metadata.get(_SUMS) if isinstance(metadata, dict) else None
    sums = text.split(",") if isinstance(text, str) and text else []
    return dict(zip(entries, sums, strict=True)) if len(sums) == len(entries) else {}


def _torch() -> Any:
    import torch

    return torch


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value)
