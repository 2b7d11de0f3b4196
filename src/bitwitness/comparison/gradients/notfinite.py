"""Gradients that are not finite in one run alone: as the backward leaves them, or only when the optimizer reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bitwitness.comparison.gradients.chains import Chain, row_at
from bitwitness.comparison.matching.frame import StepFrame
from bitwitness.comparison.measuring.relation import and_so, not_finite, numbers_of

_WHEN = ("", "before anything is clipped", "when the optimizer reads it")


class NotFinite(NamedTuple):
    """What is known of them: whether the backward left them so, and if not, what is said."""

    by_backward: bool
    text: str = ""


def not_finite_in_one(a: StepFrame, b: StepFrame, chains: Sequence[Chain]) -> NotFinite | None:
    """Return that gradients of one run are not finite where the other's are, if some are."""
    by_stage = ([(c, text) for c in chains if (text := _told(a, b, c, stage))] for stage in range(len(_WHEN)))
    when, found = next(((when, found) for when, found in zip(_WHEN, by_stage, strict=True) if found), ("", []))
    if not found or not when:
        return NotFinite(by_backward=True) if found else None
    first, how = found[0]
    text = (
        f"the gradient of {first.name} is not what the backward leaves, {when}{and_so(len(found) - 1)}: {how}; "
        f"it was written in between{_clipped_away(a, b, chains, {chain.name for chain, _ in found})}"
    )
    return NotFinite(by_backward=False, text=text)


def _clipped_away(a: StepFrame, b: StepFrame, chains: Sequence[Chain], names: set[str]) -> str:
    """Return what is added where all other gradients of a run are zero when the optimizer reads them."""
    rest = [chain for chain in chains if chain.name not in names]
    for frame, rows in ((a, [chain.a for chain in rest]), (b, [chain.b for chain in rest])):
        read = [row for one in rows if (row := row_at(one, 2)) is not None]
        if read and not any(numbers_of(frame, row).l2 for row in read):
            return ", and a clipping by a norm that is not finite makes zeros of all others"
    return ""


def _told(a: StepFrame, b: StepFrame, chain: Chain, stage: int) -> str:
    i, j = row_at(chain.a, stage), row_at(chain.b, stage)
    return "" if i is None or j is None else not_finite(a, b, i, j)
