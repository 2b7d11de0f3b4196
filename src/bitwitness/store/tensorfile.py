"""Tensors on disk as safetensors, written as they come: room for the header is left in front, and filled in at the end."""

from __future__ import annotations

import json
import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in _NAMES.items()}
"""torch's dtypes by their names in a safetensors header."""

ENTRY_BYTES = 320
"""What an entry of a header may take beside its key, up to eight dimensions."""


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
        self._size = 0
        descriptor = os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._file: BinaryIO = os.fdopen(descriptor, "wb", buffering=0)
        self._file.seek(8 + self.reserve)

    def add(self, key: str, tensor: torch.Tensor) -> None:
        """Append a contiguous CPU tensor; one of a dtype that safetensors does not know lies there as bytes."""
        name = _NAMES.get(tensor.dtype)
        shape = list(tensor.shape)
        data = tensor.reshape(-1).view(torch.uint8).numpy()
        if name is None:
            name, shape = "U8", [data.nbytes]
        entry = {"dtype": name, "shape": shape, "data_offsets": [self._size, self._size + data.nbytes]}
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]
        self._entries[key] = entry
        self._size += data.nbytes

    def close(self) -> None:
        """Write the header and give the file its name."""
        text = json.dumps(self._entries, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) > self.reserve:
            raise OSError(f"the header of {self.path.name} takes {len(text)} bytes; {self.reserve} were left for it")
        self._file.seek(0)
        self._file.write(struct.pack("<Q", self.reserve) + text.ljust(self.reserve))
        self._file.close()
        self._part.replace(self.path)

    def abandon(self) -> None:
        """Leave nothing behind."""
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            self._part.unlink()
