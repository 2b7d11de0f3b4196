"""Opens a recording, whoever made it."""

from __future__ import annotations

import os
import stat
from itertools import islice
from pathlib import Path

from bitwitness.errors import UnreadError, UsageError
from bitwitness.files.reading import kind_of, unread
from bitwitness.files.shown import shown
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
        If there is no such folder.
    UnreadError
        If it is none of them, or cannot be read.

    """
    folder, name = Path(path), shown(path)
    try:
        if not os.fspath(path):
            raise UsageError(f"a path is empty; {_EXPECTED}")
        if folder.is_dir():
            return _opened(folder)
        mode = folder.stat().st_mode
    except FileNotFoundError as error:
        raise UsageError(f"{name} does not exist (seen from {Path.cwd()}); {_EXPECTED}") from error
    except OSError as error:
        raise unread(folder, error, _EXPECTED.removeprefix("expected ")) from error
    except ValueError as error:  # a null byte in the path
        raise UsageError(f"{name} is no path: {error}; {_EXPECTED}") from error
    raise UnreadError(f"{name} {'is a file' if stat.S_ISREG(mode) else kind_of(mode)}; {_EXPECTED}")


def _opened(folder: Path) -> Source:
    with os.scandir(folder) as entries:  # tells, too, whether it may be looked into
        names = sorted(entry.name for entry in islice(entries, 1000))
    if is_recording(folder) or "run.json" in names:
        return RunSource(folder)
    if is_msprobe(folder):
        return MsprobeSource(folder)
    from bitwitness.store.ascend.source import AscendSource, is_ascend

    if is_ascend(folder):
        return AscendSource(folder)
    if not names:
        raise UnreadError(f"{shown(folder)} is empty; {_EXPECTED}")
    held = shown(", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else ""))
    raise UnreadError(f"{shown(folder)} holds no recording, but {held}; {_EXPECTED}")
