"""A folder of checkpoints, ``step-00000040`` each: which are there, which are whole, which is the one to go on from."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from bitwitness.checkpoint.manifest import seal_of
from bitwitness.checkpoint.verifying import Checked, verify
from bitwitness.config.variables import RESUME_BEFORE
from bitwitness.errors import ConfigError, UsageError
from bitwitness.files.reading import listed
from bitwitness.files.shown import quoted, say

_NAME = re.compile(r"step-(\d{8,18})", re.ASCII)
_PART = re.compile(r"\.step-\d{8,18}\.(?:part|old)", re.ASCII)


def name_of(step: int) -> str:
    """Return the name of a step's checkpoint."""
    return f"step-{step:08d}"


def part_name(step: int) -> str:
    """Return the name under which it is written."""
    return f".{name_of(step)}.part"


def old_name(step: int) -> str:
    """Return the name that one of the same step has while another takes its place."""
    return f".{name_of(step)}.old"


def steps_in(folder: Path) -> list[int]:
    """Return the steps of which there is a sealed checkpoint, the newest first; whether it is intact is not looked at."""
    if not folder.is_dir():
        return []
    found = [(entry.name, _NAME.fullmatch(entry.name)) for entry in listed(folder, "a folder of checkpoints")]
    steps = {int(match[1]) for name, match in found if match and name == name_of(int(match[1]))}
    return sorted((step for step in steps if seal_of(folder / name_of(step)).exists()), reverse=True)


def unsealed_in(folder: Path) -> list[str]:
    """Return the names of step folders without a seal: not ours, or somebody took it away."""
    if not folder.is_dir():
        return []
    names = [entry.name for entry in listed(folder, "a folder of checkpoints") if _NAME.fullmatch(entry.name)]
    return [name for name in names if not seal_of(folder / name).exists()]


def bound(before: int | None) -> int | None:
    """Return the step from which on checkpoints are not taken: ``before``, or the environment's where that is lower.

    Raises
    ------
    ConfigError
        If the environment variable is no number of a step.

    """
    text = os.environ.get(RESUME_BEFORE, "").strip()
    if not text:
        return before
    if not re.fullmatch(r"\d{1,18}", text, re.ASCII):
        raise ConfigError(f"{RESUME_BEFORE}={quoted(text)}: expected the number of a step, for example 120; unset it")
    return int(text) if before is None else min(before, int(text))


def latest(
    folder: str | os.PathLike[str], before: int | None = None, *, refused: Callable[[str], None] | None = None
) -> Path | None:
    """Return the newest checkpoint that is sealed and intact; every byte of those that are looked at is read.

    Parameters
    ----------
    folder
        What `save` was given.
    before
        Only checkpoints of steps before this one: of a fault whose first trace was at step 120, ``before=120`` takes what was
        saved after step 119 at the latest. A checkpoint ``step-N`` is taken to hold the state *after* N steps, that is before
        the N-th counted from 0; so ``step-120`` might hold what step 120 did where steps are counted from 1, and is not taken.
        The environment variable ``BITWITNESS_RESUME_BEFORE``, which ``bitwitness launch`` sets, says the same; of both the
        lower counts.
    refused
        Told of each checkpoint that is damaged, in one line that names file and tensor; printed by default.

    Raises
    ------
    UsageError
        If the folder cannot be read. One that is not there holds no checkpoint.

    """
    place, limit = Path(folder), bound(before)
    for step in steps_in(place):
        if limit is not None and step >= limit:
            continue
        _, problem = looked_at(place / name_of(step))
        if problem is None:
            return place / name_of(step)
        (refused or say)(f"{problem}; it is refused, and the one before is looked at")
    return None


def looked_at(checkpoint: Path, share: tuple[int, int] = (0, 1)) -> tuple[Checked | None, str | None]:
    """Return what a checkpoint's seal says of it, and what is wrong with it, or None.

    ``share``: of the files that are this rank's to look at.
    """
    try:
        checked = verify(checkpoint, share=share)
    except UsageError as error:
        return None, str(error)
    return checked, None if checked.intact else str(checked)


def clear(folder: Path) -> None:
    """Take away what killed saves have left, and finish what one was about to put in its place.

    A checkpoint of the same step that was set aside, with none in its place, gets its name back.
    """
    for entry in listed(folder, "a folder of checkpoints"):
        if not _PART.fullmatch(entry.name) or not entry.is_dir(follow_symlinks=False):
            continue
        path = folder / entry.name
        name, _, state = entry.name[1:].rpartition(".")
        if state == "old" and not os.path.lexists(folder / name):
            with suppress(OSError):
                path.rename(folder / name)
        else:
            shutil.rmtree(path, ignore_errors=True)


def keep_newest(folder: Path, keep: int, just_now: int) -> None:
    """Delete all but the ``keep`` newest sealed checkpoints, and never the one that was just written.

    The seal goes first: a deletion that is broken off leaves nothing that looks whole.
    """
    for step in steps_in(folder)[keep:]:
        if step == just_now:
            continue
        path = folder / name_of(step)
        with suppress(OSError):
            seal_of(path).unlink()
        shutil.rmtree(path, ignore_errors=True)


def is_part(path: Path) -> bool:
    """Tell whether a folder is one that `save` is writing."""
    return _PART.fullmatch(path.name) is not None
