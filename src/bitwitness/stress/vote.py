"""Who is wrong where only votes and float64 can tell: results that are rounded.

Devices of one model and one software run the same kernels on the same numbers, so that their bits are equal. One that differs
is convicted where float64 finds it outside of what its dtype allows, where it contradicts itself and no other does, or where
the others agree and it differs in a few rows or columns only: another algorithm would round otherwise everywhere. An operator
that most devices do not repeat is one whose bits vary by design; of it only float64 convicts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bitwitness.stress.difference import Difference
from bitwitness.stress.tally import Seen
from bitwitness.stress.verdict import (
    FLOAT64,
    MAJORITY,
    MANY,
    OWN_RUNS,
    SOFTWARE,
    SPREAD,
    UNDECIDED,
    Fault,
    Found,
    Remark,
    fault_of,
    first_difference,
)
from bitwitness.stress.workload import Workload


def voted(seen: Seen, workload: Workload, slots: Sequence[int]) -> Found:
    """Judge what devices of one model gave for a workload and input."""
    one = _Vote(seen, workload, [slot for slot in slots if slot in seen.counts])
    return one.found()


class _Vote:
    def __init__(self, seen: Seen, workload: Workload, slots: list[int]) -> None:
        self._seen, self._workload, self._slots = seen, workload, slots
        self._unsteady = [slot for slot in slots if len(seen.counts[slot]) > 1]
        self._usual = {slot: seen.usual(slot) for slot in slots}

    def found(self) -> Found:
        if not self._slots:
            return [], []
        if self._seen.nondeterministic or len(self._unsteady) > max(len(self._slots) / 2, 1):
            return self._varying()
        if len(self._slots) == 1:
            return self._alone(self._slots[0])
        agreed = self._agreed()
        return self._without_agreement() if agreed is None else self._against(agreed)

    def _agreed(self) -> str | None:
        fingerprint, votes = Counter(self._usual.values()).most_common(1)[0]
        wanted = len(self._slots) if len(self._slots) < MANY else len(self._slots) / 2
        return fingerprint if votes > wanted or votes == len(self._slots) else None

    def _varying(self) -> Found:
        """Judge an operator whose bits vary, by float64 alone."""
        faults = [fault for slot in self._slots if (fault := self._outside(slot)) is not None]
        if faults or not self._unsteady:
            return faults, []
        why = self._seen.nondeterministic or "its bits vary on most devices"
        text = f"{self._workload.key} does not repeat its bits by design ({why}); it was held against float64 instead"
        return [], [Remark(SPREAD, tuple(self._slots), self._workload.key, text)]

    def _alone(self, slot: int) -> Found:
        within = self._seen.within
        if slot not in self._unsteady:
            if within.get(self._usual[slot]) is not False:
                return [], []
            return [fault_of(self._seen, self._workload, slot, FLOAT64, set(), None, certain=False)], []
        fault = self._outside(slot)
        if fault is not None:
            return [fault], []
        count = self._seen.counts[slot]
        text = (
            f"{self._workload.key} gave {len(count)} different results in {count.total()} runs, none of them outside of what "
            "rounding allows: an operator that does not repeat its bits, or a fault in the last of them; test it beside a "
            "second device, or with --golden"
        )
        return [], [Remark(UNDECIDED, (slot,), self._workload.key, text)]

    def _outside(self, slot: int) -> Fault | None:
        """Return the fault of a device some of whose results float64 finds wrong, if some result of anybody's is right."""
        within = self._seen.within
        right = {one for one in self._seen.fingerprints if within.get(one) is not False}
        wrong = [one for one in self._seen.counts[slot] if one not in right]
        if not wrong or not any(within.get(one) for one in right):
            return None
        known = next(one for one in right if within.get(one))
        return fault_of(self._seen, self._workload, slot, FLOAT64, right, self._differs(known, wrong))

    def _without_agreement(self) -> Found:
        """Judge devices of which no majority agrees."""
        faults = [fault for slot in self._slots if (fault := self._outside(slot)) is not None]
        if faults:
            return faults, []
        if all(self._seen.within.get(one) is False for one in self._usual.values()):
            return [], [self._software("with different bits, outside of what its dtype allows")]
        text = f"{self._workload.key}: they differ, and each lies within what rounding allows, or float64 cannot tell"
        return [], [Remark(UNDECIDED, tuple(self._slots), self._workload.key, text)]

    def _against(self, agreed: str) -> Found:
        """Judge those that differ from what is agreed on."""
        faults, remarks = [], []
        inaccurate = self._seen.within.get(agreed) is False
        if inaccurate:
            remarks.append(self._software("alike, and outside of what its dtype allows"))
        for slot in self._slots:
            others = [one for one in self._seen.counts[slot] if one != agreed]
            if not others:
                continue
            differs = self._differs(agreed, others)
            if not inaccurate and any(self._seen.within.get(one) is False for one in others):
                proof = FLOAT64
            elif self._unsteady == [slot]:
                proof = OWN_RUNS
            elif slot not in self._unsteady and len(self._slots) >= MANY and differs is not None and differs.confined:
                proof = MAJORITY
            else:
                remarks.append(self._undecided(slot, differs))
                continue
            faults.append(fault_of(self._seen, self._workload, slot, proof, {agreed}, differs))
        return faults, remarks

    def _undecided(self, slot: int, differs: Difference | None) -> Remark:
        how = f" ({differs})" if differs is not None else ""
        text = (
            f"{self._workload.key}: device {slot} has other bits than the others agree on{how}, within what rounding allows "
            "and not confined to a part: another algorithm, or a fault in the last bits"
        )
        return Remark(UNDECIDED, (slot,), self._workload.key, text)

    def _software(self, how: str) -> Remark:
        text = f"{self._workload.key}: all devices compute it {how}: its kernels are to blame, no device"
        return Remark(SOFTWARE, tuple(self._slots), self._workload.key, text)

    def _differs(self, known: str, wrong: list[str]) -> Difference | None:
        values = self._seen.values
        return first_difference(self._seen, values[known], wrong) if known in values else None
