"""Values that were changed in memory since an operator made them, by what no recorded operator shows."""

from __future__ import annotations

import numpy as np

from bitwitness.comparison.matching.align import Pair
from bitwitness.comparison.matching.frame import StepFrame
from bitwitness.comparison.measuring.changes import moved
from bitwitness.comparison.measuring.relation import factor, in_words_of_link, numbers_of

_NAME = 64  # characters of an operator's arguments that hold its name
_SAME = 1e-6
"""Relative difference of two sketches of one tensor, in one shape and layout, from which on it holds other values."""


def changed_since(a: StepFrame, b: StepFrame, pair: Pair, row_a: int, row_b: int) -> str | None:
    """Say that what a node reads is, in one run or both, not what was made there any more; None where it is, or a view of it.

    A view of all of it has the same norm, whatever its order. Empty where both runs wrote there, by no one number: a part of a
    state, say, of which nothing can be told.
    """
    links = [_since(frame, row) for frame, row in ((a, row_a), (b, row_b))]
    if all(link == 1.0 for link in links):
        return None
    if links == [None, None]:
        return ""
    how = " and ".join(f"run {side} {in_words_of_link(link)}" for side, link in zip("AB", links, strict=True))
    if pair.a.phase == "backward" and pair.a.op.startswith("add"):
        what = "the gradient that this adds to was changed since a backward left it there"
        return f"{what} (clipped, scaled, averaged over the ranks between two micro-batches): {how}"
    return f"{a.text('slot', row_a)} was changed in place since it was made: {how}"


def _since(frame: StepFrame, row: int) -> float | None:
    """Return by what a value was multiplied since its maker returned it: 1 where it is that, or a view of it; None: edited."""
    made = np.flatnonzero((frame.node == frame.producer[row]) & (frame.count >= frame.count[row])).tolist()
    results = [one for one in made if frame.text("slot", one).startswith("out")]
    whole = [one for one in results if frame.count[one] == frame.count[row]]
    if not whole or any(_is_still(frame, one, row) for one in whole):
        return 1.0
    link = factor(frame, whole[0], frame, row)
    is_part = len(whole) < len(results)  # perhaps: an LSTM's first state beside its last one
    return 1.0 if link is None and is_part else link


def _is_still(frame: StepFrame, made: int, row: int) -> bool:
    if moved(frame, made, row):
        return False
    alike = frame.shapes[made] == frame.shapes[row] and frame.text("layout", made) == frame.text("layout", row)
    before, now = numbers_of(frame, made), numbers_of(frame, row)
    return not alike or not abs(before.sketch - now.sketch) > _SAME * now.l2


def is_written_over(frame: StepFrame, pair: Pair, row: int) -> bool:
    """Tell whether a node writes in place into integers that nobody is known to have made: memory that is not set before.

    As ``torch.empty`` leaves it for the inverse of a permutation, say.
    """
    slot, dtype = frame.text("slot", row), frame.text("dtype", row)
    return pair.a.kind == "op" and pair.a.op.endswith("_") and slot == "in0" and dtype.startswith(("int", "uint"))


def is_into_bucket(frame: StepFrame, pair: Pair) -> bool:
    """Tell whether a node writes a gradient into a bucket of DistributedDataParallel's, in the order in which they are ready.

    It is the one that calls operators with an ``out`` in a backward, outside of all modules.
    """
    place = pair.a.kind, pair.a.phase, pair.a.module
    return place == ("op", "backward", ".") and ".out" in frame.text("args", pair.a.rows[0])[:_NAME]


def is_written(frame: StepFrame, row: int) -> bool:
    """Tell whether a buffer's value is what an operator wrote in this step: of a module that was not called itself."""
    slots = frame.texts["slot"]
    results = np.isin(
        slots.codes, [code for code, word in enumerate(slots.words) if word.startswith(("out", "running"))]
    )
    by_others = frame.texts["kind"].equals("op") & (frame.node != frame.node[row]) & results
    return bool((by_others & (frame.value == frame.value[row])).any())
