"""A process that becomes a script: forked from one that has imported torch, it ends as Python ends one of its own."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn


class Forked:
    """A fork of this process that becomes a script; handled as a `subprocess.Popen`.

    Parameters
    ----------
    call
        What it does.
    log
        Where its output goes.
    environment
        All its variables.

    """

    def __init__(self, call: Callable[[], object], log: Path, environment: dict[str, str]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            os.environ.clear()
            os.environ.update(environment)
            become(call, log, log)

    def poll(self) -> int | None:
        """Return its exit code, if it has ended."""
        return self._await(os.WNOHANG)

    def wait(self) -> int | None:
        """Wait for its end; return its exit code."""
        return self._await(0)

    def kill(self) -> None:
        """End it."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def _await(self, how: int) -> int | None:
        if self.returncode is None and (status := os.waitpid(self.pid, how))[0]:
            self.returncode = os.waitstatus_to_exitcode(status[1])
        return self.returncode


def together(count: int, call: Callable[[], object], logs: Path) -> bool:
    """Run so many ranks, each a fork of this process with torchrun's variables; return whether all ended well.

    Where one fails, the others are ended. Each one's output goes to ``rankN.log``.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": str(count)}
    common |= {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "LOCAL_WORLD_SIZE": str(count)}
    ranks = [
        Forked(call, logs / f"rank{rank}.log", {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(count)
    ]
    try:
        while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
            time.sleep(0.05)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return not any(codes)


def become(call: Callable[[], object], out: Path, err: Path) -> NoReturn:
    """Call in this process, which is a fork's, with its output in files; end with the exit code that Python would give."""
    code = 70
    try:
        for target, name in ((1, out), (2, err)):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), target)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        code = exit_code(call)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        if code == -signal.SIGINT:  # Python ends so, too, that a shell sees who was interrupted
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        if _is_sealed():
            # through C's exit list, as Python itself: what is sealed there decides
            ctypes.PyDLL(None).exit(code & 0xFF)
        os._exit(code & 0xFF)


def _is_sealed() -> bool:
    final = sys.modules.get("bitwitness.respond.final")
    return final is not None and final.PROCESS.stop is not None


def exit_code(call: Callable[[], object]) -> int:
    """Call; return the exit code that Python would give the process."""
    try:
        result = call()
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return int(stop.code or 0)
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException as error:
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except SystemExit as stop:
            return stop.code if isinstance(stop.code, int) else 1
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return result if isinstance(result, int) else 0
