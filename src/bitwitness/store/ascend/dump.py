"""An ordinary dump file: a header that names tensors, then their bytes, one after the other.

    0      u64       N, the header's length
    8      N bytes   a protobuf message, DumpData
    8 + N  payloads  all inputs, all outputs, buffers, workspaces; each of its `size` bytes

Only the header is read until somebody asks for a tensor, so that a file of any size can be looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from bitwitness.files.reading import opened
from bitwitness.store.ascend.dtypes import PACKED_BITS, dtype_name, format_name, numpy_dtype
from bitwitness.store.ascend.wire import AscendFileError, Field, Span, fields, signed

NANO = 0x5A5A5A5A
"""With what the dumps of small devices begin, where an ordinary one has its header's length."""
_LARGEST_HEADER = 16 << 20
"""A header is read as a whole; it names tensors in some hundred bytes each, so that no real one comes near."""
_DIMENSIONS = 64  # NumPy's arrays have no more
_EXPECTED = "an Ascend dump file"
Kind = Literal["input", "output", "buffer", "space"]


@dataclass(frozen=True, slots=True)
class DumpTensor:
    """One tensor of a dump file.

    ``size``: bytes that its payload has; ``offset``: where in the file it is, None where it has none (its address was null).
    ``shape``: as stored, in ``format``; ``original_shape``: as the model has it.
    """

    path: Path
    kind: Kind
    index: int
    data_type: int = 0
    format: int = 0
    shape: tuple[int, ...] = ()
    original_shape: tuple[int, ...] = ()
    size: int = 0
    address: int = 0
    offset: int | None = None

    @property
    def dtype(self) -> str:
        """The data type's name."""
        return dtype_name(self.data_type)

    @property
    def layout(self) -> str:
        """The format's name."""
        return format_name(self.format)

    def raw(self) -> bytes:
        """Read the payload; empty where there is none.

        Raises
        ------
        AscendFileError
            If the file has become shorter.

        """
        if self.offset is None:
            return b""
        with opened(self.path, _EXPECTED) as file:
            file.seek(self.offset)
            data = file.read(self.size)
        if len(data) < self.size:
            raise AscendFileError(
                str(self.path), self.offset, f"{len(data)} bytes of {self.kind} {self.index}", f"{self.size} bytes"
            )
        return data

    def array(self) -> Any:
        """Read the payload as a NumPy array of its shape; of raw bytes (uint8) where NumPy has no such type.

        A payload that is not of the shape's size is returned flat.
        """
        import numpy as np

        data = self.raw()
        kind = numpy_dtype(self.dtype)
        count = math.prod(self.shape)
        bits = PACKED_BITS.get(self.dtype)
        if bits is not None and count * bits == len(data) * 8 and count != len(data):
            return _shaped(_unpacked(data, bits, self.dtype), self.shape)
        if kind is None or not kind.itemsize or len(data) % kind.itemsize:
            return np.frombuffer(data, dtype=np.uint8)
        return _shaped(np.frombuffer(data, dtype=kind), self.shape)


@dataclass(frozen=True, slots=True)
class DumpFile:
    """A dump file's header."""

    path: Path
    version: str = ""
    dump_time: int = 0
    op_name: str = ""
    inputs: tuple[DumpTensor, ...] = ()
    outputs: tuple[DumpTensor, ...] = ()
    buffers: tuple[DumpTensor, ...] = ()
    spaces: tuple[DumpTensor, ...] = ()
    attributes: dict[str, str] = field(default_factory=dict)
    message: str = ""

    @property
    def tensors(self) -> tuple[DumpTensor, ...]:
        """All of them, in the order of their payloads."""
        return (*self.inputs, *self.outputs, *self.buffers, *self.spaces)


def read_dump(path: Path) -> DumpFile:
    """Read a dump file's header.

    Raises
    ------
    AscendFileError
        If the file is damaged, or of another kind.
    UsageError
        If it cannot be opened or read.

    """
    with opened(path, _EXPECTED) as file:
        size = file.seek(0, 2)
        file.seek(0)
        start = file.read(8)
        name = str(path)
        if start[:4] == NANO.to_bytes(4, "little"):
            raise AscendFileError(name, 0, "a 'nano' dump (0x5A5A5A5A)", "an ordinary dump file; this kind is not read")
        if size <= 8:
            raise AscendFileError(name, 0, f"{size} bytes", "the header's length (8 bytes) and a header")
        length = int.from_bytes(start, "little")
        if not 0 < length <= size - 8 or length > _LARGEST_HEADER:
            raise AscendFileError(
                name, 0, f"a header of {length} bytes", f"between 1 and {size - 8}, what the file has left"
            )
        header = Span(name, file.read(length), 8)
    return _placed(parse_header(header, path), 8 + length, size)


def parse_header(header: Span, path: Path) -> DumpFile:
    """Read a DumpData message; fields that are newer than this reader are passed over."""
    texts = {1: "version", 6: "op_name", 9: "message"}
    values: dict[str, Any] = {}
    lists: dict[str, list[DumpTensor]] = {name: [] for name, _, _ in _LISTS.values()}
    attributes: dict[str, str] = {}
    for item in fields(header):
        if item.number in texts:
            values[texts[item.number]] = item.text()
        elif item.number == 2:
            values["dump_time"] = item.integer()
        elif item.number in _LISTS:
            name, kind, readers = _LISTS[item.number]
            lists[name].append(_tensor(item.message(), path, kind, len(lists[name]), readers))
        elif item.number == 7:
            pair = {part.number: part.text() for part in fields(item.message()) if part.number in (1, 2)}
            attributes[pair.get(1, "")] = pair.get(2, "")
    values |= {name: tuple(found) for name, found in lists.items()}
    return DumpFile(path, attributes=attributes, **values)


def _dims(item: Field) -> tuple[int, ...]:
    parts = [part for part in fields(item.message()) if part.number == 1]
    dims = tuple(dim for part in parts[: _DIMENSIONS + 1] for dim in part.integers(_DIMENSIONS))
    if len(dims) > _DIMENSIONS:
        raise item.span.error(0, f"a shape of more than {_DIMENSIONS} dimensions", "a tensor's shape")
    return dims


def _signed(item: Field) -> int:
    return signed(item.integer())


_Reader = tuple[str, Callable[[Field], Any]]
_OUTPUT: dict[int, _Reader] = {
    1: ("data_type", _signed),
    2: ("format", _signed),
    3: ("shape", _dims),
    6: ("size", Field.integer),
    7: ("original_shape", _dims),
    9: ("address", Field.integer),
}
_INPUT: dict[int, _Reader] = {
    1: ("data_type", _signed),
    2: ("format", _signed),
    3: ("shape", _dims),
    5: ("size", Field.integer),
    6: ("original_shape", _dims),
    8: ("address", Field.integer),
}
_PLAIN: dict[int, _Reader] = {3: ("size", Field.integer)}
_LISTS: dict[int, tuple[str, Kind, dict[int, _Reader]]] = {
    3: ("outputs", "output", _OUTPUT),
    4: ("inputs", "input", _INPUT),
    5: ("buffers", "buffer", _PLAIN),
    8: ("spaces", "space", _PLAIN),
}


def _tensor(span: Span, path: Path, kind: Kind, index: int, readers: dict[int, _Reader]) -> DumpTensor:
    values: dict[str, Any] = {}
    for item in fields(span):
        reader = readers.get(item.number)
        if reader is not None:
            values[reader[0]] = reader[1](item)
    if kind in ("buffer", "space"):
        values |= {"data_type": 4, "format": 2, "shape": (values.get("size", 0),)}
    return DumpTensor(path, kind, index, **values)


def _placed(dump: DumpFile, begin: int, size: int) -> DumpFile:
    """Give each tensor its place in the file; one whose address is null may have no payload, if else they do not fit."""
    tensors = dump.tensors
    whole = sum(tensor.size for tensor in tensors)
    left = size - begin
    # proto3 does not write a zero, so that an address that is not there is a null address.
    nullable = {id(t) for t in (*dump.inputs, *dump.outputs) if not t.address}
    absent = nullable if whole > left else set()
    present = sum(t.size for t in tensors if id(t) not in absent)
    # Without those at no address the rest must fit to the byte: else the file was cut, and its addresses are not filled in.
    if present > left or (absent and present != left):
        without = f", or {present} without those at no address" if absent else ""
        promised = f"{whole} bytes, what the header promises{without}"
        raise AscendFileError(str(dump.path), begin, f"{left} bytes after the header", promised)
    at = begin
    placed: dict[int, DumpTensor] = {}
    for tensor in tensors:
        if id(tensor) in absent:
            placed[id(tensor)] = tensor
        else:
            placed[id(tensor)] = replace(tensor, offset=at)
            at += tensor.size
    return replace(
        dump,
        inputs=tuple(placed[id(t)] for t in dump.inputs),
        outputs=tuple(placed[id(t)] for t in dump.outputs),
        buffers=tuple(placed[id(t)] for t in dump.buffers),
        spaces=tuple(placed[id(t)] for t in dump.spaces),
    )


def _shaped(values: Any, shape: tuple[int, ...]) -> Any:
    """Return an array in its shape, or flat where that is of another size (or beyond what NumPy can count)."""
    try:
        return values.reshape(shape) if values.size == math.prod(shape) else values
    except (ValueError, OverflowError):
        return values


def _unpacked(data: bytes, bits: int, name: str) -> Any:
    """Return packed small numbers one to a byte: signed ones as int8, unsigned as uint8, float4 as float32."""
    import numpy as np

    packed = np.frombuffer(data, dtype=np.uint8)
    mask = (1 << bits) - 1
    values = np.stack([(packed >> shift) & mask for shift in range(0, 8, bits)], axis=-1).reshape(-1)
    if name.startswith("float"):
        import ml_dtypes

        return values.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    if name.startswith("int"):
        return np.where(values >> (bits - 1), values.astype(np.int16) - (1 << bits), values).astype(np.int8)
    return values
