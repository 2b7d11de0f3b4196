"""A re-execution calls what the training called, and reports nothing: neither to a trainer's sums, nor to anybody who reads."""

from __future__ import annotations

import builtins
import io
import logging
import os
import sqlite3
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import copy_context
from typing import Any

from torch import nn

from bitwitness.replay.errors import ReplayError
from bitwitness.tap.modes import scripts_modes_back
from bitwitness.tap.ownwork import in_replay
from bitwitness.tap.patching import replaced

_REPORTERS = {"LightningModule": ("log", "log_dict")}
"""Classes by name (they need not be installed), and methods of theirs that add to sums kept elsewhere."""

_LOOKS = ("stat", "lstat", "access", "listdir", "scandir", "mkdir")
"""Functions of `os` that tell whether a path is there, or what is in it."""
_OPEN_FILES = ("read", "write", "pread", "pwrite", "readv", "writev", "lseek", "ftruncate", "sendfile", "splice")
"""Functions of `os` that use a file by its number, whose place in it nobody could put back in all cases."""
_CHANGES = ("chdir", "utime", "rename", "replace", "remove", "unlink", "rmdir", "link", "symlink", "truncate", "open")
"""Functions of `os` that change what others find, and cannot be taken back."""
_STARTS = ((subprocess.Popen, "__init__"), (sqlite3, "connect"))
"""What begins something outside of this process, or of Python."""
_stat = os.stat


@contextmanager
def quiet(root: nn.Module, *, since: int | None = None) -> Iterator[None]:
    """Have what modules of ``root`` report, print, log and write to files meanwhile come to nothing.

    ``since``: when the forward began that is repeated, by `tap.timer.file_clock`.

    Raises
    ------
    ReplayError
        Inside, where a file is opened to be read and written, or read after it was written, by this forward or since the
        other began: what would it hold? Likewise where a path is looked at that changed since then.

    """
    silenced: list[tuple[dict[str, Any], str, bool, Any]] = []
    for module in root.modules():
        for name in _methods(type(module)):
            own = vars(module)
            silenced.append((own, name, name in own, own.get(name)))
            own[name] = _nothing
    try:
        with (
            _nothing_printed("stdout"),
            _nothing_printed("stderr"),
            _nothing_logged(),
            _no_warnings(),
            _nothing_written(since),
            _nothing_looked_at(since),
            _no_open_file_used(),
            _nothing_begun(),
        ):
            yield
    finally:
        for own, name, there, before in reversed(silenced):
            if there:
                own[name] = before
            else:
                own.pop(name, None)


class _Unheard:
    """A stream that does nothing for a thread that re-executes, and what it always did for the others."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> Any:
        return len(text) if in_replay() else self._stream.write(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    @property
    def buffer(self) -> Any:
        return io.BytesIO() if in_replay() else self._stream.buffer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._stream, name)


def _nothing_printed(name: str) -> AbstractContextManager[None]:
    """Have what this thread prints come to nothing; others may print, and re-execute, at the same time."""
    return nullcontext() if getattr(sys, name) is None else replaced(sys, name, _Unheard)


def _nothing_logged() -> AbstractContextManager[None]:
    """Have this thread's log records reach no handler."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda logger, record: None if in_replay() else original(logger, record)

    return replaced(logging.Logger, "handle", wrap)


@contextmanager
def _nothing_written(since: int | None) -> Iterator[None]:
    """Have files that this thread opens to write be the null device: the training's own forward has written them."""
    written: set[str] = set()

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if not in_replay() or _is_torchs(sys._getframe(1).f_globals.get("__name__", "")):
                return original(file, mode, *args, **kwargs)
            if "+" in mode or str(file) in written:
                raise ReplayError(f"the forward writes to {file} and reads it")
            if "r" in mode and since is not None and _written_since(file, since):
                raise ReplayError(f"the forward reads {file}, which was written to since it began")
            if set(mode) & set("wax"):
                written.add(str(file))
                return original(os.devnull, "wb" if "b" in mode else "w", *args, **kwargs)
            return original(file, mode, *args, **kwargs)

        return opened

    with replaced(builtins, "open", wrap), replaced(io, "open", wrap):
        yield


@contextmanager
def _nothing_looked_at(since: int | None) -> Iterator[None]:
    """Have this thread not look at files and folders that were made or changed since then: the forward found others."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def looked(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            if (
                since is not None
                and isinstance(path, str | os.PathLike)
                and in_replay()
                and _written_since(path, since)
            ):
                raise ReplayError(f"the forward looks at {os.fspath(path)!s}, which was changed since it began")
            return original(path, *args, **kwargs)

        return looked

    with ExitStack() as stack:
        for name in _LOOKS:
            stack.enter_context(replaced(os, name, wrap))
        yield


def _no_open_file_used() -> AbstractContextManager[None]:
    """Have this thread use no file that is open by its number: how far it was read or written would not be what it was."""
    places = [(os, name) for name in _OPEN_FILES if hasattr(os, name)]
    return _refused(places, lambda original: f"the forward uses an open file (os.{original.__name__})")


def _nothing_begun() -> AbstractContextManager[None]:
    """Have this thread change no path, start no process and open no database: nobody could take that back."""
    places = [*((os, name) for name in _CHANGES), *_STARTS]
    return _refused(places, lambda f: f"the forward does what cannot be taken back ({f.__module__}.{f.__qualname__})")


@contextmanager
def _refused(places: Iterable[tuple[Any, str]], why: Callable[[Any], str]) -> Iterator[None]:
    """Have functions of some modules or classes raise `ReplayError` in this thread, unless a compiler calls them."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def refused(*args: Any, **kwargs: Any) -> Any:
            if in_replay() and not _is_torchs(sys._getframe(1).f_globals.get("__name__", "")):
                raise ReplayError(why(original))
            return original(*args, **kwargs)

        return refused

    with ExitStack() as stack:
        for place, name in places:
            stack.enter_context(replaced(place, name, wrap))
        yield


def _written_since(file: Any, moment: int) -> bool:
    """Tell whether a file may have been written to since then, by its own clock, in which many moments are one tick."""
    try:
        return _stat(file).st_mtime_ns >= moment
    except (OSError, TypeError, ValueError):
        return False


def _no_warnings() -> AbstractContextManager[None]:
    """Have this thread's warnings reach nobody, a list of the script's neither; which were given before stays known."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda message: None if in_replay() else original(message)

    return replaced(warnings, "_showwarnmsg", wrap)


def run_backward(root: nn.Module, since: int | None, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Go back as the training did: under the script's modes, and reporting as little as `quiet` lets through.

    ``call`` is torch's function that does it; what the script's code in it sets in context variables is gone afterwards.
    """
    with quiet(root, since=since), scripts_modes_back(backward=True):
        return copy_context().run(call, *args, **kwargs)


def _is_torchs(module: str) -> bool:
    """Tell whether a module is one of a compiler's, which keep their kernels in files."""
    return module.partition(".")[0] in ("torch", "triton", "importlib") and module != "torch.serialization"


@contextmanager
def redirected(root: nn.Module, forward: Any) -> Iterator[None]:
    """Have the root's call go where it went in the training; ``forward`` stood in its own attribute then, or None."""
    names = vars(root)
    now = names.get("forward")
    if forward is not None:
        names["forward"] = forward
    try:
        yield
    finally:
        if now is None:
            names.pop("forward", None)
        else:
            names["forward"] = now


def _methods(kind: type) -> list[str]:
    return [name for base in kind.__mro__ for name in _REPORTERS.get(base.__name__, ())]


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """Stand for a method that reports."""
