"""What follows from an attempt's end: which devices go into quarantine, whether the job begins again, and from where."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from bitwitness.errors import EXIT_CONVICTED
from bitwitness.finding import Device
from bitwitness.launch.ended import End, Ended
from bitwitness.launch.quarantine import key_of

_REPLAYS = 2  # attempts that came no further than the one before


@dataclass(frozen=True, slots=True)
class Limits:
    """How often the job is begun again: after verdicts and lost ranks, and after errors of the script."""

    relaunches: int = 3
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class Next:
    """What is done.

    Attributes
    ----------
    again
        Whether the job begins again.
    code
        Where not: the launcher's exit code.
    quarantine
        Devices that are convicted now.
    why
        One line.

    """

    again: bool
    code: int
    why: str
    quarantine: tuple[Device, ...] = ()


@dataclass(slots=True)
class Policy:
    """Decides, attempt by attempt.

    Attributes
    ----------
    resume_before
        The first step of which no state is to be trusted; None: all is.
    relaunches, left_out
        How often the job was relaunched; the devices that were convicted since it began.

    """

    limits: Limits
    resume_before: int | None = None
    relaunches: int = 0
    left_out: list[str] = field(default_factory=list)
    _restarts: int = 0
    _replays: int = 0
    _last_step: int | None = None
    _struck: Counter[str] = field(default_factory=Counter)

    def after(self, ended: Ended) -> Next:
        """Return what follows from an attempt's end."""
        if ended.trace is not None:
            self.resume_before = ended.trace if self.resume_before is None else min(self.resume_before, ended.trace)
        match ended.end:
            case End.FINISHED:
                return Next(again=False, code=0, why=self._finished())
            case End.CONVICTED | End.CORRUPT:
                return self._after_verdict(ended)
            case End.LOST:
                return self._relaunch(ended, ())
            case End.FAILED:
                return self._after_error(ended)
            case End.APART:
                return Next(again=False, code=ended.code, why=f"{ended.message}; this node begins no further attempt")
            case End.NO_SLOTS:
                return Next(again=False, code=ended.code, why=f"{ended.message}: this node takes no part")
            case End.UNPROVEN:
                why = f"{ended.message}; nothing is proven, so nothing is quarantined: resume it on other devices"
                return Next(again=False, code=ended.code, why=why)
        return Next(again=False, code=ended.code, why=ended.message)

    def _finished(self) -> str:
        count = self.relaunches
        without = f", without {', '.join(self.left_out)}" if self.left_out else ""
        return "the training finished" + (f" after {count} relaunch{'es' * (count > 1)}{without}" if count else "")

    def _after_verdict(self, ended: Ended) -> Next:
        self._struck.update(key_of(device) for device in ended.devices)
        bad = tuple(d for d in ended.devices if ended.end is End.CONVICTED or self._struck[key_of(d)] > 1)
        self.left_out += [key_of(device) for device in bad if key_of(device) not in self.left_out]
        if not ended.devices and ended.end is End.CONVICTED:
            why = (
                f"{ended.message}; no device is named, so none can be left out: look at 'bitwitness status' of the run"
            )
            return Next(again=False, code=EXIT_CONVICTED, why=why)
        stuck = self._last_step is not None and ended.step is not None and ended.step <= self._last_step
        self._replays = self._replays + 1 if stuck else 0
        self._last_step = ended.step
        if self._replays >= _REPLAYS:
            why = (
                f"replay loop: {self._replays + 1} attempts in a row were stopped, the last at step {ended.step}; none came "
                "further than the one before; what they have in common is not a device: look at that step's operator and data "
                f"({ended.message})"
            )
            return Next(again=False, code=EXIT_CONVICTED, why=why, quarantine=bad)
        return self._relaunch(ended, bad)

    def _relaunch(self, ended: Ended, quarantine: tuple[Device, ...]) -> Next:
        if self.relaunches >= self.limits.relaunches:
            why = f"{ended.message}; it was relaunched {self.relaunches} times, and more are not allowed (--max-relaunches)"
            return Next(again=False, code=ended.code, why=why, quarantine=quarantine)
        self.relaunches += 1
        return Next(again=True, code=0, why=ended.message, quarantine=quarantine)

    def _after_error(self, ended: Ended) -> Next:
        if self._restarts >= self.limits.restarts:
            tries = f"{self._restarts} restarts" if self._restarts else "no restart"
            why = f"{ended.message}: no device is to blame, and the job is not begun again ({tries} allowed by --max-restarts)"
            return Next(again=False, code=ended.code, why=why)
        self._restarts += 1
        return Next(again=True, code=0, why=ended.message)
