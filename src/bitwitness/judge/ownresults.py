"""The proof where no step can be run again: results of the training's own, of one device, that float64 contradicts.

One such result may be a transient, or an input that changed under the operator's hands; what comes back in other steps is
neither. Nothing of a replay is needed for that: the checksum recomputed the row in float64 while its inputs were there.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence

from bitwitness.finding import Cause, Finding, Severity, to_jsonable
from bitwitness.judge.decide import CANNOT, Judgement
from bitwitness.judge.localize import Located
from bitwitness.ranks import Ranks

OFTEN = 3
"""Steps in which a device's own results have to be contradicted: as many as make transients persistent (`judge.judge`)."""
# Share of the element's size that it is off by, beyond the bound of rounding: no reduced precision of products explains it,
# the coarsest being bfloat16's, 2^-8 a factor.
_GROSS = 0.1


class OwnResults:
    """Counts, rank by rank, the steps that could not be run again and hold a result that float64 contradicts."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._steps: Counter[int] = Counter()

    def judge(self, step: int, judgement: Judgement, findings: Sequence[Finding]) -> tuple[Judgement, Located | None]:
        """Convict a rank whose own results were contradicted in `OFTEN` steps; collective.

        ``findings`` are what is suspicious on this rank; a judgement of a step that was run again stays as it is.
        """
        if judgement.reason != CANNOT:
            return judgement, None
        mine = max(filter(_contradicted, findings), key=lambda finding: float(finding.evidence["ratio"]), default=None)
        text = "" if mine is None else json.dumps([mine.site.short, to_jsonable(mine.evidence)])
        told = {rank: json.loads(heard) for rank, heard in enumerate(self._ranks.gather_text(text)) if heard}
        self._steps.update(told.keys())  # on every rank alike, so that all reach the verdict in the same step
        guilty = [rank for rank in told if self._steps[rank] >= OFTEN]
        if not guilty:
            return judgement, None
        site, evidence = told[guilty[0]]
        reason = (
            f"in {self._steps[guilty[0]]} steps, which could not be run again, float64 contradicted a result of its own; "
            f"here element {evidence['column']} of a row was {evidence['value']:.6g}, and float64 says "
            f"{evidence['expected']:.6g}"
        )
        wrong = {rank: [f"the training's own step {step}"] for rank in guilty}
        return Judgement(
            Cause.PERSISTENT_HARDWARE, tuple(guilty), intermittent=True, reason=reason, wrong=wrong
        ), Located(site, "", guilty[0], {"checksum": evidence})


def _contradicted(finding: Finding) -> bool:
    """Return whether a finding is a checksum's whose worst element was recomputed in float64, and is grossly off."""
    evidence = finding.evidence
    if finding.sensor != "checksum" or finding.severity is not Severity.ERROR or "expected" not in evidence:
        return False
    value, expected = float(evidence["value"]), float(evidence["expected"])
    return not abs(value - expected) <= _GROSS * max(abs(value), abs(expected)) and math.isfinite(expected)
