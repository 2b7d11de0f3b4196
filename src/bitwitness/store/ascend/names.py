"""What dump files and folders are called, and what that tells of their operator, model and step."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bitwitness.errors import UsageError
from bitwitness.files.reading import read_bytes
from bitwitness.files.shown import shown

_FFTS = 4  # marks the four numbers that follow a timestamp in FFTS+ mode
_TIME = re.compile(r"\d{14}", re.ASCII)
_MAPPING = "mapping.csv"
_LARGEST_MAPPING = 256 << 20  # bytes, read as a whole: a line of some hundred for each file of a folder


@dataclass(frozen=True, slots=True)
class DumpName:
    """A dump file's name: ``{op_type}.{op_name}.{task_id}[.{stream_id}].{timestamp}[.4.{context}.{thread}.{device}]``."""

    op_type: str
    op_name: str
    task_id: int
    timestamp: int
    stream_id: int | None = None
    context_id: int | None = None
    thread_id: int | None = None


def parse_name(name: str) -> DumpName | None:
    """Read a dump file's name; None if it is not of that form."""
    parts = name.split(".")
    numbers: list[int] = []
    while len(parts) > 2 and parts[-1].isascii() and parts[-1].isdigit():
        numbers.insert(0, int(parts.pop()[:20]))
    if len(parts) < 2 or len(numbers) < 2:
        return None
    context = thread = None
    if len(numbers) >= 6 and numbers[-4] == _FFTS:
        context, thread = numbers[-3], numbers[-2]
        numbers = numbers[:-4]
    if len(numbers) > 3:
        return None
    stream = numbers[1] if len(numbers) == 3 else None
    return DumpName(parts[0], ".".join(parts[1:]), numbers[0], numbers[-1], stream, context, thread)


def read_mapping(folder: Path, failed: Callable[[str], None]) -> dict[str, str]:
    """Return the original names of files whose names were too long, from ``mapping.csv`` where there is one.

    Other rows do not count; ``failed`` is told if it is there and cannot be read.
    """
    found: dict[str, str] = {}
    path = folder / _MAPPING
    if not os.path.lexists(path):
        return found
    try:
        text = read_bytes(path, "a table of the names of dump files", _LARGEST_MAPPING).decode("utf-8", "replace")
        for row in csv.reader(text.replace("\0", "").splitlines()):
            if len(row) >= 2 and row[0].strip():
                found[row[0].strip()] = row[1].strip()
    except UsageError as error:
        failed(str(error))
    except csv.Error as error:
        failed(f"{shown(path)} is damaged: {shown(error)}; the names after that were left out")
    return found


@dataclass(frozen=True, slots=True)
class Place:
    """Where an overflow file lies: ``{dump_path}/{time}/{device}/[{model_name}/]{model_id}/{iteration}``.

    What a path shorter than that does not tell is empty, or -1.
    """

    time: str = ""
    device: str = ""
    model_name: str = ""
    model_id: int = -1
    iteration: int = -1


def place_of(folder: Path) -> Place:
    """Read an overflow file's folder, from its end on."""
    parts = list(folder.parts)
    when = next((i for i in range(len(parts) - 1, -1, -1) if _TIME.fullmatch(parts[i])), None)
    inner = parts[when + 1 :] if when is not None else parts[-3:]
    numbers = [part for part in inner[-2:] if part.isascii() and part.isdigit()]
    if len(inner) < 2 or len(numbers) < 2:
        alone = int(inner[-1]) if inner and inner[-1].isascii() and inner[-1].isdigit() else -1
        return Place(parts[when] if when is not None else "", iteration=alone)
    between = inner[:-2]
    return Place(
        parts[when] if when is not None else "",
        between[0] if between else "",
        between[1] if len(between) > 1 else "",
        int(numbers[0]),
        int(numbers[1]),
    )
