"""What a launcher left in its folder: the history of its attempts, each of which has a run folder of its own in there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from bitwitness.errors import UsageError
from bitwitness.files.reading import read_object
from bitwitness.store.claim import clear_run
from bitwitness.store.life import life_of

LAUNCH = "launch.json"
"""A node's history; of a job of several nodes ``launch-HOST-PID.json``, one each."""
_EXPECTED = "what bitwitness launch writes"


def launches_in(path: str | os.PathLike[str]) -> list[Path]:
    """Return the histories in a folder; none where nobody launched there."""
    return sorted(Path(path).glob("launch*.json"))


def read_launch(path: Path) -> dict[str, Any]:
    """Return one history; raises `UnreadError` where it is damaged."""
    return read_object(path, _EXPECTED)


def launch_lives(path: Path) -> bool:
    """Return whether the launcher whose history this is goes on; one that cannot be read does, for all that is known."""
    try:
        return life_of(read_launch(path)).state == "running"
    except UsageError:
        return True


def attempt_of(path: str | os.PathLike[str]) -> tuple[Path, list[str]] | None:
    """Return the last attempt's run folder in a launcher's folder, and a line for each launcher; None where nobody launched.

    The folder itself is returned where the last attempt left none: its ranks did not come so far.
    """
    folder = Path(path)
    histories = launches_in(folder)
    if not histories or (folder / "run.json").exists():
        return None
    lines, last = [], folder
    for file in histories:
        try:
            told = read_launch(file)
            life = life_of(told)
            lines.append(
                f"launched on {told['node']}: {told['sentence']}" + f"; {life.state}" * (life.state == "killed")
            )
            runs = [folder / str(attempt["run"]) for attempt in told["attempts"]]
            last = max([last, *(run for run in runs if (run / "run.json").exists())], key=_number)
        except (UsageError, KeyError, TypeError) as error:
            lines.append(f"{file.name} cannot be read: {error}")
    return last, lines


def _number(path: Path) -> int:
    number = path.name.rpartition("-")[2]
    return int(number) if path.name.startswith("attempt-") and number.isdecimal() else 0


def clear_launch(path: Path) -> None:
    """Delete what was launched in a folder: runs of ours and the histories, and nothing that others put beside them."""
    for run in [path, *path.glob("attempt-[0-9]*")]:
        if run.is_dir() and not run.is_symlink():
            clear_run(run)
    for history in launches_in(path):
        history.unlink()


def free_folder(path: Path) -> Path:
    """Return ``path-2``, ``path-3``, …: the first that holds nothing of ours."""
    number = 2
    while True:
        found = path.with_name(f"{path.name}-{number}")
        if not (launches_in(found) or (found / "run.json").exists()):
            return found
        number += 1
