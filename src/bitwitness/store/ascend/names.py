"""What dump files and folders are called, and what that tells of their operator, model and step."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path

_FFTS = 4  # marks the four numbers that follow a timestamp in FFTS+ mode
_TIME = re.compile(r"\d{14}")


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


def read_mapping(folder: Path) -> dict[str, str]:
    """Return the original names of files whose names were too long, from ``mapping.csv``; other rows do not count."""
    found: dict[str, str] = {}
    try:
        with (folder / "mapping.csv").open(newline="", encoding="utf-8", errors="replace") as file:
            for row in csv.reader(line.replace("\0", "") for line in file):
                if len(row) >= 2 and row[0].strip():
                    found[row[0].strip()] = row[1].strip()
    except (OSError, csv.Error):
        return found
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
