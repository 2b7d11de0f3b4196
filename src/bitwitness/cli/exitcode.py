"""How a command ends: one exit code for each meaning, one line for each failure, and nothing left behind."""

from __future__ import annotations

import errno
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from io import TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, cast

from bitwitness.errors import (
    EXIT_INTERNAL,
    EXIT_INTERRUPTED,
    EXIT_PIPE_CLOSED,
    EXIT_TERMINATED,
    EXIT_UNREAD,
    EXIT_UNWRITTEN,
    UsageError,
)
from bitwitness.files.shown import say, shown, shown_lines

CODES = (
    (0, "all that was asked for was read, looked at, and is fine"),
    (1, "something was found: a difference, an overflow, a fault, a NaN"),
    (2, "usage: an option, a setting or a path is wrong"),
    (3, "something could not be read or compared, whole or in part (also beside findings)"),
    (4, "the answer could not be written"),
    (16, "a training was stopped, unproven: resume elsewhere"),
    (17, "a device was convicted, or a state is corrupt"),
    (18, "a rank was lost"),
    (70, "bitwitness itself failed; the traceback is in a file"),
    (130, "interrupted (141: output closed, 143: SIGTERM)"),
)
"""One meaning each, for all verbs. `run`, `trace` and `record` otherwise pass the script's own code on."""


class Terminated(BaseException):
    """SIGTERM came while a command worked."""


class _Shown:
    """A stream that shows what a terminal would obey, and that keeps working where a letter cannot be encoded."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.failure: OSError | None = None
        """Why something could not be written; argparse says nothing of it."""

    def write(self, text: str) -> int:
        try:
            self._stream.write(shown_lines(text))
        except OSError as error:
            self.failure = error
            raise
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Closed:
    """Stands for a standard output that was closed before the command began (``>&-``): an answer cannot be written there."""

    encoding = "utf-8"
    failure: OSError | None = None

    def write(self, _text: str) -> int:
        self.failure = OSError(errno.EBADF, "standard output is closed")
        raise self.failure

    def flush(self) -> None:
        """Do nothing: nothing waits."""

    def isatty(self) -> bool:
        """Return that it is none."""
        return False


@contextmanager
def shown_streams() -> Iterator[None]:
    """Let nothing unprintable out while a command works that prints what it read."""
    before = sys.stdout, sys.stderr
    for stream in before:
        if isinstance(stream, TextIOWrapper):  # a test's may be another, and there may be none at all
            stream.reconfigure(errors="backslashreplace")
    with ExitStack() as stack:
        out, err = before
        sys.stdout = cast("TextIO", _Shown(out) if out is not None else _Closed())
        quiet = err if err is not None else stack.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
        sys.stderr = cast("TextIO", _Shown(quiet))
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before


def flushed() -> int | None:
    """Write what waits for the standard output; return the exit code where that is not possible, else None."""
    try:
        sys.stdout.flush()
    except OSError as error:
        return _unwritten(error)
    failure: OSError | None = getattr(sys.stdout, "failure", None)
    return None if failure is None else _unwritten(failure)


def ended(work: Callable[[], int]) -> int:
    """Do a command's work; return its exit code, whatever happens, with one line about a failure."""
    try:
        with _terminable():
            code = work()
            sys.stdout.flush()
    except UsageError as error:
        say(str(error))
        return error.exit_code
    except (KeyboardInterrupt, Terminated) as error:
        by_user = isinstance(error, KeyboardInterrupt)
        say("interrupted" if by_user else "ended by SIGTERM")
        return EXIT_INTERRUPTED if by_user else EXIT_TERMINATED
    except OSError as error:
        return _failed(error) if error.filename is not None else _unwritten(error)
    except Exception as error:  # ours: the user needs one line, whoever repairs it all of them
        return _failed(error)
    return code


def _unwritten(error: OSError) -> int:
    """Tell of an error that has no file: the standard output is closed, or on a full disk."""
    _drop_output()
    if isinstance(error, BrokenPipeError):
        return EXIT_PIPE_CLOSED
    say(f"cannot write the answer: {error.strerror or error}; free the space, or write it elsewhere")
    return EXIT_UNWRITTEN


def _failed(error: BaseException) -> int:
    if isinstance(error, MemoryError):
        say("out of memory: what was read needs more than this machine or its limits (ulimit -v) leave")
        return EXIT_UNREAD
    trace = "".join(traceback.format_exception(error))
    what = shown(f"{type(error).__name__}: {error}", 200)
    try:
        name = f"bitwitness-{datetime.now(UTC):%Y%m%d-%H%M%S}-"
        with tempfile.NamedTemporaryFile(
            "w", prefix=name, suffix=".txt", delete=False, errors="backslashreplace"
        ) as file:
            file.write(trace)
        where = f"the traceback is in {file.name}"
    except OSError:
        where = "its traceback could not be written"
    say(f"failed, which is our fault and says nothing about your numbers ({what}); {where}: please report it")
    return EXIT_INTERNAL


def _drop_output() -> None:
    """Give stdout a place that takes everything: Python flushes it once more at its end, and would complain."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)


@contextmanager
def _terminable() -> Iterator[None]:
    """Turn SIGTERM into an exception, so that children are ended and half-written files taken away."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise Terminated

    try:
        before = signal.signal(signal.SIGTERM, end)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
