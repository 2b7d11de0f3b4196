"""What instruments say (a `Finding`: a suspicion), what the judge concludes (a `Verdict`), and plain notes.

Each turns into one JSON object, a line of ``events.jsonl``. NaN and infinities become the strings ``"NaN"``,
``"Infinity"``, ``"-Infinity"``, so that every line is standard JSON.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from bitwitness.errors import UsageError
from bitwitness.site import Site


class Severity(StrEnum):
    """How loud an event is."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Cause(StrEnum):
    """Who is to blame."""

    TRANSIENT_HARDWARE = "transient_hardware"
    PERSISTENT_HARDWARE = "persistent_hardware"
    CORRUPT_STATE = "corrupt_state"
    SOFTWARE = "software"
    DATA = "data"
    INCONCLUSIVE = "inconclusive"
    DISMISSED = "dismissed"


class Action(StrEnum):
    """What was done about it."""

    HEALED = "healed"
    SKIPPED = "skipped"
    STOPPED = "stopped"
    REPORTED = "reported"


SEEN = "seen_before_step"
"""In evidence: the step before whose use of gradients something was seen that only later steps have proven."""


@dataclass(frozen=True, slots=True)
class Device:
    """The identity of one accelerator (or of the host, on CPU): enough to find and quarantine it."""

    host: str
    index: int
    uuid: str
    kind: str = "cpu"

    def __str__(self) -> str:
        return f"{self.kind}:{self.index} ({self.uuid}) on {self.host}"


@dataclass(frozen=True, slots=True)
class Finding:
    """A suspicion. ``evidence`` holds the numbers that let a reader check it."""

    sensor: str
    site: Site
    severity: Severity
    message: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    step: int = 0
    rank: int = 0

    def to_event(self) -> dict[str, Any]:
        """Return the JSON object for ``events.jsonl``, without its time."""
        return {
            "type": "finding",
            "step": self.step,
            "rank": self.rank,
            "sensor": self.sensor,
            "site": str(self.site),
            "severity": str(self.severity),
            "message": self.message,
            "evidence": to_jsonable(self.evidence),
        }


@dataclass(frozen=True, slots=True)
class Verdict:
    """A conviction, reached by experiments. ``ranks`` and ``devices`` name the culprits (empty if none is proven)."""

    cause: Cause
    step: int
    ranks: tuple[int, ...]
    devices: tuple[Device, ...]
    action: Action
    message: str
    site: Site | None = None
    sensor: str = "judge"
    evidence: Mapping[str, Any] = field(default_factory=dict)
    fault_code: str | None = None

    @property
    def since(self) -> int:
        """The first step whose numbers are not to be trusted: earlier than ``step`` where it took steps to prove (`SEEN`)."""
        told = (self.evidence, *(one for one in self.evidence.values() if isinstance(one, Mapping)))
        return min([self.step, *(int(one[SEEN]) for one in told if SEEN in one)])

    def to_event(self) -> dict[str, Any]:
        """Return the JSON object for ``events.jsonl``, without its time."""
        event: dict[str, Any] = {
            "type": "verdict",
            "step": self.step,
            "rank": self.ranks[0] if self.ranks else None,
            "sensor": self.sensor,
            "site": None if self.site is None else str(self.site),
            "severity": str(Severity.ERROR if self.ranks else Severity.WARNING),
            "message": self.message,
            "cause": str(self.cause),
            "ranks": list(self.ranks),
            "devices": [asdict(device) for device in self.devices],
            "action": str(self.action),
            "evidence": to_jsonable(self.evidence),
        }
        if self.fault_code is not None:
            event["fault_code"] = self.fault_code
        return event


@dataclass(frozen=True, slots=True)
class Note:
    """A plain remark: coverage, a dismissed suspicion, a sensor that turned itself off."""

    message: str
    step: int = 0
    rank: int = 0
    sensor: str = "guard"
    severity: Severity = Severity.INFO
    site: Site | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def to_event(self) -> dict[str, Any]:
        """Return the JSON object for ``events.jsonl``, without its time."""
        return {
            "type": "note",
            "step": self.step,
            "rank": self.rank,
            "sensor": self.sensor,
            "site": None if self.site is None else str(self.site),
            "severity": str(self.severity),
            "message": self.message,
            "evidence": to_jsonable(self.evidence),
        }


Event = Finding | Verdict | Note


def event_of(data: Mapping[str, Any]) -> Event:
    """Return the event that a line of ``events.jsonl`` tells of: the inverse of ``to_event``, but for its time.

    Numbers that JSON cannot hold stay the strings that they were written as.

    Raises
    ------
    UsageError
        If the line is of no event.

    """
    try:
        return _EVENTS[data["type"]](data)
    except (KeyError, TypeError, ValueError, AttributeError, UsageError) as error:
        raise UsageError(f"not an event: {type(error).__name__}: {error}; expected what bitwitness writes") from error


def _finding_of(data: Mapping[str, Any]) -> Finding:
    return Finding(
        sensor=str(data["sensor"]),
        site=Site.parse(data["site"]),
        severity=Severity(data["severity"]),
        message=str(data["message"]),
        evidence=dict(data["evidence"]),
        step=int(data["step"]),
        rank=int(data["rank"]),
    )


def _verdict_of(data: Mapping[str, Any]) -> Verdict:
    return Verdict(
        cause=Cause(data["cause"]),
        step=int(data["step"]),
        ranks=tuple(map(int, data["ranks"])),
        devices=tuple(Device(**device) for device in data["devices"]),
        action=Action(data["action"]),
        message=str(data["message"]),
        site=None if data["site"] is None else Site.parse(data["site"]),
        sensor=str(data["sensor"]),
        evidence=dict(data["evidence"]),
        fault_code=data.get("fault_code"),
    )


def _note_of(data: Mapping[str, Any]) -> Note:
    return Note(
        message=str(data["message"]),
        step=int(data["step"]),
        rank=int(data["rank"]),
        sensor=str(data["sensor"]),
        severity=Severity(data["severity"]),
        site=None if data["site"] is None else Site.parse(data["site"]),
        evidence=dict(data["evidence"]),
    )


_EVENTS: dict[str, Callable[[Mapping[str, Any]], Event]] = {
    "finding": _finding_of,
    "verdict": _verdict_of,
    "note": _note_of,
}


def to_jsonable(value: Any) -> Any:
    """Return ``value`` as something standard JSON can hold; what has no better form becomes its ``str``."""
    if isinstance(value, bool) or value is None or isinstance(value, (int, str)):
        return value
    if isinstance(value, float):
        if math.isnan(value):
            return "NaN"
        if math.isinf(value):
            return "Infinity" if value > 0 else "-Infinity"
        return value
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [to_jsonable(item) for item in value]
    return str(value)
