"""The `recompute` sensor: under activation checkpointing everything is computed twice, and must come out twice the same.

A difference says that one of the two was wrong, not which; the guard's replay is the third execution that tells. Some values
differ by themselves: BatchNorm's running statistics, dropout without ``preserve_rng_state``, kernels that add in any order,
counters. So each saved value of a region has to have repeated its bits before a difference is a suspicion; one that does not
repeat is left alone, and counted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bitwitness.finding import Finding, Severity
from bitwitness.sense import selftest
from bitwitness.site import Site
from bitwitness.stats import HashBatch
from bitwitness.tap.recomputing import Region

REPEATS = 2
"""Times that a value came out the same, before a difference is a suspicion."""
_STRIKES = 2
"""Differences after which a value is left alone: while it was not known to repeat, or explained by no fault."""


@dataclass(slots=True)
class _Known:
    """What is known of a value."""

    same: int = 0
    strikes: int = 0
    off: bool = False


@dataclass(slots=True)
class _Seen:
    """A tensor's two positions in the batch of hashes; ``again`` is None until it is recomputed."""

    region: Region
    position: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    first: int
    again: int | None = None


class RecomputeSensor:
    """Handler for `tap.recomputing.RecomputeTap`; `drain` compares."""

    def __init__(self) -> None:
        self._batch = HashBatch()
        self._seen: dict[tuple[int, int], _Seen] = {}
        self._values: dict[tuple[str, int], _Known] = {}
        self.compared = 0
        """Regions that were recomputed and compared so far, each forward's by itself."""
        self.tensors: Counter[str] = Counter()
        """Tensors: ``compared``, and ``left_out`` for those that cannot be hashed."""

    def __call__(self, region: Region, position: int, tensor: Tensor, again: bool) -> None:
        """Read a tensor of a region."""
        if self._known(region, position).off or _is_parameter(tensor):
            return
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
            self.tensors["left_out"] += 1
            return
        key = id(region), position
        if not again:
            self._seen[key] = _Seen(region, position, tuple(tensor.shape), tensor.dtype, len(self._batch))
            self._batch.add(tensor)
        elif (seen := self._seen.get(key)) is not None and seen.again is None:
            seen.again = len(self._batch)
            self._batch.add(tensor)

    def _known(self, region: Region, position: int) -> _Known:
        return self._values.setdefault((region.name, position), _Known())

    def drain(self, step: int, rank: int) -> list[Finding]:
        """Return what came out otherwise in this step; waits for the device once."""
        pairs = [seen for seen in self._seen.values() if seen.again is not None]
        hashes = self._batch.on_host().tolist()
        self._batch, self._seen = HashBatch(), {}
        self.tensors["compared"] += len(pairs)
        by_region: dict[int, list[_Seen]] = {}
        for seen in pairs:
            by_region.setdefault(id(seen.region), []).append(seen)
        found = []
        for members in by_region.values():
            self.compared += 1
            wrong = [s for s in members if self._differs(s, hashes)]
            if wrong:
                found.append(_finding(members, wrong, step, rank))
        return found

    def _differs(self, seen: _Seen, hashes: list[int]) -> bool:
        """Tell whether a value came out otherwise that is known to repeat; learn of others."""
        known = self._known(seen.region, seen.position)
        same = seen.again is not None and hashes[seen.first] == hashes[seen.again]
        if same:
            known.same += 1
        elif known.same < REPEATS:
            self._strike(known)
            return False
        return not same

    def _strike(self, known: _Known) -> None:
        known.same, known.strikes = 0, known.strikes + 1
        known.off = known.strikes >= _STRIKES

    def dismissed(self, findings: list[Finding]) -> None:
        """Mind that experiments found no fault behind some findings of this sensor."""
        for finding in findings:
            if finding.sensor == "recompute":
                for position in finding.evidence["positions"]:
                    self._strike(self._values[str(finding.evidence["region"]), position])

    def coverage(self) -> dict[str, Any]:
        """Return what was compared, and how many values of which regions are left alone."""
        off = Counter(name for (name, _), known in self._values.items() if known.off)
        return {
            "regions": len({name for name, _ in self._values}),
            "recomputations_compared": self.compared,
            "tensors": dict(self.tensors),
            "do_not_repeat": dict(sorted(off.items())),
        }


def _finding(members: list[_Seen], wrong: list[_Seen], step: int, rank: int) -> Finding:
    region, first = members[0].region.name, wrong[0]
    evidence = {
        "region": region,
        "positions": [seen.position for seen in wrong],
        "shape": list(first.shape),
        "dtype": str(first.dtype).removeprefix("torch."),
        "tensors_that_differ": len(wrong),
        "tensors_compared": len(members),
    }
    message = (
        f"activation checkpointing in {region}: {len(wrong)} of {len(members)} tensors came out otherwise when they were "
        f"recomputed in the backward, first the one at position {first.position} ({evidence['dtype']} {list(first.shape)}); "
        "one of the two executions was wrong, and a third one tells which"
    )
    site = Site(
        region.partition("#")[0] or ".", "checkpoint", int(region.partition("#")[2]), "forward", f"out{first.position}"
    )
    return Finding("recompute", site.at(rank=rank, step=step), Severity.WARNING, message, evidence, step, rank)


def _is_parameter(tensor: Tensor) -> bool:
    """Tell whether a saved tensor is a parameter, or a view of one: these are not recomputed."""
    base = tensor if tensor._base is None else tensor._base
    return base.is_leaf and base.requires_grad


@selftest.self_test(
    "recompute", "an activation that comes out otherwise when checkpointing recomputes it, on deep steps"
)
def _proof() -> str:
    sensor, first = RecomputeSensor(), torch.linspace(-1.0, 1.0, 64, dtype=torch.float32)

    def told(second: Tensor) -> list[Finding]:
        region = Region("layer#0")
        sensor(region, 0, first, again=False)
        sensor(region, 0, second, again=True)
        return sensor.drain(0, 0)

    clean = [finding for _ in range(REPEATS) for finding in told(first.clone())]
    return selftest.seen(clean, told(first * (1 + 2.0**-20)))
