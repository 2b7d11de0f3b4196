"""All overflows below a dump path: which unit, which operator, what the status means, the earliest first."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bitwitness.errors import UnreadError, UsageError
from bitwitness.files.reading import files_below, opened
from bitwitness.files.shown import shown
from bitwitness.store.ascend.names import DumpName, Place, parse_name, place_of, read_mapping
from bitwitness.store.ascend.opdebug import Record, is_opdebug_name, read_opdebug

_TABLES = (".csv", ".json", ".npy", ".safetensors", ".txt", ".part")
_EXPECTED = "a dump path, or a folder below it (a file is read with: ascend convert)"
_LOG = "a runtime log of level INFO, or a folder of them"
_LONGEST_LINE = 1 << 16  # bytes of a log's line that are looked at; a log may lack line ends where it is damaged
_STREAM = re.compile(rb"stream_?id\s*[=:]\s*(\d+)", re.IGNORECASE)
_TASK = re.compile(rb"task_?id\s*[=:]\s*(\d+)", re.IGNORECASE)
_NAMED = re.compile(rb"(model_?name|model_?id|kernel_?name|op_?name|node_?name)\s*[=:]\s*([^\s,;\]]+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class LogLine:
    """A runtime log's line about an operator: where it is, and the names in it."""

    file: str
    line: int
    names: dict[str, str]
    text: str


@dataclass(frozen=True, slots=True)
class Overflow:
    """One overflow: the file that tells of it, where that lies, the record, and the operator's own dump if it is there."""

    file: Path
    place: Place
    timestamp: int
    record: Record
    operator: DumpName | None = None
    operator_file: str = ""
    log: LogLine | None = None

    @property
    def order(self) -> tuple[Any, ...]:
        """The vendor's advice: the smallest iteration, and in it the smallest timestamp."""
        return self.place.iteration, self.timestamp, self.place.time, self.place.device, str(self.file)

    def to_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        record = self.record
        context, thread = record.thread
        return {
            "time": self.place.time,
            "device": self.place.device,
            "model_name": self.place.model_name or None,
            "model_id": record.number("model_id"),
            "iteration": self.place.iteration,
            "timestamp": self.timestamp,
            "unit": record.unit,
            "stream_id": record.number("stream_id"),
            "task_id": record.number("task_id"),
            "context_id": context,
            "thread_id": thread,
            "block": self.block,
            "status": record.decoded.to_dict(),
            "record": record.to_json(),
            "op_type": self.operator.op_type if self.operator else None,
            "op_name": self.operator.op_name if self.operator else None,
            "operator_dump": self.operator_file or None,
            "log": None if self.log is None else {"at": f"{self.log.file}:{self.log.line}", **self.log.names},
            "file": str(self.file),
        }

    @property
    def block(self) -> int | None:
        """The block (or core) on which it overflowed, where the record tells."""
        for name in ("block_idx", "block_id", "core_id"):
            if name in self.record.fields:
                return self.record.number(name)
        return None

    @property
    def what(self) -> str:
        """The operator in words."""
        if self.operator is not None:
            return f"{self.operator.op_type} {self.operator.op_name}"
        for name in ("kernel_name", "op_name", "node_name"):
            if self.log is not None and name in self.log.names:
                return self.log.names[name]
        return f"task {self.record.number('task_id')} of stream {self.record.number('stream_id')}"


@dataclass(slots=True)
class Summary:
    """All that was found. ``known``: files that are dumps by their names; ``damaged``: a message for each that is not read."""

    files: int = 0
    known: int = 0
    overflows: list[Overflow] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)

    @property
    def status(self) -> str:
        """Tell ``fine``, ``findings`` or ``unread``: not everything could be read, beside overflows or not, or nothing was."""
        if self.damaged or not self.known:
            return "unread"
        return "findings" if self.overflows else "fine"

    def to_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        return {
            "status": self.status,
            "files": self.files,
            "overflows": [overflow.to_dict() for overflow in self.overflows],
            "problems": self.damaged,
        }


def summarise(path: Path, tick: Callable[[int], None] = lambda _count: None) -> Summary:
    """Walk a dump path and read its overflow files.

    Parameters
    ----------
    path
        A dump path, or any folder below it.
    tick
        Told how many files were seen so far, now and then.

    Raises
    ------
    UsageError
        If there is no such folder.
    UnreadError
        If it may not be listed; what cannot be read below it is among the summary's ``damaged``.

    """
    summary = Summary()
    for folder, names in files_below(path, _EXPECTED, summary.damaged.append):
        if is_opdebug_name(folder.name):
            summary.damaged.append(f"{shown(folder)} is a folder; expected an overflow file of that name")
        summary.files += len(names)
        summary.known += sum(is_opdebug_name(name) or parse_name(name) is not None for name in names)
        summary.known += len(read_mapping(folder, lambda _: None))
        tick(summary.files)
        records = [name for name in names if is_opdebug_name(name) and not name.endswith(_TABLES)]
        if records:
            summary.overflows += _of_folder(folder, records, names, summary)
    summary.overflows.sort(key=lambda overflow: overflow.order)
    return summary


def _of_folder(folder: Path, records: list[str], names: list[str], summary: Summary) -> list[Overflow]:
    found: list[Overflow] = []
    place = place_of(folder.absolute())
    for name in records:
        try:
            debug = read_opdebug(folder / name)
        except UsageError as error:
            summary.damaged.append(str(error))
            continue
        tail = name.rpartition(".")[2]
        timestamp = int(tail[:20]) if tail.isascii() and tail.isdigit() else 0
        found += [Overflow(folder / name, place, timestamp, record) for record in debug.overflowed]
    return _with_operators(folder, found, names, summary.damaged.append)


def _with_operators(
    folder: Path, found: list[Overflow], names: list[str], failed: Callable[[str], None]
) -> list[Overflow]:
    """Find each overflow's operator among the folder's files: by the record's task and stream, the earliest first."""
    wanted = {overflow.record.number("task_id") for overflow in found}
    mapping = read_mapping(folder, failed)
    by_task: dict[int, list[tuple[DumpName, str]]] = {}
    for name in names:
        if is_opdebug_name(name) or name.endswith(_TABLES):
            continue
        parsed = parse_name(mapping.get(name, name))
        if parsed is not None and parsed.task_id in wanted:
            by_task.setdefault(parsed.task_id, []).append((parsed, name))
    return [_with_operator(overflow, by_task) for overflow in found]


def _with_operator(overflow: Overflow, by_task: dict[int, list[tuple[DumpName, str]]]) -> Overflow:
    record = overflow.record
    context, thread = record.thread

    def fits(name: DumpName) -> bool:
        if name.stream_id is not None and name.stream_id != record.number("stream_id"):
            return False
        pairs = ((context, name.context_id), (thread, name.thread_id))
        return all(ours is None or theirs is None or ours == theirs for ours, theirs in pairs)

    fitting = [pair for pair in by_task.get(record.number("task_id"), []) if fits(pair[0])]
    if not fitting:
        return overflow
    name, file = min(fitting, key=lambda pair: (pair[0].stream_id is None, pair[0].timestamp))
    return replace(overflow, operator=name, operator_file=file)


def find_in_logs(path: Path, overflows: list[Overflow], failed: Callable[[str], None]) -> list[Overflow]:
    """Find each overflow's operator in a runtime log (or a folder of them), by stream and task in one line.

    ``failed`` is told of what cannot be read.

    Raises
    ------
    UsageError
        If there is no such file or folder.

    """
    wanted = {(o.record.number("stream_id"), o.record.number("task_id")) for o in overflows}
    found: dict[tuple[int, int], LogLine] = {}
    for file in _logs(path, failed):
        try:
            for key, line in _lines_about(file, wanted):
                known = found.get(key)
                if known is None or len(line.names) > len(known.names):
                    found[key] = line
        except UnreadError as error:
            failed(str(error))
    return [replace(o, log=found.get((o.record.number("stream_id"), o.record.number("task_id")))) for o in overflows]


def _logs(path: Path, failed: Callable[[str], None]) -> list[Path]:
    if not path.is_dir():
        return [path]
    try:
        return [folder / name for folder, names in files_below(path, _LOG, failed) for name in names]
    except UnreadError as error:
        failed(str(error))
        return []


def _lines_about(file: Path, wanted: set[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], LogLine]]:
    with opened(file, _LOG) as log:
        number = 0
        while line := log.readline(_LONGEST_LINE):
            number += 1
            stream, task = _STREAM.search(line), _TASK.search(line)
            if stream is None or task is None:
                continue
            key = (int(stream[1][:20]), int(task[1][:20]))
            if key in wanted:
                names = {_plain(name): value.decode("utf-8", "replace") for name, value in _NAMED.findall(line)}
                yield key, LogLine(str(file), number, names, line.decode("utf-8", "replace").strip())


def _plain(name: bytes) -> str:
    text = name.decode().lower()
    return text if "_" in text else re.sub(r"(name|id)$", r"_\1", text)
