"""Who takes health events in tests: well-behaved, and in every way that a receiver can be rude."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class Receiver:
    """Listens, and does ``behave`` with each connection in a thread of its own; ``events`` is what it took."""

    def __init__(self, listening: socket.socket, behave: Callable[[Receiver, socket.socket], None]) -> None:
        self.listening, self.behave = listening, behave
        self.events: list[dict] = []
        self.asked = 0
        self._kept: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        while True:
            try:
                one, _ = self.listening.accept()
            except OSError:
                return
            self.asked += 1
            self._kept.append(one)  # a connection that hangs is not to be closed by being forgotten
            thread = threading.Thread(target=self._safely, args=(one,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _safely(self, one: socket.socket) -> None:
        with suppress(OSError):
            self.behave(self, one)

    def end(self) -> None:
        """Hang up on everybody, and see every thread end: one that goes on would be the script's to whoever tests after."""
        with suppress(OSError):
            self.listening.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        self._listener.join(10.0)
        for one in self._kept:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in (self._listener, *self._threads):
            thread.join(10.0)
            assert not thread.is_alive()

    def wait(self, count: int, seconds: float = 10.0) -> list[dict]:
        until = time.monotonic() + seconds
        while len(self.events) < count and time.monotonic() < until:
            time.sleep(0.01)
        return list(self.events)


@contextmanager
def at_socket(path: Path, behave: Callable[[Receiver, socket.socket], None]) -> Iterator[Receiver]:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        receiver = Receiver(listening, behave)
        yield receiver
        receiver.end()


@contextmanager
def at_port(behave: Callable[[Receiver, socket.socket], None]) -> Iterator[tuple[Receiver, int]]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        receiver = Receiver(listening, behave)
        yield receiver, listening.getsockname()[1]
        receiver.end()


def takes(to: Receiver, one: socket.socket) -> None:
    """Read lines until the end, as the receiver in docs/alerts.md does."""
    with one, one.makefile() as lines:
        to.events += [json.loads(line) for line in lines]


def hangs(to: Receiver, one: socket.socket) -> None:
    """Read nothing and say nothing."""


def closes(to: Receiver, one: socket.socket) -> None:
    """Close without having read."""
    one.close()


def received(one: socket.socket) -> bytes:
    """Return what comes next; raise OSError where the other has gone: nothing will come any more."""
    data = one.recv(65536)
    if not data:
        raise ConnectionError("closed by who sent")
    return data


def answers(status: str, drip: float = 0.0) -> Callable[[Receiver, socket.socket], None]:
    """Read a request and answer it with a status, a byte each ``drip`` seconds."""

    def behave(to: Receiver, one: socket.socket) -> None:
        with one:
            text = b""
            while b"\r\n\r\n" not in text:
                text += received(one)
            head, _, body = text.partition(b"\r\n\r\n")
            length = next(
                int(row.split(b":")[1]) for row in head.split(b"\r\n") if row.lower().startswith(b"content-length")
            )
            while len(body) < length:
                body += received(one)
            if status.startswith("2"):
                to.events.append(json.loads(body))
            answer = f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode()
            for byte in [answer] if not drip else [answer[at : at + 1] for at in range(len(answer))]:
                one.sendall(byte)
                time.sleep(drip)

    return behave
