"""What results should be: the right bits of what is exact, by the host; float64's answer for what is rounded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from bitwitness.stress.tally import Seen, Slots, fingerprint_of
from bitwitness.stress.workload import Workload
from bitwitness.tap.ownwork import REFERENCE, own_work
from bitwitness.trial.call import Results
from bitwitness.trial.judging import judge_all
from bitwitness.trial.oracle import Oracle
from bitwitness.trial.result import FAIL

_ORACLES = 8  # kept: each holds a workload's inputs and float64 results


class Truths:
    """Answers for workloads what their results should be."""

    def __init__(self, workloads: Sequence[Workload], ranks: int) -> None:
        self._workloads, self._ranks = workloads, ranks
        self._due: dict[tuple[int, int, int], str] = {}
        self._oracles: dict[tuple[int, int], Oracle] = {}

    def due(self, seen: Seen, slot: int) -> tuple[str, Callable[[], Slots]]:
        """Return the fingerprint that is due to a device of a workload that is exact, and what makes its values."""
        key = seen.workload, seen.variant, slot if self._workloads[seen.workload].collective else 0
        if key not in self._due:
            self._due[key] = fingerprint_of(self._values(seen, slot))
        return self._due[key], partial(self._values, seen, slot)

    def _values(self, seen: Seen, slot: int) -> Slots:
        workload = self._workloads[seen.workload]
        with own_work(REFERENCE):
            if workload.expected is None:
                values = workload.call(seen.variant, slot).run().slots()
            else:
                values = {f"out{i}": t for i, t in enumerate(workload.expected(seen.variant, slot, self._ranks))}
        return values

    def within(self, seen: Seen, values: Slots) -> bool | None:
        """Return whether float64 finds a result within what its dtype allows; None where float64 cannot say."""
        outputs = tuple(values[name] for name in values if name.startswith("out"))
        leaves = max((int(name[4:]) + 1 for name in values if name.startswith("grad")), default=0)
        results = Results(outputs, tuple(values.get(f"grad{i}") for i in range(leaves)))
        try:
            verdicts, reason = judge_all(results, self._oracle(seen, results))
        except Exception:  # no float64 kernel on the CPU; the votes stand without it
            return None
        return None if reason else all(one.verdict != FAIL for one in verdicts)

    def _oracle(self, seen: Seen, like: Results) -> Oracle:
        key = seen.workload, seen.variant
        if key not in self._oracles:
            if len(self._oracles) >= _ORACLES:
                del self._oracles[next(iter(self._oracles))]
            self._oracles[key] = Oracle(self._workloads[seen.workload].call(seen.variant, 0), like)
        return self._oracles[key]
