"""Who takes an event: a Unix socket, an HTTP address, stderr, syslog. Each delivers one line of JSON, or raises `OSError`.

None takes longer than its patience for what it waits for, a name's look-up aside.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit

from bitwitness.version import __version__

_PATIENCE_S = 2.0  # for one event
_LONGEST_ANSWER = 65536  # bytes that are read of an answer
_LONGEST_SYSLOG = 4096  # bytes: more than that, some daemons cut
_DAEMON, _ERROR, _NOTICE = 3, 3, 5  # facility and severities of RFC 5424, section 6.2.1


class Target(Protocol):
    """Takes events; ``name`` is what is said of it."""

    name: str

    def deliver(self, event: Mapping[str, Any]) -> None:
        """Deliver one event; raises `OSError` or `ValueError` where that failed."""


class UnixSocket:
    """A stream socket: one connection an event, a line of JSON. It is taken when the receiver closes, or answers."""

    def __init__(self, path: str, patience_s: float = _PATIENCE_S) -> None:
        self.name = f"health_socket {path}"
        self._path, self._patience = path, patience_s

    def deliver(self, event: Mapping[str, Any]) -> None:
        """See `Target`."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as to:
            to.settimeout(self._patience)
            to.connect(self._path)
            to.sendall(line_of(event))
            to.shutdown(socket.SHUT_WR)
            to.recv(1)  # its end, or anything; one that closed without reading resets the connection


class HttpAddress:
    """Gets events as ``POST`` of ``application/json``; any answer 2xx is a receipt. Redirections are not followed."""

    def __init__(self, url: str, patience_s: float = _PATIENCE_S) -> None:
        parts = urlsplit(url)
        self.name = f"health_url {parts.scheme}://{parts.netloc}{parts.path}"  # a query may hold a token
        self._host = parts.hostname or ""
        self._secure = parts.scheme == "https"
        self._port = parts.port or (443 if self._secure else 80)
        self._patience = patience_s
        path = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
        self._head = (
            f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nUser-Agent: bitwitness/{__version__}\r\n"
            "Content-Type: application/json\r\nConnection: close\r\n"
        )

    def deliver(self, event: Mapping[str, Any]) -> None:
        """See `Target`."""
        until = time.monotonic() + self._patience
        body = line_of(event)
        with socket.create_connection((self._host, self._port), timeout=self._patience) as plain:
            to = ssl.create_default_context().wrap_socket(plain, server_hostname=self._host) if self._secure else plain
            with to:
                to.sendall(f"{self._head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                status = _status_of(to, until)
        if not 200 <= status < 300:
            raise OSError(f"it answered {status}")


def _status_of(to: socket.socket, until: float) -> int:
    """Return the status of an HTTP answer, however slowly it drips, before ``until``."""
    answer = b""
    while b"\n" not in answer and len(answer) < _LONGEST_ANSWER:
        to.settimeout(max(0.001, until - time.monotonic()))
        piece = to.recv(4096)
        if not piece or time.monotonic() > until:
            break
        answer += piece
    words = answer.partition(b"\n")[0].split()
    if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
        raise OSError("its answer is not HTTP" if answer else "it closed without an answer")
    return int(words[1])


class Stderr:
    """Prints a line that begins with ``bitwitness-event`` and goes on with flat JSON."""

    name = "log on stderr"

    def deliver(self, event: Mapping[str, Any]) -> None:
        """See `Target`."""
        sys.stderr.write(f"{LOG_WORD} {json.dumps(flat(event), allow_nan=False)}\n")
        sys.stderr.flush()


class Syslog:
    """Sends the same line to the local syslog daemon, as a datagram of RFC 3164."""

    def __init__(self, path: str = "/dev/log", patience_s: float = _PATIENCE_S) -> None:
        self.name = f"log in syslog ({path})"
        self._path, self._patience = path, patience_s

    def deliver(self, event: Mapping[str, Any]) -> None:
        """See `Target`."""
        severity = _ERROR if event.get("event_type") == "fault" else _NOTICE
        text = f"<{_DAEMON * 8 + severity}>bitwitness[{os.getpid()}]: {LOG_WORD} {json.dumps(flat(event), allow_nan=False)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
            to.settimeout(self._patience)
            to.connect(self._path)
            to.send(text.encode()[:_LONGEST_SYSLOG])


LOG_WORD = "bitwitness-event"


def line_of(event: Mapping[str, Any]) -> bytes:
    """Return an event as a line of JSON."""
    return json.dumps(event, allow_nan=False).encode() + b"\n"


def flat(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of an event a log line holds: no nested objects, the long message last."""
    ours = dict(event["bitwitness"])
    device = ours.pop("device") or {}
    message = str(ours.pop("message"))[:1000]
    own = {name: event[name] for name in ("id", "time", "event_type", "health_status", "error_code", "fault_level")}
    return {**own, **ours, **{f"device_{name}": value for name, value in device.items()}, "message": message}
