"""The line of the user's code that is running, found from the stack without formatting anything."""

from __future__ import annotations

import os
import sys
from contextvars import ContextVar
from typing import Any

import torch

Line = tuple[str, int, str]
"""File, line number, function."""

NOWHERE: Line = ("", 0, "")

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # noqa: PTH120 - frames hold strings
_OWN = tuple(_PACKAGE + part for part in ("tap", "guard", "judge", "inject", "sense", "stats", "nonfinite"))
_REPLAY = _PACKAGE + "replay"
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep  # noqa: PTH120

replayed_line: ContextVar[Line] = ContextVar("bitwitness_replayed_line", default=NOWHERE)
"""The script's line of the taped call that a replay runs now."""


def current_line() -> Line:
    """Return the innermost line of the user's code.

    In a replay that is a line of the model's code or, where a taped call runs, the script's line that made the call; a model
    made of torch's own modules alone has none: what lies outside the replay is the training loop's line that happened to
    be running, and would mislead.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_REPLAY):
            return replayed_line.get()
        if not name.startswith((*_OWN, _TORCH, "<")):
            return name, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back
    return NOWHERE


def line_text(line: Line) -> str:
    """Return ``file:line in function``; empty for no line."""
    return f"{line[0]}:{line[1]} in {line[2]}" if line[0] else ""
