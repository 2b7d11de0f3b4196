"""Results of the training's own, of one device, that float64 contradicts: the proof where no step can be run again.

One such result may be a transient, or an input that changed under the operator's hands; what comes back in other steps is
neither. Nothing of a replay is needed for that: the checksum recomputed the row in float64 while its inputs were there.

Nor does a replay with the same bits refute it: a mask, a dropout or a comparison may hide the wrong number from all gradients.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from bitwitness.finding import Cause, Finding, Severity, to_jsonable
from bitwitness.judge.decide import CANNOT, Judgement
from bitwitness.judge.localize import Located
from bitwitness.ranks import Ranks

OFTEN = 3
"""Steps in which a device's own results have to be contradicted: as many as make transients persistent (`judge.judge`)."""
# Share of the element's size that it is off by, beyond the bound of rounding: no reduced precision of products explains it,
# the coarsest being bfloat16's, 2^-8 a factor.
_GROSS = 0.1
_OF_OPERATORS = ("checksum", "twice")


class OwnResults:
    """Counts, rank by rank, the steps that could not be run again and hold a result that float64 contradicts."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._steps: Counter[int] = Counter()

    def judge(self, step: int, judgement: Judgement, findings: Sequence[Finding]) -> tuple[Judgement, Located | None]:
        """Convict a rank whose own results were contradicted in `OFTEN` steps; collective.

        ``findings`` are what is suspicious on this rank. Of a step that was run again, all that is done is that it is not
        dismissed.
        """
        if judgement.reason != CANNOT and judgement.cause is not Cause.DISMISSED:
            return judgement, None
        mine = max(filter(_contradicted, findings), key=lambda finding: float(finding.evidence["ratio"]), default=None)
        text = "" if mine is None else json.dumps([mine.site.short, to_jsonable(mine.evidence)])
        told = {rank: json.loads(heard) for rank, heard in self._heard(text).items()}
        if judgement.cause is Cause.DISMISSED:
            return _left_open(judgement, told), None
        self._steps.update(told.keys())  # on every rank alike, so that all reach the verdict in the same step
        guilty = [rank for rank in told if self._steps[rank] >= OFTEN]
        if not guilty:
            return judgement, None
        site, evidence = told[guilty[0]]
        reason = (
            f"in {self._steps[guilty[0]]} steps, which could not be run again, float64 contradicted a result of its own; "
            f"here {_element(evidence)}"
        )
        wrong = {rank: [f"the training's own step {step}"] for rank in guilty}
        return Judgement(
            Cause.PERSISTENT_HARDWARE, tuple(guilty), intermittent=True, reason=reason, wrong=wrong
        ), Located(site, "", guilty[0], {"checksum": evidence})

    def doubted(self, judgement: Judgement, findings: Sequence[Finding]) -> Judgement:
        """Blame no software for a step in which a checksum failed; collective.

        A device that fails again and again makes the same NaN in every execution, and its huge results overflow later, in an
        operator that is right: all gradients are NaN then, which says nothing of who began.
        """
        if judgement.cause is not Cause.SOFTWARE:
            return judgement
        mine = next((f.site.short for f in findings if f.sensor == "checksum" and f.severity is Severity.ERROR), "")
        told = self._heard(mine)
        if not told:
            return judgement
        rank, site = next(iter(told.items()))
        reason = (
            f"{site} of rank {rank} computed a wrong result in this step, as its checksum says, so it may be the device: "
            f"{judgement.reason}"
        )
        return Judgement(Cause.INCONCLUSIVE, reason=reason)

    def struck(self, judgement: Judgement, findings: Sequence[Finding]) -> Located | None:
        """Return where a fault that is over struck, as the accused rank's own sensors saw it; collective.

        An identity, or a second call with the same inputs, is about one operator alone: the first at which it failed is where.
        None where nobody looked at operators in this step, or nobody is accused.
        """
        mine = next((f for f in findings if f.sensor in _OF_OPERATORS and f.severity is Severity.ERROR), None)
        text = "" if mine is None else json.dumps([mine.site.short, mine.sensor, to_jsonable(mine.evidence)])
        told = self._heard(text)
        rank = next((rank for rank in judgement.ranks if rank in told), None)
        if rank is None:
            return None
        site, sensor, evidence = json.loads(told[rank])
        return Located(site, "", rank, {sensor: evidence})

    def _heard(self, text: str) -> dict[int, str]:
        """Return what ranks say, of those that say anything; collective."""
        return {rank: heard for rank, heard in enumerate(self._ranks.gather_text(text)) if heard}


def _left_open(judgement: Judgement, told: Mapping[int, Any]) -> Judgement:
    """Return what is left of a dismissal where a result was contradicted that no gradient shows."""
    if not told:
        return judgement
    rank, (site, evidence) = next(iter(told.items()))
    reason = (
        f"{site} of rank {rank} was contradicted by float64 as the training computed it ({_element(evidence)}), and no "
        f"gradient shows it: {judgement.reason}"
    )
    return Judgement(Cause.INCONCLUSIVE, reason=reason)


def _element(evidence: Mapping[str, Any]) -> str:
    value, expected = evidence["value"], evidence["expected"]
    return f"element {evidence['column']} of a row was {value:.6g}, and float64 says {expected:.6g}"


def _contradicted(finding: Finding) -> bool:
    """Return whether a finding is a checksum's whose worst element was recomputed in float64, and is grossly off."""
    evidence = finding.evidence
    if finding.sensor != "checksum" or finding.severity is not Severity.ERROR or "expected" not in evidence:
        return False
    value, expected = float(evidence["value"]), float(evidence["expected"])
    return not abs(value - expected) <= _GROSS * max(abs(value), abs(expected)) and math.isfinite(expected)
