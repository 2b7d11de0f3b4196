"""Where this process's training goes on: after the step of the checkpoint that it loaded.

Steps are counted from there, so that a run that was resumed names the steps of the training and not those of its process.
"""

from __future__ import annotations

_steps: list[
    int
] = []  # of the checkpoints that were loaded, the latest last: a fact of the process, as its environment is


def resumed_at() -> int:
    """Return how many steps the training has behind it that this process did not run; 0 where it began anew."""
    return _steps[-1] if _steps else 0


def note_resumed(step: int) -> None:
    """Note that a checkpoint of ``step`` steps was loaded."""
    _steps.append(step)
