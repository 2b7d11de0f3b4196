"""Serves one page over HTTP from one thread, to whoever scrapes it; slow and rude clients wait for nobody but themselves."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

_MOST_OPEN = 32  # connections; the oldest makes room
_PATIENCE_S = 2.0  # for a whole request, and for the answer to be taken
_LONGEST = 8192  # bytes of a request: a scraper's has a few hundred


@dataclass
class _Asking:
    """A connection whose request is not whole yet."""

    since: float
    request: bytearray = field(default_factory=bytearray)


class PageServer:
    """Listens at an address and answers ``GET /metrics``; nothing happens but inside `poll`.

    Parameters
    ----------
    host, port
        An IP address, and a port that is free.
    page
        Returns the page.
    content_type
        Of the page.

    Raises
    ------
    OSError
        If the port is taken, or the address is none of this machine's.

    """

    def __init__(self, host: str, port: int, page: Callable[[], bytes], content_type: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, port), family=family, backlog=_MOST_OPEN)
        self._listening.settimeout(0.0)
        self._page, self._type = page, content_type
        self._waker, self._woken = socket.socketpair()
        self._woken.settimeout(0.0)
        self._open: dict[socket.socket, _Asking] = {}
        self._selector = selectors.DefaultSelector()
        for one in (self._listening, self._woken):
            self._selector.register(one, selectors.EVENT_READ)

    def wake(self) -> None:
        """Have a `poll` in another thread return."""
        with suppress(OSError):
            self._waker.send(b"x")

    def close(self) -> None:
        """Listen no more. In a forked child the parent's sockets go on."""
        for one in (*self._open, self._listening, self._waker, self._woken):
            one.close()
        self._selector.close()
        self._open.clear()

    def poll(self, seconds: float) -> None:
        """Answer who asks, for so many seconds at the most."""
        for key, _ in self._selector.select(min(seconds, _PATIENCE_S) if self._open else seconds):
            if key.fileobj is self._listening:
                self._accept()
            elif key.fileobj is self._woken:
                with suppress(OSError):
                    self._woken.recv(64)
            else:
                self._read(key.fileobj)  # type: ignore[arg-type]
        now = time.monotonic()
        for one in [one for one, asking in self._open.items() if now - asking.since > _PATIENCE_S]:
            self._drop(one)

    def _accept(self) -> None:
        try:
            one, _ = self._listening.accept()
        except OSError:  # it is gone again, or there are too many files
            return
        if len(self._open) >= _MOST_OPEN:
            self._drop(next(iter(self._open)))
        one.settimeout(0.0)
        self._open[one] = _Asking(time.monotonic())
        self._selector.register(one, selectors.EVENT_READ)

    def _read(self, one: socket.socket) -> None:
        asking = self._open.get(one)
        if asking is None:  # it made room for another just now
            return
        try:
            piece = one.recv(_LONGEST)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        asking.request += piece
        whole = b"\r\n\r\n" in asking.request or b"\n\n" in asking.request
        if whole:
            with suppress(OSError):
                one.settimeout(_PATIENCE_S)
                one.sendall(self._answer(bytes(asking.request)))
                one.shutdown(socket.SHUT_WR)
        if whole or not piece or len(asking.request) > _LONGEST:
            self._drop(one)

    def _answer(self, request: bytes) -> bytes:
        method, _, rest = request.partition(b"\n")[0].partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if method not in (b"GET", b"HEAD"):
            return self._said("405 Method Not Allowed", b"GET /metrics\n", "text/plain")
        if path not in (b"/metrics", b"/"):
            return self._said("404 Not Found", b"the metrics are at /metrics\n", "text/plain")
        try:
            answer = self._said("200 OK", self._page(), self._type)
        except Exception as error:
            text = f"{type(error).__name__}\n".encode()
            return self._said("500 Internal Server Error", text, "text/plain")
        return answer.partition(b"\r\n\r\n")[0] + b"\r\n\r\n" if method == b"HEAD" else answer

    @staticmethod
    def _said(status: str, body: bytes, kind: str) -> bytes:
        head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        return head.encode() + body

    def _drop(self, one: socket.socket) -> None:
        self._open.pop(one, None)
        with suppress(OSError, KeyError, ValueError):
            self._selector.unregister(one)
        one.close()
