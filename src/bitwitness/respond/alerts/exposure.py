"""Shows a process's numbers to Prometheus, over HTTP or as node_exporter's text files, from one thread that waits mostly.

The thread ends before each fork of the process and begins again behind it: a process with threads had better not fork.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from bitwitness.files.shown import shown
from bitwitness.files.writing import write_text
from bitwitness.respond.alerts.metrics import CONTENT_TYPE, Source, text_of
from bitwitness.respond.alerts.serving import PageServer

_EVERY_S = 10.0  # between two text files; node_exporter itself is scraped every 15 or 60 s
_FORK_WAITS_S = 0.5
_MODE = 0o644  # node_exporter runs as another user


def prefix_of(run: str) -> str:
    """Return how the names of a run's text files begin."""
    return f"bitwitness-{crc32(run.encode(errors='surrogateescape')):08x}-rank"


@dataclass(frozen=True, slots=True)
class Key:
    """What tells a source from all others on a host: the run folder's whole path, or what stands for one; the rank."""

    run: str
    rank: int

    @property
    def file(self) -> str:
        """The name of its text file; node_exporter reads what ends in ``.prom``."""
        return f"{prefix_of(self.run)}{self.rank:05d}.prom"


class Exposure:
    """Serves, and writes, what its sources tell.

    Parameters
    ----------
    address
        IP address and port; None serves nothing.
    folder
        Where text files go; None writes none.
    say
        Told once what does not work.

    """

    def __init__(self, address: tuple[str, int] | None, folder: str | None, say: Callable[[str], None]) -> None:
        self._say = say
        self._sources: dict[Key, Source] = {}
        self._folder = None if folder is None else Path(os.path.abspath(folder))  # a script may change its directory
        self._said: set[str] = set()
        self._owner = os.getpid()
        self._server: PageServer | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        if address is not None:
            self._serve(*address)

    def _serve(self, host: str, port: int) -> None:
        try:
            self._server = PageServer(host, port, self._page, CONTENT_TYPE)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or str(error)
            self._tell(f"no metrics are served at {host}:{port}: {why}; the training goes on without them")

    def join(self, key: Key, source: Source) -> None:
        """Show a source's numbers from now on."""
        self._sources[key] = source
        self.after_fork_here()

    def leave(self, key: Key, *, keep: bool) -> bool:
        """Show a source no more; ``keep`` leaves its text file, as it is now. Return whether others are left."""
        source = self._sources.get(key)
        if source is not None and self._folder is not None and os.getpid() == self._owner:
            if keep:
                self._write(key, source)
            else:
                with suppress(OSError):
                    (self._folder / key.file).unlink(missing_ok=True)
        self._sources.pop(key, None)
        return bool(self._sources)

    def close(self) -> None:
        """Serve no more."""
        self.before_fork()
        self._folder = None
        if self._server is not None:
            self._server.close()
            self._server = None

    def after_fork(self, *, worker: bool) -> None:
        """Serve nothing in a forked child: its port is the parent's."""
        del worker
        self._thread, self._folder = None, None
        self._sources = {}
        if self._server is not None:
            self._server.close()
            self._server = None

    # -- the thread ----------------------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Let the thread end; one that a file system holds is not waited for."""
        thread = self._thread
        if thread is None or thread is threading.current_thread() or os.getpid() != self._owner:
            return
        self._stop.set()
        if self._server is not None:
            self._server.wake()
        thread.join(_FORK_WAITS_S)
        if not thread.is_alive():
            self._thread = None

    def after_fork_here(self) -> None:
        """Go on, in the process that forked."""
        idle = not self._sources or (self._server is None and self._folder is None)
        if os.getpid() != self._owner or idle:
            return
        if self._thread is not None and self._thread.is_alive():
            self._stop.clear()
            return
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(self._stop,), name="bitwitness metrics", daemon=True)
        self._thread.start()

    def _run(self, stop: threading.Event) -> None:
        try:
            self._show(stop)
        except Exception as error:
            self._tell(
                f"metrics are shown no more ({type(error).__name__}: {shown(error)}); the training goes on without"
            )

    def _show(self, stop: threading.Event) -> None:
        due = time.monotonic()
        while not stop.is_set():
            server = self._server
            if server is not None:
                server.poll(1.0 if self._folder is None else max(0.0, min(1.0, due - time.monotonic())))
            else:
                stop.wait(max(0.0, due - time.monotonic()))
            if self._folder is not None and time.monotonic() >= due and not stop.is_set():
                due = time.monotonic() + _EVERY_S
                for key, source in list(self._sources.items()):
                    self._write(key, source)

    def _page(self) -> bytes:
        return text_of(list(self._sources.values()))

    def _write(self, key: Key, source: Source) -> None:
        folder = self._folder
        if folder is None:
            return
        try:
            write_text(folder / key.file, text_of([source]).decode(), _MODE)
        except Exception as error:
            self._tell(
                f"no metrics are written into {shown(folder)}: {shown(error)}; the training goes on without them"
            )

    def _tell(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)
