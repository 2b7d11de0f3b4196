"""The answer of a test: a verdict on each device, in words and as JSON."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bitwitness.errors import EXIT_FINDINGS, EXIT_INTERRUPTED, EXIT_UNREAD
from bitwitness.stress.ascend_dmi import TOOL, Diagnosis
from bitwitness.stress.course import Outcome
from bitwitness.stress.process import DeviceProcess
from bitwitness.stress.verdict import HOW, SPREAD, WRONG, Fault

FAULTY, SUSPECT, LOST, UNDECIDED, HEALTHY = "faulty", "suspect", "lost", "undecided", "healthy"
"""Verdicts on a device: proven; wrong, its hardware or its kernels; died or hung; something is open; none of these."""
_SO_FAR = "nothing wrong was found until it was interrupted; let it run to its end to be told more"
_SOFTWARE = (
    "all devices healthy: so suspect software (an overflow, say): look at the script and its operators "
    "(bitwitness trace SCRIPT, bitwitness precheck RUN)"
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What is to be told; ``emulated``: which faults are injected here, empty where none are."""

    outcome: Outcome
    diagnosis: Diagnosis | None = None
    emulated: str = ""

    def _faults(self, one: DeviceProcess) -> list[Fault]:
        return [fault for fault in self.outcome.faults if fault.slot == one.slot]

    def verdict(self, one: DeviceProcess) -> str:
        """Return the verdict on a device."""
        faults = self._faults(one)
        if any(fault.certain for fault in faults):
            return FAULTY
        if faults:
            return SUSPECT
        if one.lost:
            return LOST
        return UNDECIDED if any(one.slot in r.slots for r in self.outcome.remarks if r.kind != SPREAD) else HEALTHY

    @property
    def exit_code(self) -> int:
        """The exit code, as docs/exit-codes.md has them."""
        out = self.outcome
        if out.interrupted:
            return EXIT_INTERRUPTED
        if out.faults or any(one.kind == WRONG for one in out.remarks) or (self.diagnosis and self.diagnosis.faulty):
            return EXIT_FINDINGS
        return EXIT_UNREAD if self._is_open else 0

    @property
    def _is_open(self) -> bool:
        out = self.outcome
        return (
            bool(out.untested)
            or any(one.lost for one in out.devices)
            or any(one.kind != SPREAD for one in out.remarks)
            or not out.seen
            or (self.diagnosis is not None and self.diagnosis.undecided)
        )

    def problems(self) -> list[str]:
        """Return a sentence for each thing that is not as it should be; the devices to be replaced first."""
        return [*self._faulty(), *self._open()]

    def _faulty(self) -> Iterator[str]:
        for one in self.outcome.devices:
            faults = self._faults(one)
            if faults:
                yield _replace(one, faults, certain=self.verdict(one) == FAULTY)
        if self.diagnosis is not None and self.diagnosis.faulty:
            yield f"replace the hardware that {TOOL} names: {self.diagnosis.text}"

    def _open(self) -> Iterator[str]:
        out = self.outcome
        for one in out.devices:
            if one.lost:
                yield f"device {one.slot}, {one.label}, is lost: {one.lost}"
        yield from (one.text for one in out.remarks if one.kind != SPREAD)
        whys: dict[str, list[str]] = defaultdict(list)
        for key, why in out.untested.items():
            whys[why].append(key)
        for why, keys in whys.items():
            yield f"not tested, or not to the end: {_some(keys)}: {why}"
        if self.diagnosis is not None and self.diagnosis.undecided:
            yield f"{TOOL} gave no clear answer ({self.diagnosis.state or 'none'}): {self.diagnosis.text}"

    def told(self) -> list[str]:
        """Return the answer in lines, the last of them what to do."""
        out = self.outcome
        lines = [f"faults are injected here: {self.emulated}"] if self.emulated else []
        runs = sum(count.total() for seen in out.seen for count in seen.counts.values())
        lines.append(
            f"{len(out.devices)} devices ({out.plan.kind}), {len(out.workloads)} workloads, {out.passes} whole passes, "
            f"{runs} runs in {out.seconds:.0f} s" + (", interrupted" if out.interrupted else "")
        )
        if out.unsupported:
            lines.append(f"no device here computes {_some(list(out.unsupported))}")
        lines += [one.text for one in out.remarks if one.kind == SPREAD]
        if self.diagnosis is not None and not self.diagnosis.faulty and not self.diagnosis.undecided:
            lines.append(f"{TOOL}: {self.diagnosis.state}")
        faulty, still_open = list(self._faulty()), list(self._open())
        if not faulty and not still_open:
            lines.append(_SO_FAR if out.interrupted else _SOFTWARE if out.seen else "nothing was tested")
        return [*lines, *still_open, *faulty]

    def as_dict(self) -> dict[str, Any]:
        """Return the answer as JSON takes it; docs/stress.md describes it."""
        out = self.outcome
        code = self.exit_code
        status = "findings" if code == EXIT_FINDINGS or out.faults else "unread" if code else "fine"
        return {
            "bitwitness_stress": 1,
            "status": status,
            "problems": self.problems(),
            "told": self.told(),
            "interrupted": out.interrupted,
            "injected": self.emulated,
            "passes": out.passes,
            "seconds": round(out.seconds, 3),
            "workloads": len(out.workloads),
            "devices": [self._device(one) for one in out.devices],
            "remarks": [one.as_dict() for one in out.remarks],
            "unsupported": out.unsupported,
            "untested": out.untested,
            "ascend_dmi": None if self.diagnosis is None else self.diagnosis.as_dict(),
        }

    def _device(self, one: DeviceProcess) -> dict[str, Any]:
        faults = self._faults(one)
        return {
            "slot": one.slot,
            "verdict": self.verdict(one),
            "device": None if one.device is None else asdict(one.device),
            "core": one.core,
            "software": dict(one.model),
            "lost": one.lost,
            "runs": sum(seen.counts[one.slot].total() for seen in self.outcome.seen if one.slot in seen.counts),
            "wrong": sum(fault.wrong for fault in faults),
            "faults": [fault.as_dict() for fault in sorted(faults, key=_earliest)],
        }


def _replace(one: DeviceProcess, faults: Sequence[Fault], *, certain: bool) -> str:
    """Return what is to be done about a device, and the plainest reason: what it did wrongly most often."""
    by_workload: dict[str, list[Fault]] = defaultdict(list)
    for fault in faults:
        by_workload[fault.workload.key].append(fault)
    worst = max(by_workload.values(), key=lambda of: (of[0].certain, sum(fault.wrong for fault in of)))
    first = min(worst, key=_earliest)
    wrong, runs = sum(fault.wrong for fault in worst), sum(fault.runs for fault in worst)
    how = f" ({first.difference})" if first.difference is not None else ""
    more = f"; and {len(by_workload) - 1} other workloads" if len(by_workload) > 1 else ""
    what = (
        f"it computed {first.workload.key} wrongly {wrong} of {runs} times, first in run {first.first.run} at "
        f"{first.first.time}{how}: {HOW[first.proof]}{more}"
    )
    if certain:
        return f"replace device {one.slot}, {one.label}: {what}"
    return (
        f"device {one.slot}, {one.label}: {what}. Every run gave the same: its hardware or its kernels are to blame; a second "
        "device of its model beside it, or --golden, tells which"
    )


def _earliest(fault: Fault) -> tuple[str, int]:
    return fault.first.time, fault.first.run


def _some(keys: Sequence[str]) -> str:
    return "; ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
