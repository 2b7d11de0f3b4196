"""The quarantine: devices that were convicted, in a file that all launchers of a user share, each until it expires.

A device is known by its own number where its driver tells one (NVIDIA's UUID, an Ascend serial number), else by its host and
slot. The file is replaced as a whole, under a lock; one that is damaged is named, and never written over.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TextIO

from bitwitness.config.variables import QUARANTINE
from bitwitness.errors import UnreadError, UnwrittenError, UsageError
from bitwitness.files.reading import read_object
from bitwitness.files.shown import shown
from bitwitness.files.writing import write_text
from bitwitness.finding import Device
from bitwitness.store.claim import make_folder, open_private

EXPIRES = timedelta(days=7)
_REMEMBERED = timedelta(days=90)  # what has expired or was cleared: the verdict behind it is not to put it back
_SCHEMA = 1
_LOCK_S = 10.0  # a writer holds the lock for milliseconds; a file system that hangs is told of
_EXPECTED = "a quarantine list of bitwitness"
_UNNUMBERED = "#"  # what `device.this_device` makes up where a driver tells no number of the device


@dataclass(frozen=True, slots=True)
class Entry:
    """One device that is not to be used.

    Attributes
    ----------
    device
        Which one.
    reason
        One line.
    run
        The run folder that tells why; empty where a person added it.
    step
        The step of the verdict, if there was one.
    since, expires
        From when on, and until when.

    """

    device: Device
    reason: str
    run: str
    step: int | None
    since: datetime
    expires: datetime

    def to_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        device = self.device
        return {
            "device": key_of(device),
            "kind": device.kind,
            "host": device.host,
            "index": device.index,
            "uuid": device.uuid,
            "reason": self.reason,
            "run": self.run,
            "step": self.step,
            "since": self.since.isoformat(timespec="seconds"),
            "expires": self.expires.isoformat(timespec="seconds"),
        }

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Entry:
        """Return the entry that a row of the file tells of; raises `KeyError`, `TypeError` or `ValueError`."""
        device = Device(str(row["host"]), int(row["index"]), str(row["uuid"]), str(row["kind"]))
        step = row["step"]
        times = [datetime.fromisoformat(row[name]) for name in ("since", "expires")]
        if any(one.tzinfo is None for one in times):
            raise ValueError("a time without its zone")
        return cls(device, str(row["reason"]), str(row["run"]), None if step is None else int(step), *times)


def key_of(device: Device) -> str:
    """Return the one name by which a device is known: ``cuda:UUID``, ``npu:SERIAL`` or ``cpu:HOST:SLOT``."""
    if device.kind == "cpu" or _UNNUMBERED in device.uuid:
        return f"{device.kind}:{device.host}:{device.index}"
    return f"{device.kind}:{device.uuid.removeprefix('GPU-').lower()}"


def device_named(name: str) -> Device:
    """Return the device that a person names: ``cuda:UUID``, ``GPU-UUID``, ``KIND:HOST:SLOT`` or ``KIND:SLOT`` (of this host).

    Raises
    ------
    UsageError
        If it is none of these.

    """
    if name.startswith("GPU-") and len(name) > 4:
        return Device(socket.gethostname(), 0, name[4:], "cuda")
    kind, _, rest = name.partition(":")
    host, _, slot = rest.rpartition(":")
    if kind and slot.isdecimal() and len(slot) < 6 and (host or kind == "cpu" or len(slot) < 4):
        host = host or socket.gethostname()
        return Device(host, int(slot), f"{kind}{_UNNUMBERED}{slot}", kind)
    if kind and rest and not host and kind.isalnum():
        return Device(socket.gethostname(), 0, rest, kind)
    raise UsageError(
        f"{shown(name)} names no device; expected cuda:UUID or GPU-UUID (nvidia-smi -L), npu:SERIAL, or KIND:HOST:SLOT as in "
        f"cpu:{socket.gethostname()}:1"
    )


def default_file(environ: Mapping[str, str] | None = None) -> Path:
    """Return where the list is: ``BITWITNESS_QUARANTINE``, else in the user's state folder."""
    environ = os.environ if environ is None else environ
    if given := environ.get(QUARANTINE):
        return Path(given)
    state = environ.get("XDG_STATE_HOME", "")
    base = (
        Path(state) if Path(state).is_absolute() else Path.home() / ".local" / "state"
    )  # a relative one counts for none
    return base / "bitwitness" / "quarantine.json"


class Quarantine:
    """The list on disk.

    Parameters
    ----------
    path
        The file; `default_file` by default. It need not exist.

    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = default_file() if path is None else Path(path)

    def entries(self) -> list[Entry]:
        """Return what is in quarantine now, the oldest first.

        Raises
        ------
        UnreadError
            If the file is damaged or may not be read; what is quarantined is then not known.

        """
        now = datetime.now(UTC)
        return [entry for entry in self._read() if entry.expires > now]

    def holds(self, device: Device) -> Entry | None:
        """Return the entry of a device, if it has one; raises as `entries`."""
        return next((entry for entry in self.entries() if key_of(entry.device) == key_of(device)), None)

    def add(
        self, device: Device, reason: str, *, run: str = "", step: int | None = None, expires: timedelta = EXPIRES
    ) -> Entry:
        """Put a device into quarantine, or prolong its stay; return its entry.

        Raises
        ------
        UnreadError
            If the file is damaged: it is left as it is.
        UnwrittenError
            If the file cannot be written, or another writer held its lock for too long.

        """
        now = datetime.now(UTC)
        entry = Entry(device, reason, run, step, now, now + expires)
        with self._locked():
            others = [one for one in self._read() if one.expires <= now or key_of(one.device) != key_of(device)]
            self._write([*others, entry])
        return entry

    def clear(self, device: str | None = None) -> list[Entry]:
        """Take one device out (by its name or number), or all; return what was taken out. Raises as `add`."""
        with self._locked():
            here = self._read()
            now = datetime.now(UTC)
            gone = [one for one in here if one.expires > now and (device is None or device in _names_of(one.device))]
            if gone:
                self._write([replace(one, expires=now) if one in gone else one for one in here])
        return gone

    def knows(self, device: Device, run: str, step: int) -> bool:
        """Return whether a verdict has put a device here already, cleared since or not; raises as `entries`."""
        told = (key_of(device), run, step)
        return any((key_of(one.device), one.run, one.step) == told for one in self._read())

    def _read(self) -> list[Entry]:
        if not os.path.lexists(self.path):
            return []
        found = read_object(self.path, _EXPECTED)
        rows = found.get("devices")
        if found.get("schema") != _SCHEMA or not isinstance(rows, list):
            raise self._damaged(f"its schema is {found.get('schema')!r}, expected {_SCHEMA} and a list of devices")
        try:
            return [Entry.of(row) for row in rows]
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise self._damaged(f"{type(error).__name__}: {error}") from error

    def _damaged(self, why: str) -> UnreadError:
        return UnreadError(
            f"{shown(self.path)} is damaged ({shown(why)}); expected {_EXPECTED}. It is left as it is: put it right, or move "
            "it away to begin a new one"
        )

    def _write(self, entries: list[Entry]) -> None:
        old = datetime.now(UTC) - _REMEMBERED
        told = {"schema": _SCHEMA, "devices": [entry.to_dict() for entry in entries if entry.expires > old]}
        write_text(os.path.realpath(self.path), json.dumps(told, indent=1) + "\n", mode=0o600)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Be the only writer. The lock is a file beside the list: the list itself is another file after each write."""
        lock = self.path.with_name(f"{self.path.name}.lock")
        try:
            make_folder(self.path.parent)
            file = open_private(lock, "a")
        except OSError as error:
            raise UnwrittenError(
                f"cannot write {shown(self.path)}: {error.strerror or error}; name another file with --quarantine"
            ) from error
        with file:
            self._await(file, lock)
            yield  # closing the file lets go of the lock

    def _await(self, file: TextIO, lock: Path) -> None:
        until = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    raise UnwrittenError(
                        f"{shown(lock)} has been locked by another process for {_LOCK_S:g} s; look for who holds it (fuser)"
                    ) from None
                time.sleep(0.02)
            except OSError as error:
                raise UnwrittenError(f"cannot lock {shown(lock)}: {error.strerror or error}") from error
            else:
                return


def _names_of(device: Device) -> set[str]:
    return {key_of(device), device.uuid, f"GPU-{device.uuid}", f"{device.host}:{device.index}"}
