"""The line of the user's code that is running, found from the stack without formatting anything."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from contextvars import ContextVar
from types import CodeType
from typing import Any

import torch

from bitwitness.tap.compat import BACKWARD

Line = tuple[str, int, str]
"""File, line number, function."""

NOWHERE: Line = ("", 0, "")

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # noqa: PTH120 - frames hold strings
_OWN = tuple(
    _PACKAGE + part
    for part in (
        *("tap", "capture", "session", "guard", "judge", "oracle", "inject", "sense", "stats", "nonfinite", "record"),
        *("respond", "ranks", "device"),
    )
)
_REPLAY = _PACKAGE + "replay"
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep  # noqa: PTH120
_NOT_THE_USERS = (*_OWN, _TORCH, contextlib.__file__, warnings.__file__, "<")

_ENGINE: CodeType | None = getattr(getattr(*BACKWARD, None), "__code__", None)
"""Where a backward begins, in a stack of the thread that called it."""

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
        if not name.startswith(_NOT_THE_USERS):
            return name, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back
    return NOWHERE


def line_text(line: Line) -> str:
    """Return ``file:line in function``; empty for no line."""
    return f"{line[0]}:{line[1]} in {line[2]}" if line[0] else ""


class Stacks:
    """Numbers the stacks of user code that were seen; each is formatted once."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, ...], int] = {}
        self._new: list[tuple[int, str]] = []
        self._are_users: dict[CodeType, bool] = {}

    def current(self) -> int:
        """Return the number of the stack that is running: the lines of user code, torch's and ours left out."""
        return self._number(self._users_lines(sys._getframe(1), None))

    def within_backward(self) -> int:
        """Return the number of the stack of user code inside a backward, a Function's or a hook's; -1 if there is none."""
        found = self._users_lines(sys._getframe(1), _ENGINE)
        return self._number(found) if found else -1

    def _users_lines(self, frame: Any, until: CodeType | None) -> list[object]:
        """Return the codes and line numbers of user code, from a frame outwards."""
        found: list[object] = []
        are_users = self._are_users
        while frame is not None and frame.f_code is not until:
            code = frame.f_code
            is_users = are_users.get(code)
            if is_users is None:
                is_users = are_users[code] = not code.co_filename.startswith(_NOT_THE_USERS)
            if is_users:
                found += (code, frame.f_lineno)
            frame = frame.f_back
        return found

    def _number(self, found: list[object]) -> int:
        key = tuple(found)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._numbers)
            self._new.append((number, _lines(key)))
        return number

    def take_new(self) -> list[tuple[int, str]]:
        """Return the numbers and texts of the stacks first seen since the last call, innermost line first."""
        new, self._new = self._new, []
        return new


def _lines(key: tuple[object, ...]) -> str:
    pairs = zip(key[::2], key[1::2], strict=True)
    return "\n".join(f"{code.co_filename}:{line} in {code.co_name}" for code, line in pairs)  # type: ignore[attr-defined]
