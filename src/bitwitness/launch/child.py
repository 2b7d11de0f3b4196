"""The agent's process: started, awaited, and ended within a deadline, with everything that it leaves behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_POLL_S = 0.1
_MARGIN_S = 15.0  # beyond the time that the agent itself gives its ranks
_ORPHANS_S = 5.0
_IDLE_S = 420.0  # an agent without ranks: it waits 300 s for other nodes' to end
_SUBREAPER, _DEATH_SIGNAL = 36, 1  # PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG (Linux)


def run_bounded(command: list[str], environment: dict[str, str], shutdown_s: float, watched: Callable[[], bool]) -> int:
    """Run an agent to its end; return its exit code, negative where a signal ended it. Nothing that it started outlives it.

    What ends this process (Ctrl-C, SIGTERM, as exceptions) ends the agent, and is raised again.

    Parameters
    ----------
    command, environment
        The agent's.
    shutdown_s
        Seconds that the agent gives its ranks to end before it kills them.
    watched
        Called every few seconds; tells whether the ranks were started.

    """
    adopts = _prctl(_SUBREAPER, 1)
    before = set(children_of(os.getpid()))
    agent = subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=end_with_parent)  # noqa: S603, PLW1509
    try:
        return _await(agent, shutdown_s, watched)
    except BaseException:
        _end(agent, shutdown_s + _MARGIN_S)
        raise
    finally:
        if adopts:
            _end_orphans(before)


def children_of(pid: int) -> list[int]:
    """Return a process's children, by /proc; ended ones that nobody has asked after count."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if int(fields[1]) == pid:
                found.append(int(stat.parent.name))
    return found


def _await(agent: subprocess.Popen[bytes], shutdown_s: float, watched: Callable[[], bool]) -> int:
    """Wait for the agent; one whose ranks have all been gone for longer than it may wait for others is ended."""
    idle_since: float | None = None
    looked = time.monotonic()
    while True:
        with suppress(subprocess.TimeoutExpired):
            return agent.wait(_POLL_S)
        now = time.monotonic()
        if now - looked < 5.0:
            continue
        looked = now
        if not watched() or children_of(agent.pid):
            idle_since = None
        elif idle_since is None:
            idle_since = now
        elif now - idle_since > _IDLE_S:
            sys.stderr.write(f"bitwitness: the agent goes on {_IDLE_S:g} s after its last rank; it is ended\n")
            return _end(agent, shutdown_s + _MARGIN_S)


def _end(agent: subprocess.Popen[bytes], patience_s: float) -> int:
    """Ask the agent to end its ranks and itself; kill it where it does not, or where the user asks again."""
    try:
        agent.terminate()
        return agent.wait(patience_s)
    except BaseException as error:
        agent.kill()
        code = agent.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            return code
        raise


def _end_orphans(before: set[int]) -> None:
    """End what the agent left: its ranks have become this process's children, and theirs after them."""
    until = time.monotonic() + _ORPHANS_S
    asked: set[int] = set()
    while left := [pid for pid in children_of(os.getpid()) if pid not in before]:
        late = time.monotonic() > until
        if time.monotonic() > until + _ORPHANS_S:
            sys.stderr.write(f"bitwitness: processes {left} do not end, not even when they are killed\n")
            return
        for pid in left:
            with suppress(OSError):
                if late or pid not in asked:
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
            with suppress(OSError):
                os.waitpid(pid, os.WNOHANG)
            asked.add(pid)
        time.sleep(0.05)


def end_with_parent() -> None:
    """Have a child process, which calls this, asked to end where its parent is killed (Linux)."""
    _prctl(_DEATH_SIGNAL, signal.SIGTERM)


def _prctl(option: int, value: int) -> bool:
    try:
        return int(ctypes.CDLL(None).prctl(option, value, 0, 0, 0)) == 0
    except (OSError, AttributeError):
        return False
