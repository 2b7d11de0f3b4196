"""Who is wrong where the right bits are known: whole numbers, copies, and what devices send one another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bitwitness.stress.collectives import SUMS, sources_of
from bitwitness.stress.tally import Seen, Slots
from bitwitness.stress.verdict import EXACT, MANY, SOFTWARE, WRONG, Fault, Found, Remark, fault_of, first_difference
from bitwitness.stress.workload import Workload

Due = Callable[[Seen, int], tuple[str, Callable[[], Slots]]]
"""What a device is due: a fingerprint, and what makes the values behind it."""


def exactly(seen: Seen, workload: Workload, due: Due) -> Found:
    """Judge what is no collective: every other result than the right one is a fault, unless all devices give it."""
    slots = sorted(seen.counts)
    right, values = due(seen, slots[0])
    usual = {seen.usual(slot) for slot in slots}
    if len(slots) > 1 and len(usual) == 1 and right not in usual:
        text = f"{workload.key}: all devices have the same wrong bits: its kernels are to blame, or the host that knows better"
        return [], [Remark(SOFTWARE, tuple(slots), workload.key, text)]
    faults = []
    for slot in slots:
        wrong = [one for one in seen.counts[slot] if one != right]
        if wrong:
            certain = len(slots) > 1 or right in seen.counts[slot]
            faults.append(
                fault_of(seen, workload, slot, EXACT, {right}, first_difference(seen, values(), wrong), certain=certain)
            )
    return faults, []


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A wrong delivery for which one of several devices is to blame; ``fault``: as the first receiver's own."""

    slots: frozenset[int]
    receivers: tuple[int, ...]
    fault: Fault


def delivered(seen: Seen, workload: Workload, due: Due) -> tuple[list[Fault], list[Suspicion]]:
    """Judge a collective: who received what is not due, and whose contribution it is made of."""
    ranks = sorted(seen.counts)
    wrong: dict[int, Fault] = {}
    by_source: dict[int, set[int]] = defaultdict(set)
    for slot in ranks:
        right, values = due(seen, slot)
        others = [one for one in seen.counts[slot] if one != right]
        if others:
            differs = first_difference(seen, values(), others)
            wrong[slot] = fault_of(seen, workload, slot, EXACT, {right}, differs)
            for place in differs.at if differs is not None else []:
                for source in sources_of(workload.name, tuple(place), seen.variant, len(ranks)):
                    by_source[source].add(slot)
    if not wrong:
        return [], []
    first = wrong[min(wrong)]
    if named := _named(workload.name, set(wrong), by_source, len(ranks)):
        return [wrong.get(slot) or replace(first, slot=slot) for slot in sorted(named)], []
    return [], [Suspicion(frozenset(wrong) | frozenset(by_source or ranks), tuple(sorted(wrong)), first)]


def _named(name: str, receivers: set[int], by_source: dict[int, set[int]], ranks: int) -> set[int]:
    """Return whom the pattern of wrong deliveries names by itself."""
    if name == "all_reduce":  # a sum that others received right was wrong only where it was received
        return receivers if 2 * len(receivers) < ranks or (ranks == 2 and len(receivers) == 1) else set()
    if name in SUMS:
        return set()
    named = set()
    for source, of in by_source.items():
        if len(of) >= max(2, ranks - 1):  # all but itself, at least, received it wrongly
            named.add(source)
        elif of == {source} or (name != "all_to_all" and len(of) == 1 and ranks >= MANY):
            named |= of
    return named


def settled(suspicions: Sequence[Suspicion], convicted: set[int]) -> Found:
    """Judge suspicions together: those that a convicted device explains are its own, others leave who is in all of them."""
    left = [one for one in suspicions if not one.slots & convicted]
    if not left:
        return [], []
    common = frozenset.intersection(*(one.slots for one in left))
    if len(common) == 1:
        return [replace(one.fault, slot=next(iter(common))) for one in left], []
    first, who = left[0], tuple(sorted(common or left[0].slots))
    how = f" ({first.fault.difference})" if first.fault.difference is not None else ""
    key = first.fault.workload.key
    text = (
        f"{key}: wrong numbers came to {_listed(first.receivers)}{how}; which of the devices {_listed(who)} is to blame, "
        "nothing tells"
    )
    return [], [Remark(WRONG, who, key, text)]


def _listed(slots: Sequence[int]) -> str:
    return ", ".join(map(str, slots))
