"""Opens a recording, whoever made it."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

from bitwitness.errors import UsageError
from bitwitness.store.msprobe import MsprobeSource, is_msprobe
from bitwitness.store.run import RunSource, is_recording
from bitwitness.store.source import Source

_EXPECTED = (
    "expected a run folder with a recording (what bitwitness record wrote), a dump of msprobe (step*/rank*/dump.json) "
    "or a folder of Ascend dump files"
)
_SHOWN = 5  # names in a message: enough to recognise a folder by


def open_source(path: str | os.PathLike[str]) -> Source:
    """Return a reader for a recording of ours, a dump of msprobe or a folder of Ascend dump files.

    Raises
    ------
    UsageError
        If there is none of them, or it cannot be read.

    """
    folder = Path(path)
    try:
        if folder.is_dir():
            return _opened(folder)
        seen = "is a file" if folder.exists() else f"does not exist (seen from {Path.cwd()})"
    except OSError as error:
        raise UsageError(f"cannot read {folder}: {error.strerror}; {_EXPECTED}") from error
    except ValueError as error:  # a null byte in the path
        raise UsageError(f"{str(folder)!r} is no path: {error}; {_EXPECTED}") from error
    raise UsageError(f"{folder} {seen}; {_EXPECTED}")


def _opened(folder: Path) -> Source:
    names = sorted(child.name for child in islice(folder.iterdir(), 1000))  # tells, too, whether it may be looked into
    if is_recording(folder) or "run.json" in names:
        return RunSource(folder)
    if is_msprobe(folder):
        return MsprobeSource(folder)
    from bitwitness.store.ascend.source import AscendSource, is_ascend

    if is_ascend(folder):
        return AscendSource(folder)
    if not names:
        raise UsageError(f"{folder} is empty; {_EXPECTED}")
    shown = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
    raise UsageError(f"{folder} holds no recording, but {shown}; {_EXPECTED}")
