"""Naming the operator: the first one that got the same inputs on two devices and gave different results.

Only the two ranks concerned work; the others wait at the next exchange. Which of the two results is right is then asked of
float64: the operator is recomputed from its inputs in double precision, and the device whose result is further away is the
one that computed wrongly.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch

from bitwitness.capture.step import Pass, StepRecord
from bitwitness.oracle.live import Discrepancy, compare_with_float64
from bitwitness.ranks import Ranks
from bitwitness.replay.run import Replayer
from bitwitness.tap.trace import OperatorTrace


@dataclass(frozen=True, slots=True)
class Located:
    """The first operator at which two devices part.

    ``culprit``: the rank whose result lies outside what dtype and operator allow by float64; None where neither does,
    or float64
    cannot be asked. ``within_allowance``: both lie within it, so that two algorithms differ, and nobody errs.
    """

    site: str
    line: str
    culprit: int | None
    evidence: dict[str, Any]
    within_allowance: bool = False

    def as_text(self) -> str:
        """Return it as JSON, to be sent to other ranks."""
        return json.dumps([self.site, self.line, self.culprit, self.evidence, self.within_allowance])

    @classmethod
    def from_text(cls, text: str) -> Located | None:
        """Return what `as_text` gave; None for no text."""
        return cls(*json.loads(text)) if text else None

    @property
    def parted(self) -> bool:
        """Whether any operator was found; else both gave the same bits this time."""
        return bool(self.site)


SAME = Located("", "", None, {})
"""Both devices gave the same bits, operator by operator."""


def locate(
    ranks: Ranks, replayer: Replayer, record: StepRecord, received: dict[int, list[Pass]], owner: int, witness: int
) -> Located | None:
    """Find the first operator at which the devices of ``owner`` and ``witness`` part on ``owner``'s step; collective.

    Parameters
    ----------
    received
        The payloads of other ranks that ran on this one, by rank; the witness has the owner's among them.
    owner, witness
        Two ranks whose executions of the owner's payload differ.

    Returns
    -------
    `SAME` if both gave the same bits this time (an intermittent fault that rested); None if it could not be found out.

    """
    concerned = ranks.rank in (owner, witness)
    passes = received.get(owner) if ranks.rank == witness else record.passes()
    able = passes is not None if concerned else replayer.lockstep
    if replayer.lockstep:
        able = not bool(ranks.max(torch.tensor([float(passes is None)])))  # all run together, or none
    if not able:
        return _shared(ranks, None, witness)
    first = None
    # Twice, on both: only what repeats on the witness can be held against the owner, or the other way around.
    mine, again = (_hashes(replayer, record, passes) for _ in range(2))
    other = witness if ranks.rank == owner else owner
    if concerned:
        theirs, theirs_again = ranks.swap([mine, again], other)
        # An operator whose result varies on the witness as well (raw memory in a padding, say) tells nothing.
        steady = _same(mine, again) if ranks.rank == witness else _same(theirs, theirs_again)
        first = _first_difference(mine, theirs, steady)
    if replayer.lockstep:
        found_one = bool(ranks.max(torch.tensor([float(first is not None)])))
        if found_one and not concerned:  # as often as the two who look closer: replays exchange something
            replayer.run(record, passes, around=OperatorTrace().tap)
    if first is None:
        return _shared(ranks, SAME if concerned else None, witness)
    # A third run, in which that one operator is kept whole: to keep all of them would take the memory of all activations.
    close = OperatorTrace(keep=first)
    replayer.run(record, passes, around=close.tap)
    if close.kept is None:
        return _shared(ranks, None, witness)
    found = compare_with_float64(close.kept)
    theirs_found = _swap_json(ranks, other, found.as_dict())
    if ranks.rank != witness:
        return _shared(ranks, None, witness)
    located = _weigh(close, found, Discrepancy(**theirs_found), owner, witness)
    return _shared(ranks, located, witness)


def _hashes(replayer: Replayer, record: StepRecord, passes: list[Pass] | None) -> torch.Tensor:
    trace = OperatorTrace()
    replayer.run(record, passes, around=trace.tap)
    return torch.stack([digest.cpu() for digest in trace.hashes])


def _same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    common = min(a.numel(), b.numel())
    return a[:common] == b[:common]


def _first_difference(mine: torch.Tensor, theirs: torch.Tensor, steady: torch.Tensor) -> int | None:
    common = min(mine.numel(), theirs.numel(), steady.numel())
    differs = ((mine[:common] != theirs[:common]) & steady[:common]).nonzero()
    return int(differs[0]) if differs.numel() else None


def _weigh(close: OperatorTrace, here: Discrepancy, there: Discrepancy, owner: int, witness: int) -> Located:
    """Compare both results with float64, on the witness."""
    call = close.kept
    assert call is not None  # noqa: S101 - the caller kept it
    culprit: int | None = None
    if here.comparable and there.comparable and (here.outside or there.outside):
        culprit = witness if _worse(here, there) else owner
    evidence = {
        f"rank {owner}": there.as_dict(),
        f"rank {witness}": here.as_dict(),
        "operator_inputs": [list(t.shape) for t in call.args if isinstance(t, torch.Tensor)],
    }
    within_allowance = here.comparable and there.comparable and culprit is None
    return Located(str(call.site()), close.line, culprit, evidence, within_allowance)


def _worse(a: Discrepancy, b: Discrepancy) -> bool:
    if a.outside is not b.outside:
        return a.outside
    return not a.error <= b.error  # NaN is the worst


def _swap_json(ranks: Ranks, other: int, value: dict[str, Any]) -> dict[str, Any]:
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    result: dict[str, Any] = json.loads(bytes(ranks.swap([text], other)[0].numpy()).decode())
    return result


def _shared(ranks: Ranks, located: Located | None, source: int) -> Located | None:
    """Return, on every rank, what the witness found."""
    heard = ranks.broadcast_text("" if located is None else located.as_text(), source)
    return Located.from_text(heard)
