"""Protocol buffers' wire format, as much of it as dump files use: fields in order, nothing allocated that is not there.

The format is public: protobuf.dev/programming-guides/encoding. A message here is bytes in memory; nested messages are
slices of it, read where the caller asks for them, so that no input can make the reader recurse.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bitwitness.errors import UnreadError
from bitwitness.files.shown import shown

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types; 3 and 4, groups, are out of use
_LONGEST_VARINT = 10  # bytes: 64 bits, seven to a byte
_MOST_FIELDS = 100_000  # of one message; a dump file's has one for each tensor and attribute


class AscendFileError(UnreadError):
    """A dump file is not what it should be; the message names the file and the byte."""

    def __init__(self, name: str, offset: int, seen: str, expected: str) -> None:
        super().__init__(
            f"{shown(name)}, byte {offset}: {seen}; expected {expected}. Is the file complete, and of this kind?"
        )
        self.offset = offset


@dataclass(frozen=True, slots=True)
class Span:
    """Part of a file's bytes, and where it begins in the file."""

    name: str
    data: bytes
    begin: int = 0

    def error(self, at: int, seen: str, expected: str) -> AscendFileError:
        """Return an error about the byte at ``at`` of this span."""
        return AscendFileError(self.name, self.begin + at, seen, expected)


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a message: its number, and a number or a nested span."""

    number: int
    kind: int
    value: int
    span: Span

    def integer(self) -> int:
        """Return an unsigned number."""
        if self.kind == BYTES:
            raise self.span.error(0, f"field {self.number} holds bytes", "a number")
        return self.value

    def message(self) -> Span:
        """Return nested bytes."""
        if self.kind != BYTES:
            raise self.span.error(0, f"field {self.number} holds a number", "a nested message, text or bytes")
        return self.span

    def text(self) -> str:
        """Return text; bytes that are no UTF-8 are shown as escapes."""
        return self.message().data.decode("utf-8", "backslashreplace")

    def integers(self, most: int) -> list[int]:
        """Return the numbers of a repeated field, packed or one of many; no more than ``most``."""
        if self.kind != BYTES:
            return [self.value]
        if len(self.span.data) > most * _LONGEST_VARINT:
            raise self.span.error(0, f"{len(self.span.data)} bytes of numbers", f"at most {most} numbers")
        found, at = [], 0
        while at < len(self.span.data):
            value, at = read_varint(self.span, at)
            found.append(value)
        return found


def read_varint(span: Span, at: int) -> tuple[int, int]:
    """Return the number that begins at ``at``, and where the next byte is."""
    value = 0
    for index in range(_LONGEST_VARINT):
        if at + index >= len(span.data):
            raise span.error(at, "the bytes end inside a number", "more bytes")
        byte = span.data[at + index]
        value |= (byte & 0x7F) << (7 * index)
        if not byte & 0x80:
            return value & (1 << 64) - 1, at + index + 1
    raise span.error(at, f"a number of more than {_LONGEST_VARINT} bytes", "at most ten")


def fields(span: Span) -> Iterator[Field]:
    """Yield a message's fields in order.

    Raises
    ------
    AscendFileError
        Where the bytes are no message.

    """
    at = count = 0
    while at < len(span.data):
        began, count = at, count + 1
        if count > _MOST_FIELDS:
            raise span.error(began, f"more than {_MOST_FIELDS:,} fields in one message", "a message of a dump file")
        key, at = read_varint(span, at)
        number, kind = key >> 3, key & 7
        if number == 0:
            raise span.error(began, "field number 0", "a field number from 1")
        if kind == VARINT:
            value, at = read_varint(span, at)
            yield Field(number, kind, value, Span(span.name, b"", span.begin + began))
            continue
        size = {FIXED64: 8, FIXED32: 4}.get(kind)
        if size is None and kind != BYTES:
            raise span.error(began, f"field {number} of wire type {kind}", "wire type 0, 1, 2 or 5")
        if size is None:
            size, at = read_varint(span, at)
        if size > len(span.data) - at:
            raise span.error(
                at, f"field {number} of {size} bytes where {len(span.data) - at} are left", "a size that fits"
            )
        part = Span(span.name, span.data[at : at + size], span.begin + at)
        value = int.from_bytes(part.data, "little") if kind != BYTES else 0
        yield Field(number, kind, value, part)
        at += size


def signed(value: int, bits: int = 32) -> int:
    """Return a varint as the signed number that it stands for."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value
