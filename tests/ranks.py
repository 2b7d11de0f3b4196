"""Ranks as ``torchrun`` starts them, and scripts as ``python`` does, forked from one process that has imported torch.

Half of a short job is its imports. A script's fork ends as Python ends, its threads awaited and what is registered "at exit"
called, but for its modules: to take torch apart costs as much as a short script. What a script leaves open is not closed.

What torchrun itself does (logs told apart, restarts, signals) is tested with torchrun. Each call of `forked` gives its ranks
the variables that torchrun gives, a store that an agent keeps, and ends the others where one fails.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from bitwitness.demo.launch import Launched


@cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, "-u", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
    )
    atexit.register(_end, server, os.getpid())
    return server


def _end(server: subprocess.Popen[str], pid: int) -> None:
    """Have the server end with the process that started it, and not with forks of that: it serves until its input ends."""
    if os.getpid() == pid:
        server.communicate()


def forked(
    ranks: int,
    arguments: list[str],
    logs: Path,
    *,
    environment: dict[str, str] | None = None,
    imported: tuple[str, ...] = (),
) -> Launched:
    """Run a script, or ``-m module``, and its arguments on so many ranks; as `bitwitness.demo.launch.torchrun`.

    ``imported``: modules that the ranks need and find imported, too.
    """
    for rank in range(ranks):
        (logs / f"{rank}").mkdir(parents=True)
    asked = {"ranks": ranks, "arguments": list(map(str, arguments)), "logs": str(logs), "port": _free_port()}
    asked["imported"] = imported
    code = _ask({**asked, "environment": environment or {}})
    return Launched(code, sorted(logs.rglob("std*.log")))


def without_torchrun(ranks: int, arguments: list[str], logs: Path, *, missing: int) -> dict[int, tuple[int, str]]:
    """Run a script on ranks that nobody launches together: nobody keeps their store, or ends the others where one fails.

    Return the exit code and stderr of each but ``missing``, which does not end by itself; it is killed when the others have.
    """
    for rank in range(ranks):
        (logs / f"{rank}").mkdir(parents=True)
    asked = {"ranks": ranks, "arguments": list(map(str, arguments)), "logs": str(logs), "port": _free_port()}
    code = _ask({**asked, "environment": {}, "missing": missing, "timeout": 400.0})
    assert code == 0, f"the others did not end: {[log.read_text()[-2000:] for log in logs.rglob('stderr.log')]}"
    codes = json.loads((logs / "codes.json").read_text())
    return {int(rank): (code, (logs / rank / "stderr.log").read_text()) for rank, code in codes.items()}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def script(
    arguments: list[str],
    where: Path,
    *,
    timeout: float = 800.0,
    environment: dict[str, str] | None = None,
    warn: tuple[str, ...] = (),
    imported: tuple[str, ...] = (),
) -> subprocess.CompletedProcess[str]:
    """Run ``python -W WARN… ARGUMENTS`` (a script or ``-m module``, and its arguments) in a folder; as `subprocess.run`.

    ``imported``: modules that it needs and finds imported, too, besides torch and the package.
    What depends on torch or the package not being imported yet (the order of "at exit") is tested in interpreters of their own.

    Raises
    ------
    subprocess.TimeoutExpired
        It took longer; it was killed.

    """
    with tempfile.TemporaryDirectory() as logs:
        asked = {
            "ranks": 0,
            "arguments": list(map(str, arguments)),
            "logs": logs,
            "where": str(where),
            "timeout": timeout,
            "warn": warn,
            "imported": imported,
        }
        code = _ask({**asked, "environment": environment or {}})
        out, err = ((Path(logs) / name).read_text() for name in ("stdout.log", "stderr.log"))
    if code is None:
        raise subprocess.TimeoutExpired(arguments, timeout, out, err)
    return subprocess.CompletedProcess(arguments, code, out, err)


class Started:
    """``python ARGUMENTS`` in a folder, while the test goes on; handled as a `subprocess.Popen` whose output goes to files.

    Parameters
    ----------
    arguments
        A script or ``-m module``, and its arguments.
    where
        The folder.

    Attributes
    ----------
    stdout, stderr
        What it has written there until now.
    returncode
        Its exit code, once `wait` has returned.

    """

    def __init__(self, arguments: list[str], where: Path) -> None:
        self._logs = Path(tempfile.mkdtemp(dir=where, prefix="logs-"))
        asked = {"ranks": 0, "arguments": list(map(str, arguments)), "logs": str(self._logs), "where": str(where)}
        pid = _ask({**asked, "environment": {}, "warn": (), "goes_on": True})
        assert pid is not None
        self.pid = pid
        self.returncode: int | None = None

    @property
    def stdout(self) -> str:
        return self._written("stdout")

    @property
    def stderr(self) -> str:
        return self._written("stderr")

    def _written(self, name: str) -> str:
        path = self._logs / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def wait(self, timeout: float) -> int | None:
        """Return its exit code, or None if it had to be killed after so many seconds."""
        self.returncode = _ask({"ranks": 0, "awaited": self.pid, "timeout": timeout, "environment": {}})
        return self.returncode


def _ask(asked: dict) -> int | None:
    """Have the server run something; return its exit code."""
    server = _server()
    unbuffered = {"PYTHONUNBUFFERED": "1"} if asked["ranks"] else {}
    asked["environment"] = {**os.environ, "OMP_NUM_THREADS": "1", **unbuffered, **asked["environment"]}
    try:
        server.stdin.write(json.dumps(asked) + "\n")
        server.stdin.flush()
        return json.loads(server.stdout.readline())
    except BaseException:
        server.kill()  # its ranks end with it
        server.wait()
        _server.cache_clear()
        raise


# -- the server --------------------------------------------------------------------------------------------------------------


def _serve() -> dict | None:
    """Serve; return, in a fork that is to be a script, what was asked of it."""
    import gc
    import importlib

    sys.path.append(str(Path(__file__).parents[1] / "bench"))
    for name in (
        "forking",
        "torch.distributed.fsdp",
        "torch.distributed.optim",
        "numpy.ma",
        "torch._dynamo",
        "bitwitness.guard",
        "bitwitness.inject",
        "bitwitness.cli",
    ):
        importlib.import_module(name)
    gc.collect()
    for line in sys.stdin:
        asked = json.loads(line)
        if "awaited" in asked:
            _answer(_await(asked["awaited"], asked["timeout"]))
            continue
        for name in asked.get("imported", ()):
            importlib.import_module(name)
        gc.freeze()
        pid = os.fork()
        if not pid:
            if not asked["ranks"]:
                return asked
            os._exit(_lead(asked) if asked.get("missing") is None else _watch(asked))
        _answer(pid if "goes_on" in asked else _await(pid, asked.get("timeout")))
    return None


def _answer(number: int | None) -> None:
    os.write(1, f"{json.dumps(number)}\n".encode())


def _await(pid: int, timeout: float | None) -> int | None:
    """Return the exit code of a process, or None if it had to be killed."""
    import signal
    import time

    until = time.monotonic() + (timeout or float("inf"))
    done = status = 0
    while not done and time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG if timeout else 0)
        if not done:
            time.sleep(0.01)
    if not done:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return None
    return os.waitstatus_to_exitcode(status)


def _alone(asked: dict) -> None:
    """Be a script, with streams as those of a ``python`` whose output is kept."""
    import warnings

    from forking import become

    os.chdir(asked["where"])
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
    sys.warnoptions += asked["warn"]
    warnings._processoptions(asked["warn"])
    become(lambda: _run(asked, {}), *(Path(asked["logs"]) / f"{name}.log" for name in ("stdout", "stderr")))


def _lead(asked: dict) -> int:
    """Be torchrun's agent: fork the ranks, keep their store, wait, and end all where one fails."""
    import signal
    import time
    from datetime import timedelta

    _die_with_parent()
    waiting = {_rank(asked, number) for number in range(asked["ranks"])}
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", asked["port"], is_master=True, wait_for_workers=False, timeout=timedelta(60))
    failed = False
    while waiting:
        for pid in list(waiting):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                waiting.discard(pid)
                if status and not failed:
                    failed = True
                    for other in waiting:
                        os.kill(other, signal.SIGTERM)
        time.sleep(0.02)
    del store
    return int(failed)


def _watch(asked: dict) -> int:
    """Fork the ranks, wait for all but one, and kill that."""
    import signal

    _die_with_parent()
    ranks = {number: _rank(asked, number) for number in range(asked["ranks"])}
    last = ranks.pop(asked["missing"])
    codes = {number: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for number, pid in ranks.items()}
    os.kill(last, signal.SIGKILL)
    os.waitpid(last, 0)
    (Path(asked["logs"]) / "codes.json").write_text(json.dumps(codes))
    return 0


def _rank(asked: dict, number: int) -> int:
    from forking import become

    pid = os.fork()
    if not pid:
        folder = Path(asked["logs"]) / str(number)
        become(lambda: _run(asked, _variables(asked, number)), folder / "stdout.log", folder / "stderr.log")
    return pid


def _variables(asked: dict, number: int) -> dict[str, str]:
    """Return what torchrun tells a rank."""
    size, port = str(asked["ranks"]), str(asked["port"])
    own = {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "GROUP_RANK": "0",
    }
    own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ROLE_RANK": str(number), "ROLE_WORLD_SIZE": size}
    if "missing" in asked:
        return own
    return own | {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": port,
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _run(asked: dict, own: dict[str, str]) -> None:
    """Be a process of Python: with variables of its own, and its script as ``__main__``."""
    import runpy
    import types

    _die_with_parent()
    os.environ.clear()
    os.environ.update(asked["environment"] | own)
    first, *rest = asked["arguments"]
    if first == "-m":
        sys.argv = rest
        sys.path[0] = str(Path.cwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    sys.argv = [first, *rest]
    sys.path[0] = str(Path(first).parent)
    main = types.ModuleType("__main__")
    main.__file__ = first
    sys.modules["__main__"] = main
    exec(compile(Path(first).read_text(), first, "exec"), main.__dict__)


def _die_with_parent() -> None:
    import ctypes
    import signal

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


if __name__ == "__main__" and (_asked := _serve()) is not None:
    _alone(_asked)
