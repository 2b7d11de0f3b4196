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

from bitwitness.judge.oracle import Discrepancy, compare_with_float64
from bitwitness.ranks import Ranks
from bitwitness.replay.capsule import Passes
from bitwitness.replay.run import Replayer
from bitwitness.tap.capture import StepRecord
from bitwitness.tap.trace import OperatorTrace


@dataclass(frozen=True, slots=True)
class Located:
    """The first operator at which two devices part. ``culprit`` is None where float64 does not decide."""

    site: str
    line: str
    culprit: int | None
    evidence: dict[str, Any]


def locate(
    ranks: Ranks, replayer: Replayer, record: StepRecord, guests: dict[int, Passes], owner: int, witness: int
) -> Located | None:
    """Find the first operator at which the devices of ``owner`` and ``witness`` part on ``owner``'s step; collective.

    Parameters
    ----------
    guests
        Capsules that ran on this rank; the witness has the owner's among them.
    owner, witness
        Two ranks whose executions of the owner's capsule differ.

    Returns
    -------
    None if both gave the same bits this time (an intermittent fault that rested).

    """
    concerned = ranks.rank in (owner, witness)
    passes = guests.get(owner) if ranks.rank == witness else record.passes()
    able = passes is not None if concerned else replayer.lockstep
    if replayer.lockstep:
        able = not bool(ranks.max(torch.tensor([float(passes is None)])))  # all run together, or none
    if not able:
        return _shared(ranks, None, witness)
    first = None
    mine, again = (_hashes(replayer, record, passes) for _ in range(2))
    other = witness if ranks.rank == owner else owner
    if concerned:
        theirs, theirs_again = ranks.swap([mine, again], other)
        # An operator whose result varies on the witness as well (raw memory in a padding, say) tells nothing.
        steady = _same(mine, again) if ranks.rank == witness else _same(theirs, theirs_again)
        first = _first_difference(mine, theirs, steady)
    if replayer.lockstep:
        found_one = bool(ranks.max(torch.tensor([float(first is not None)])))
        if found_one and not concerned:
            replayer.run(record, passes, around=OperatorTrace().tap)
    if first is None:
        return _shared(ranks, None, witness)
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


def _hashes(replayer: Replayer, record: StepRecord, passes: Passes | None) -> torch.Tensor:
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
    if here.comparable and there.comparable and here.error != there.error:
        culprit = witness if _worse(here.error, there.error) else owner
    evidence = {
        f"rank {owner}": there.as_dict(),
        f"rank {witness}": here.as_dict(),
        "operator_inputs": [list(t.shape) for t in call.args if isinstance(t, torch.Tensor)],
    }
    return Located(str(call.site()), close.line, culprit, evidence)


def _worse(a: float, b: float) -> bool:
    return not a <= b  # NaN is the worst


def _swap_json(ranks: Ranks, other: int, value: dict[str, Any]) -> dict[str, Any]:
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    result: dict[str, Any] = json.loads(bytes(ranks.swap([text], other)[0].numpy()).decode())
    return result


def _shared(ranks: Ranks, located: Located | None, source: int) -> Located | None:
    """Tell every rank what the witness found."""
    text = "" if located is None else json.dumps([located.site, located.line, located.culprit, located.evidence])
    heard = ranks.tell(text, source)
    return Located(*json.loads(heard)) if heard else None
