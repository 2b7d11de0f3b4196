"""What may be concluded where ranks exchange something in the forward: a wrong number on one device reaches others' results."""

from __future__ import annotations

from collections.abc import Sequence

from bitwitness.finding import Cause
from bitwitness.judge.agreement import Agreement, Match
from bitwitness.judge.decide import Judgement

PASSED_ON = "ranks exchange something in the forward, so that one device's error shows on others, too"


def judge_exchanging(judgement: Judgement, rows: Sequence[Agreement]) -> Judgement:
    """Return a judgement that blames no rank for what it may have received.

    That the training's own execution was wrong is known where all ranks' replays agree with one another, as they did with the
    training's before; where it went wrong only an operator's own invariant tells. What comes back is left to float64.
    """
    if not judgement.wrong and not judgement.disputed:
        return judgement
    # Of the training's own against a replay: what one device got wrong, all may have.
    differing = [row.match(0, 1) for row in rows if row.match(0, 1) is not Match.EQUAL]
    once = all(row.match(1, 2) is Match.EQUAL and not row.never_repeated for row in rows)
    if not once or Match.FAR not in differing:
        return Judgement(Cause.INCONCLUSIVE, reason=f"executions differ, and {PASSED_ON}", wrong=judgement.wrong)
    proven = tuple(rank for rank, row in enumerate(rows) if row.proven_by_checksum)
    spoiled = any(row.outputs_changed for row in rows)
    return Judgement(
        Cause.TRANSIENT_HARDWARE,
        proven if len(proven) == 1 else (),
        heal=not spoiled,
        skip=spoiled,
        reason=PASSED_ON,
        wrong=judgement.wrong,
    )
