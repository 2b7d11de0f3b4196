"""What was seen so far: of each workload and input, how often each device gave which bits, and when first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from torch import Tensor

from bitwitness.stats.digest import bit_hashes, in_hex, joined

Slots = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class First:
    """When a device first gave a result: in which of its runs of a workload and input, and at what time (UTC)."""

    run: int
    time: str


@dataclass(slots=True)
class Seen:
    """What was seen of one workload and input.

    Attributes
    ----------
    counts
        By slot: how often each fingerprint.
    first
        By slot and fingerprint.
    values
        The values behind fingerprints, where there was more than one; on the CPU.
    within
        By fingerprint: whether float64 finds it within what the dtype allows; None where float64 cannot say.
    nondeterministic
        What torch says of an operator that need not repeat its bits; empty where it says nothing.

    """

    workload: int
    variant: int
    counts: dict[int, Counter[str]] = field(default_factory=dict)
    first: dict[tuple[int, str], First] = field(default_factory=dict)
    values: dict[str, Slots] = field(default_factory=dict)
    within: dict[str, bool | None] = field(default_factory=dict)
    nondeterministic: str = ""

    def add(self, slot: int, runs: Sequence[str]) -> None:
        """Count a batch of a device's."""
        count = self.counts.setdefault(slot, Counter())
        now = datetime.now(UTC).isoformat(timespec="seconds")
        for fingerprint in runs:
            count[fingerprint] += 1
            self.first.setdefault((slot, fingerprint), First(count.total(), now))

    def usual(self, slot: int) -> str:
        """Return what a device gave most often; what it gave first among those that are equally often."""
        return self.counts[slot].most_common(1)[0][0]

    @property
    def fingerprints(self) -> set[str]:
        """All of them, of all devices."""
        return {fingerprint for count in self.counts.values() for fingerprint in count}


def fingerprint_of(values: Slots) -> str:
    """Return the fingerprint of results: the same by a device process and by the host."""
    return in_hex(joined(list(bit_hashes(list(values.values())))))
