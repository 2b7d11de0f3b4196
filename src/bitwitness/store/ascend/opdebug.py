"""Overflow (OpDebug) records: which operator overflowed on which unit, in the two versions that devices write.

The record is the one output of a dump file, 2048 bytes; a bare record of that size is read, too.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitwitness.files.reading import opened
from bitwitness.store.ascend.dump import read_dump
from bitwitness.store.ascend.status import CORES, Decoded, decode
from bitwitness.store.ascend.wire import AscendFileError

SIZE = 2048
_MAGIC = 0x5A5A5A5A  # begins a record of the newer version
_TASK = ("model_id", "stream_id", "task_id", "task_type", "pc_start", "para_base")
_HEX = frozenset({"pc_start", "para_base", "kernel_code", "src_addr", "dst_addr"})
# Of the older version, the units' places in the record: the offset of the task, and that of the status.
_PLACES = {"DHA Atomic Add": (0, 512), "L2 Atomic Add": (128, 768), "AI Core": (256, 1040)}
_HEAD = ("version", "valid", "acc_type", "rsv", "data_len")
_THREAD = ("model_id", "stream_id", "task_id", "task_type", "context_id", "thread_id")
_CORE = (*_THREAD, "pc_start", "para_base", "core_id", "block_id", "status")
_UNITS = {
    0: ("AIC", _CORE),
    1: ("AIV", _CORE),
    2: ("AICPU", ("model_id", "stream_id", "task_id", "task_type", "context_id", "cpu_id", "thread_id", "status")),
    3: ("SDMA", (*_THREAD, "src_addr", "dst_addr", "channel_id", "status")),
}
_NO_THREAD = 65535  # what the device writes where a task has no thread


@dataclass(frozen=True, slots=True)
class Record:
    """One unit's record. ``fields``: numbers by name, in the file's order; the status of a version with four is a tuple."""

    unit: str
    fields: dict[str, int | tuple[int, ...]]

    def number(self, name: str) -> int:
        """Return a field as one number; 0 where the unit has no such field."""
        value = self.fields.get(name, 0)
        return value if isinstance(value, int) else next((part for part in value if part), 0)

    @property
    def overflowed(self) -> bool:
        """Whether its status is set."""
        return self.number("status") != 0

    @property
    def decoded(self) -> Decoded:
        """Its status in words."""
        return decode(self.number("status"), self.unit)

    @property
    def thread(self) -> tuple[int | None, int | None]:
        """Context and thread, None where the operator had none."""
        pair = (self.fields.get("context_id"), self.fields.get("thread_id"))
        context, thread = (None if value in (None, _NO_THREAD) else int(str(value)) for value in pair)
        return context, thread

    def to_json(self) -> dict[str, Any]:
        """Return the fields as the vendor's converter writes them: addresses in hexadecimal, the rest decimal."""
        return {
            name: list(value) if isinstance(value, tuple) else hex(value) if name in _HEX else value
            for name, value in self.fields.items()
        }


@dataclass(frozen=True, slots=True)
class OpDebug:
    """An overflow file's records; ``head`` holds what version 2 says of itself."""

    version: int
    records: tuple[Record, ...]
    head: dict[str, int]

    @property
    def overflowed(self) -> tuple[Record, ...]:
        """The records whose status is set."""
        return tuple(record for record in self.records if record.overflowed)

    def to_json(self) -> dict[str, Any]:
        """Return the vendor's JSON."""
        if self.version == 1:
            return {record.unit: record.to_json() for record in self.records}
        (record,) = self.records
        return {
            "magic": hex(_MAGIC),
            "version": self.head["version"],
            "acc_list": {
                "valid": self.head["valid"],
                "acc_type": record.unit,
                "rsv": self.head["rsv"],
                "data_len": self.head["data_len"],
                "data": record.to_json(),
            },
        }


def is_opdebug_name(name: str) -> bool:
    """Tell whether a file name is an overflow file's; documents spell it in two ways."""
    return name.lower().startswith("opdebug.node_opdebug")


def read_opdebug(path: Path) -> OpDebug:
    """Read an overflow file.

    Raises
    ------
    AscendFileError
        If the file is damaged, or holds no overflow record.
    UsageError
        If it cannot be opened or read.

    """
    with opened(path, "an overflow file of an Ascend device") as file:
        bare = file.read(SIZE) if file.seek(0, 2) == SIZE and not file.seek(0) else b""
    if bare and not 0 < int.from_bytes(bare[:8], "little") <= SIZE - 8:
        return parse_opdebug(bare, str(path), 0)
    try:
        data, begin = _payload(path)
    except AscendFileError:
        if not bare:
            raise
        data, begin = bare, 0  # a record may begin with a small number, as a header does
    return parse_opdebug(data, str(path), begin)


def _payload(path: Path) -> tuple[bytes, int]:
    """Return the record inside a dump file, and where it begins."""
    dump = read_dump(path)
    output = next((tensor for tensor in dump.outputs if tensor.offset is not None), None)
    if output is None or output.offset is None:
        raise AscendFileError(str(path), 8, f"{len(dump.outputs)} outputs", "one output that holds the overflow record")
    if output.size > 2 * SIZE:
        raise AscendFileError(
            str(path), output.offset, f"an output of {output.size} bytes", f"a record of {SIZE} bytes"
        )
    return output.raw(), output.offset


def parse_opdebug(data: bytes, name: str, begin: int) -> OpDebug:
    """Read an overflow record's bytes, which begin at byte ``begin`` of the file called ``name``."""
    if len(data) >= 24 and data[:4] == _MAGIC.to_bytes(4, "little"):
        return _second(data, name, begin)
    if len(data) != SIZE:
        raise AscendFileError(name, begin, f"an overflow record of {len(data)} bytes", f"{SIZE} bytes")
    records = []
    for unit, (at, status_at) in _PLACES.items():
        fields: dict[str, int | tuple[int, ...]] = dict(zip(_TASK, struct.unpack_from("<6Q", data, at), strict=True))
        if unit == "AI Core":
            fields["kernel_code"], fields["block_idx"] = struct.unpack_from("<2Q", data, 1024)
        (fields["status"],) = struct.unpack_from("<Q", data, status_at)
        records.append(Record(unit, fields))
    return OpDebug(1, tuple(records), {})


def _second(data: bytes, name: str, begin: int) -> OpDebug:
    head = dict(zip(_HEAD, struct.unpack_from("<5I", data, 4), strict=True))
    if head["acc_type"] not in _UNITS:
        raise AscendFileError(
            name, begin + 12, f"accelerator type {head['acc_type']}", "0 (AIC), 1 (AIV), 2 (AICPU) or 3 (SDMA)"
        )
    unit, names = _UNITS[head["acc_type"]]
    parts = 4 if head["version"] == 1 and unit in CORES else 1
    count = len(names) - 1 + parts
    if len(data) < 24 + 8 * count:
        raise AscendFileError(name, begin + 24, f"{len(data) - 24} bytes of {unit} record", f"{8 * count} bytes")
    numbers = struct.unpack_from(f"<{count}Q", data, 24)
    fields: dict[str, int | tuple[int, ...]] = dict(zip(names[:-1], numbers, strict=False))
    fields["status"] = numbers[-1] if parts == 1 else numbers[-parts:]
    return OpDebug(2, (Record(unit, fields),), head)
