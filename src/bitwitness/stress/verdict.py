"""What the test says: which device computed what wrongly, how that is known, and what could not be decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bitwitness.stress.difference import Difference, difference
from bitwitness.stress.tally import First, Seen, Slots
from bitwitness.stress.workload import Workload

EXACT, MAJORITY, OWN_RUNS, FLOAT64, GOLDEN = "exact", "majority", "own runs", "float64", "golden"
"""How a fault is known: the right bits are known; other devices of its model agree on other bits; it contradicts itself where
no other device does; its result lies outside of what the dtype allows; a device known to be good had other bits."""
HOW = {
    EXACT: "the right bits are known",
    MAJORITY: "the other devices agree",
    OWN_RUNS: "its own runs, and the other devices, contradict it",
    FLOAT64: "float64 finds it outside of what the dtype allows",
    GOLDEN: "the golden device had other bits",
}
"""The same in words."""
WRONG, UNDECIDED, SOFTWARE, SPREAD = "wrong", "undecided", "software", "spread"
"""Kinds of remarks: something is wrong and no device can be named; nothing is proven; all devices do it alike; an operator that
does not repeat its bits, by design."""


MANY = 3
"""Devices of which a majority can be told."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A device computed a workload wrongly.

    ``wrong`` of ``runs`` runs, ``first``: the first of them. ``certain``: whether it is the device; False where its kernels
    may be to blame, because it is alone and never did otherwise.
    """

    slot: int
    workload: Workload
    variant: int
    wrong: int
    runs: int
    first: First
    proof: str
    certain: bool = True
    difference: Difference | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON takes it."""
        return {
            "workload": self.workload.name,
            "dtype": self.workload.dtype,
            "shape": self.workload.shape,
            "input": self.variant,
            "wrong": self.wrong,
            "runs": self.runs,
            "first_run": self.first.run,
            "first_time": self.first.time,
            "proof": self.proof,
            "certain": self.certain,
            "difference": None if self.difference is None else self.difference.as_dict(),
        }


@dataclass(frozen=True, slots=True)
class Remark:
    """What is to be told that convicts nobody; ``slots``: whom it is about."""

    kind: str
    slots: tuple[int, ...]
    workload: str
    text: str

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON takes it."""
        return {"kind": self.kind, "devices": list(self.slots), "workload": self.workload, "text": self.text}


Found = tuple[list[Fault], list[Remark]]


def first_difference(seen: Seen, right: Slots, wrong: Sequence[str]) -> Difference | None:
    """Return how the first of the wrong results whose values are known differs from what is right."""
    return next((difference(right, seen.values[one]) for one in wrong if one in seen.values), None)


def fault_of(
    seen: Seen,
    workload: Workload,
    slot: int,
    proof: str,
    right: set[str],
    due: Difference | None,
    *,
    certain: bool = True,
) -> Fault:
    """Return the fault of a device whose results other than the ``right`` ones are wrong."""
    count = seen.counts[slot]
    wrong = [fingerprint for fingerprint in count if fingerprint not in right]
    first = min((seen.first[slot, fingerprint] for fingerprint in wrong), key=lambda one: one.run)
    return Fault(
        slot, workload, seen.variant, sum(count[one] for one in wrong), count.total(), first, proof, certain, due
    )
