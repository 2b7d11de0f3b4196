"""The answer: all that was seen, judged by the rule that fits it, once, at the end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from bitwitness.stress.golden import Golden
from bitwitness.stress.known import Due, Suspicion, delivered, exactly, settled
from bitwitness.stress.tally import Seen
from bitwitness.stress.verdict import GOLDEN, UNDECIDED, Fault, Found, Remark, fault_of
from bitwitness.stress.vote import voted
from bitwitness.stress.workload import Workload

Model = tuple[tuple[str, str], ...]
_FEW = 0.5  # of what was compared with a golden file: a fault that were in more of it would be in everything


def concluded(
    seen: Sequence[Seen],
    workloads: Sequence[Workload],
    models: Mapping[int, Mapping[str, str]],
    due: Due,
    golden: Golden | None = None,
) -> Found:
    """Judge all that was seen.

    Parameters
    ----------
    seen
        Of each workload and input.
    workloads
        By the number that ``seen`` has.
    models
        Model and software of the device of each slot: rounded results are compared among equal ones.
    due
        The right bits of what is exact.
    golden
        Fingerprints of a good device of the same model.

    """
    groups: dict[Model, list[int]] = defaultdict(list)
    for slot, model in models.items():
        groups[tuple(sorted(model.items()))].append(slot)
    faults: list[Fault] = []
    remarks: list[Remark] = []
    suspicions: list[Suspicion] = []
    for one in seen:
        workload = workloads[one.workload]
        if workload.collective:
            found, suspected = delivered(one, workload, due)
            faults += found
            suspicions += suspected
        elif workload.exact:
            _add(faults, remarks, exactly(one, workload, due))
        else:
            for slots in groups.values():
                _add(faults, remarks, voted(one, workload, slots))
    _add(faults, remarks, settled(suspicions, {one.slot for one in faults}))
    if golden is not None:
        _add(faults, remarks, _against(golden, seen, workloads, faults))
    return faults, remarks


def _add(faults: list[Fault], remarks: list[Remark], found: Found) -> None:
    faults += found[0]
    remarks += found[1]


def _against(golden: Golden, seen: Sequence[Seen], workloads: Sequence[Workload], known: Sequence[Fault]) -> Found:
    """Hold devices against a good one's fingerprints: of the same model and software, so that all bits are equal."""
    told = {(one.slot, one.workload.key, one.variant) for one in known}
    compared: dict[int, int] = defaultdict(int)
    other: dict[int, list[Fault]] = defaultdict(list)
    for one in seen:
        workload = workloads[one.workload]
        right = golden.of(one, workload)
        if right is None or one.nondeterministic:
            continue
        for slot, count in one.counts.items():
            compared[slot] += 1
            if any(fingerprint != right for fingerprint in count):
                other[slot].append(fault_of(one, workload, slot, GOLDEN, {right}, None))
    if not compared:
        text = "nothing that was done here was done on the golden device; make the file anew, with the same options"
        return [], [Remark(UNDECIDED, (), "golden", text)]
    faults: list[Fault] = []
    remarks: list[Remark] = []
    for slot, found in other.items():
        if len(found) > _FEW * compared[slot] and compared[slot] > 1:
            text = (
                f"device {slot} has other bits than the golden device in {len(found)} of {compared[slot]} comparisons: rather "
                "another driver, other kernels or another number of threads than a fault; make the file anew"
            )
            remarks.append(Remark(UNDECIDED, (slot,), "golden", text))
        else:
            faults += [one for one in found if (one.slot, one.workload.key, one.variant) not in told]
    return faults, remarks
