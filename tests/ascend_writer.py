"""Writes Ascend dump and overflow files, from the format's description alone: shares no code with the reader."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


def varint(value: int) -> bytes:
    out = bytearray()
    while True:
        out.append(value & 0x7F | (0x80 if value > 0x7F else 0))
        value >>= 7
        if not value:
            return bytes(out)


def number(field: int, value: int) -> bytes:
    """A varint field; proto3 leaves zeros out."""
    return varint(field << 3) + varint(value & (1 << 64) - 1) if value else b""


def nested(field: int, data: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(data)) + data


def shape(dims: Sequence[int], *, packed: bool = True) -> bytes:
    if packed:
        return nested(1, b"".join(map(varint, dims))) if dims else b""
    return b"".join(varint(1 << 3) + varint(dim) for dim in dims)


@dataclass
class Tensor:
    """One tensor to write; ``address`` 0 leaves the payload out where ``absent``."""

    data_type: int
    dims: tuple[int, ...]
    payload: bytes
    layout: int = 2
    address: int = 0x1000
    absent: bool = False
    packed: bool = True

    def output(self) -> bytes:
        return (
            number(1, self.data_type)
            + number(2, self.layout)
            + nested(3, shape(self.dims, packed=self.packed))
            + number(6, len(self.payload))
            + nested(7, shape(self.dims))
            + number(9, self.address)
        )

    def input(self) -> bytes:
        return (
            number(1, self.data_type)
            + number(2, self.layout)
            + nested(3, shape(self.dims, packed=self.packed))
            + number(5, len(self.payload))
            + nested(6, shape(self.dims))
            + number(8, self.address)
        )


def dump(
    inputs: Sequence[Tensor] = (),
    outputs: Sequence[Tensor] = (),
    buffers: Sequence[bytes] = (),
    spaces: Sequence[bytes] = (),
    name: str = "Conv2D_1",
    attributes: Sequence[tuple[str, str]] = (),
    extra: bytes = b"",
) -> bytes:
    """A whole dump file."""
    header = nested(1, b"2.0") + number(2, 1_600_000_000_000_000)
    header += b"".join(nested(3, t.output()) for t in outputs) + b"".join(nested(4, t.input()) for t in inputs)
    header += b"".join(nested(5, number(3, len(b))) for b in buffers) + nested(6, name.encode())
    header += b"".join(nested(7, nested(1, k.encode()) + nested(2, v.encode())) for k, v in attributes)
    header += b"".join(nested(8, number(3, len(s))) for s in spaces) + extra
    payload = b"".join(t.payload for t in [*inputs, *outputs] if not t.absent) + b"".join([*buffers, *spaces])
    return struct.pack("<Q", len(header)) + header + payload


CORE = {
    "model_id": 514,
    "stream_id": 563,
    "task_id": 57,
    "task_type": 0,
    "pc_start": 0x1008005B0000,
    "para_base": 0x100800297000,
    "kernel_code": 0x1008005AE000,
    "block_idx": 1,
    "status": 32,
}
"""The published example."""


def record(
    core: dict[str, int] | None = None, dha: dict[str, int] | None = None, l2: dict[str, int] | None = None
) -> bytes:
    """A version 1 overflow record."""
    data = bytearray(2048)
    task = ("model_id", "stream_id", "task_id", "task_type", "pc_start", "para_base")
    for at, status_at, given in ((0, 512, dha), (128, 768, l2), (256, 1040, core)):
        values = given or {}
        struct.pack_into("<6Q", data, at, *(values.get(name, 0) for name in task))
        struct.pack_into("<Q", data, status_at, values.get("status", 0))
    core = core or {}
    struct.pack_into("<2Q", data, 1024, core.get("kernel_code", 0), core.get("block_idx", 0))
    return bytes(data)


def second(kind: int, numbers: Sequence[int], version: int = 0) -> bytes:
    """A version 2 overflow record."""
    body = struct.pack("<6I", 0x5A5A5A5A, version, 1, kind, 0, 8 * len(numbers))
    return (body + struct.pack(f"<{len(numbers)}Q", *numbers)).ljust(2048, b"\0")


def opdebug(data: bytes) -> bytes:
    """The dump file around a record."""
    return dump(outputs=[Tensor(4, (len(data),), data)], name="Node_OpDebug")


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path
