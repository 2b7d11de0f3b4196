"""Running somebody's script inside this process so that it cannot tell the difference from ``python SCRIPT``."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, TracebackType

from bitwitness.errors import UsageError
from bitwitness.files.reading import open_file
from bitwitness.files.shown import shown

_NOT_THE_SCRIPTS = frozenset({__file__, runpy.__file__, "<frozen runpy>"})


class ScriptError(Exception):
    """The script ended in an error of its own."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error

    def show(self) -> int:
        """Hand the error to `sys.excepthook` (which the script may have set) as python does; return the exit code.

        The traceback begins at the script; there is none where the script did not begin to run (a `SyntaxError`).
        """
        trace = _from_script(self.error)
        sys.excepthook(type(self.error), self.error.with_traceback(trace), trace)
        return 1


def torch_lacks(error: ImportError) -> bool:
    """Tell whether an import of ours failed for want of torch, or of one of its names that bitwitness stands on."""
    return (error.name or "").partition(".")[0] == "torch"


def unusable(error: ImportError) -> str:
    """Say what is missing, and what to do."""
    try:
        found = f"torch {version('torch')}"
    except PackageNotFoundError:
        return f"there is no torch here ({sys.executable}); install torch 2.12 or newer beside bitwitness"
    return f"{found} lacks a name that bitwitness stands on: {error}; use a release from 2.12 on that bitwitness knows"


def add_script_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the script, or the module, and its own arguments; nothing may come after them."""
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name, as in python -m")
    # One argument, not two: argparse would take a "--" between them away from the script.
    parser.add_argument(
        "command", metavar="SCRIPT", nargs=argparse.PARSER, help="the training script, and its own arguments"
    )


class Script:
    """A script or a module, and its arguments.

    Parameters
    ----------
    name
        A path; with ``module`` a module's name.
    arguments
        What follows it on the command line.

    Raises
    ------
    UsageError
        If it is not there, or cannot be run.

    """

    def __init__(self, name: str, arguments: Sequence[str], *, module: bool = False) -> None:
        self._name = name
        self._arguments = list(arguments)
        self._module = module
        if module:
            _put_first_on_path(str(Path.cwd()))
            _check_module(name)
        else:
            _check_file(Path(name))

    @classmethod
    def of(cls, args: argparse.Namespace) -> Script:
        """Return the script that a command line names; see `add_script_arguments`."""
        command = args.command[1:] if args.command[0] == "--" else args.command
        return cls(command[0], command[1:], module=args.module)

    def run(self) -> None:
        """Run it as ``__main__``.

        Raises
        ------
        ScriptError
            Around any `Exception` that ends it; `SystemExit` and `KeyboardInterrupt` pass as they are.

        """
        sys.argv = [self._name, *self._arguments]
        try:
            if self._module:
                runpy.run_module(self._name, run_name="__main__", alter_sys=True)
            else:
                _put_first_on_path(str(Path(self._name).resolve().parent))
                _run_file(Path(self._name).absolute())
        except Exception as error:
            raise ScriptError(error) from error
        except KeyboardInterrupt as error:
            _show_interrupt(error)
            raise


def _show_interrupt(error: KeyboardInterrupt) -> None:
    """Show an interrupt where the script was, as python does, and not again, with our frames, when it ends the process."""
    shown = sys.excepthook
    trace = _from_script(error)

    def hook(kind: type[BaseException], raised: BaseException, frames: TracebackType | None) -> None:
        shown(kind, raised.with_traceback(trace) if raised is error else raised, trace if raised is error else frames)

    sys.excepthook = hook


def _from_script(error: BaseException) -> TracebackType | None:
    """Return an error's traceback from the script on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in _NOT_THE_SCRIPTS:
        trace = trace.tb_next
    return trace


def _run_file(path: Path) -> None:
    """Execute a file as python does: ``__file__`` is absolute, and ``__main__`` stays, for what runs at the exit."""
    main = ModuleType("__main__")
    main.__file__ = str(path)
    main.__loader__ = SourceFileLoader("__main__", str(path))
    sys.modules["__main__"] = main
    code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    exec(code, main.__dict__)  # noqa: S102 - the user's script is what we are here to run


def _put_first_on_path(folder: str) -> None:
    if not sys.flags.safe_path:  # with python -P nothing of ours stands there to be replaced
        sys.path[0] = folder


def _check_file(path: Path) -> None:
    if not os.path.lexists(path):
        raise UsageError(f"there is no script {shown(path)}; check the path (seen from {Path.cwd()})")
    if path.is_dir():
        raise UsageError(f"{shown(path)} is a folder; expected a Python script")
    open_file(path, "a Python script").close()


def _check_module(name: str) -> None:
    try:
        spec = find_spec(name)
        package = spec is not None and spec.submodule_search_locations is not None
        runnable = find_spec(f"{name}.__main__") is not None if package else spec is not None
    except (ImportError, ValueError) as error:
        raise UsageError(f"no module named {name!r} can be found ({error}); check the name") from error
    if package and not runnable:
        raise UsageError(f"{name!r} is a package without a __main__; name the module in it that trains")
    if not runnable:
        raise UsageError(f"no module named {name!r} can be found; check the name, or leave out -m for a file")
