"""For those who launch with NVIDIA's ft_launcher, Slurm or Kubernetes: is this node fit, in the words that these use.

A node is unfit while one of its devices is in quarantine. What a job's verdicts convicted is put there from its run folder: no
launcher of ours has done it. docs/recovery.md tells how each tool is set up.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

from bitwitness.errors import UsageError
from bitwitness.files.shown import shown
from bitwitness.finding import Action, Cause, Verdict
from bitwitness.launch.ended import events_of, first_trace
from bitwitness.launch.quarantine import EXPIRES, Quarantine, key_of
from bitwitness.store.folder import Run

METHOD = "/nvhcd.HealthCheckService/RunHealthCheck"
"""The call by which NVIDIA's launcher asks (nvidia-resiliency-ext, ``nvhcd.proto``)."""
_CONVICTION = (Cause.PERSISTENT_HARDWARE, Action.STOPPED)
_ASK_S = 5.0  # that one who connects may take to read


def take_in(
    quarantine: Quarantine, folder: Path, *, host: str | None = None, expires: timedelta = EXPIRES
) -> list[str]:
    """Put this host's devices that a job's verdicts convicted into quarantine; return their names, the new ones only.

    A verdict counts once: a device that was cleared since, or whose time is over, is not put back by it.

    Parameters
    ----------
    folder
        A run folder, or one that holds some: a launcher's, or a job's whose attempts have a folder each.
    host
        Whose devices; this one's by default.

    """
    host = socket.gethostname() if host is None else host
    found = []
    for run in _runs(folder):
        for event in events_of(run):
            if not isinstance(event, Verdict) or (event.cause, event.action) != _CONVICTION:
                continue
            for device in event.devices:
                where = os.path.abspath(run.path)
                if device.host == host and not quarantine.knows(device, where, event.step):
                    quarantine.add(device, event.message, run=where, step=event.step, expires=expires)
                    found.append(key_of(device))
    return found


def resume_before(folder: Path) -> int | None:
    """Return the first step of which no state of a job is to be trusted, by its verdicts; None where nothing stopped it."""
    found = []
    for run in _runs(folder):
        events = list(events_of(run))
        alone = run.description.get("world_size") == 1
        stops = [event for event in events if isinstance(event, Verdict) and event.action is Action.STOPPED]
        found += [first_trace(verdict, events, alone=alone) for verdict in stops]
    return min(found, default=None)


def health(quarantine: Quarantine) -> dict[str, Any]:
    """Return whether this node is fit: ``failed_checks`` and ``fail_count`` as NVIDIA's health checks have them, and why."""
    host = socket.gethostname()
    held = [entry for entry in quarantine.entries() if entry.device.host == host]
    return {
        "host": host,
        "healthy": not held,
        "fail_count": len(held),
        "failed_checks": [f"bitwitness: {key_of(entry.device)}: {shown(entry.reason)}" for entry in held],
        "action": "exclude_node" if held else "none",
    }


def serve(path: str, answer: Callable[[], dict[str, Any]], ended: threading.Event) -> None:
    """Answer everybody who connects to a Unix socket with one line of JSON, until ``ended``.

    Raises
    ------
    UsageError
        If the socket cannot be made, or something else is in its place.

    """
    _make_room(path)
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(path)
            Path(path).chmod(0o600)
        except OSError as error:
            raise UsageError(
                f"--socket {shown(path)}: {error.strerror}; name a path in a folder that exists"
            ) from error
        listener.listen()
        listener.settimeout(0.2)
        try:
            while not ended.is_set():
                with suppress(TimeoutError, OSError):
                    asking, _ = listener.accept()
                    with asking:
                        asking.settimeout(_ASK_S)
                        asking.sendall(json.dumps(answer()).encode() + b"\n")
        finally:
            Path(path).unlink(missing_ok=True)


def serve_nvidia(path: str, answer: Callable[[], dict[str, Any]], ended: threading.Event) -> None:
    """Answer NVIDIA's launcher (``--ft-node-health-check-endpoint``) on a Unix socket, until ``ended``.

    It needs grpcio, which comes with that launcher.

    Raises
    ------
    UsageError
        If there is no grpcio, or the socket cannot be made.

    """
    try:
        grpc: Any = import_module("grpc")
    except ImportError as error:
        raise UsageError(
            "--nvidia needs grpcio, and there is none here; it comes with nvidia-resiliency-ext"
        ) from error
    from concurrent.futures import ThreadPoolExecutor

    def called(_request: bytes, _context: Any) -> bytes:
        return response(answer())

    service, method = METHOD[1:].split("/")
    handler = grpc.method_handlers_generic_handler(service, {method: grpc.unary_unary_rpc_method_handler(called)})
    _make_room(path)
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((handler,))
    try:
        server.add_insecure_port(f"unix:{os.path.abspath(path)}")
    except RuntimeError as error:
        raise UsageError(f"--socket {shown(path)}: {error}; name a path in a folder that exists") from error
    server.start()
    try:
        ended.wait()
    finally:
        server.stop(None).wait(_ASK_S)
        Path(path).unlink(missing_ok=True)


def response(told: dict[str, Any]) -> bytes:
    """Return a health line as a ``HealthCheckResponse``: success = 1 (bool), exit_code = 2 (int32), output = 3 (string).

    Protocol buffers leave out what is false or 0.
    """
    output = json.dumps(told).encode()
    head = b"\x08\x01" if told["healthy"] else b"\x10\x01"
    return head + b"\x1a" + _varint(len(output)) + output


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def _make_room(path: str) -> None:
    """Take away the socket that a server which was killed left; nothing else."""
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise UsageError(f"--socket {shown(path)} is there, and is no socket; name another path")
        Path(path).unlink()


def _runs(folder: Path) -> Iterator[Run]:
    """Yield the run folders in a folder, or itself; one that cannot be read is told of, and the rest read."""
    if not folder.is_dir():
        raise UsageError(f"--run {shown(folder)} is no folder; expected a run folder, or one that holds some")
    for path in sorted({file.parent for depth in ("", "*/", "*/*/") for file in folder.glob(f"{depth}run.json")}):
        try:
            yield Run(path)
        except (UsageError, OSError) as error:
            sys.stderr.write(f"bitwitness: {shown(error)}\n")
