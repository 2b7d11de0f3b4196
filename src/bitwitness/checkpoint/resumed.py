"""Where this process's training goes on: after the step of the checkpoint that it loaded.

Under `bitwitness launch` steps are counted from there, so that an attempt names the steps of the training and not those of its
process: the launcher resumes before a step that an attempt named. Elsewhere a process may train one model after another, and a
checkpoint that it loaded says nothing of the next one's steps.
"""

from __future__ import annotations

import os

from bitwitness.config.variables import SLOTS

_steps: list[
    int
] = []  # of the checkpoints that were loaded, the latest last: a fact of the process, as its environment is


def resumed_at() -> int:
    """Return how many steps a launched training has behind it that this process did not run; 0 where it began anew."""
    return _steps[-1] if _steps and os.environ.get(SLOTS) else 0


def note_resumed(step: int) -> None:
    """Note that a checkpoint of ``step`` steps was loaded."""
    _steps.append(step)
