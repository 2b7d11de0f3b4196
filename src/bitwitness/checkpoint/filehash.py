"""The hash of a file's bytes, and which file it was."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

from bitwitness.checkpoint.manifest import SealedFile
from bitwitness.files.reading import opened

_CHUNK = 4 << 20
_RACY_NS = 50_000_000
"""Clocks of file systems tick in some milliseconds: what is written within one tick of a seal could not be told from what was
sealed."""
_COARSE_NS = 2_100_000_000  # some keep whole seconds, or every second one


def hash_file(path: Path, expected: str = "a file of a checkpoint", *, settle: bool = True) -> SealedFile | None:
    """Hash a file (SHA-256); return None if it changed meanwhile, or was replaced.

    ``settle``: wait until its time of writing lies far enough back for a later one to be another; milliseconds, as a rule.

    Raises
    ------
    UsageError
        If it is not there, or cannot be read.

    """
    with opened(path, expected) as file:
        before = os.fstat(file.fileno())
        sha = hashlib.sha256(usedforsecurity=False)
        buffer = bytearray(_CHUNK)
        view = memoryview(buffer)
        while count := file.readinto(buffer):  # type: ignore[attr-defined]
            sha.update(view[:count])
        if settle:
            _settle(before.st_mtime_ns)
        after = os.fstat(file.fileno())
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        return None
    return SealedFile(after.st_size, sha.hexdigest(), after.st_mtime_ns, after.st_ino)


def _settle(mtime_ns: int) -> None:
    apart = _COARSE_NS if mtime_ns % 1_000_000_000 == 0 else _RACY_NS
    missing = mtime_ns + apart - time.time_ns()
    if 0 < missing <= apart:
        time.sleep(missing / 1e9)
