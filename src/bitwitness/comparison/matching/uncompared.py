"""What of two recordings cannot be compared though it was asked for: values of which nothing is known, missing results."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from bitwitness.comparison.matching.align import Alignment
from bitwitness.comparison.matching.frame import UNKNOWN, StepFrame
from bitwitness.comparison.matching.lined import Place

_NAMED = 3  # sites that a sentence names


def uncompared(a: StepFrame, b: StepFrame, alignment: Alignment, place: Place) -> Iterator[str]:
    """Yield what of one step could not be compared, a sentence each; not where whole recordings are of structure alone."""
    known_a, known_b = _known(a), _known(b)
    if not known_a.any() or not known_b.any():
        return
    unknown = [
        pair.a.site
        for pair in alignment.pairs
        for i, j in (*pair.inputs, *pair.outputs)
        if not (known_a[i] and known_b[j])
    ]
    if unknown:
        yield f"{_listed(unknown)} (step {place.step}): of {len(unknown)} values nothing was recorded but the shape"
    lost = [
        pair.a.site for pair in alignment.pairs if bool(pair.a.outputs) != bool(pair.b.outputs) and pair.a.kind == "op"
    ]
    if lost:
        yield f"{_listed(lost)} (step {place.step}): one run recorded no result of it"


def _known(frame: StepFrame) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return of which rows anything is known that two values could differ in; of nothing, where a tensor is empty."""
    counted = np.stack([frame.counts[name] != UNKNOWN for name in ("nan", "pos_inf", "neg_inf")]).any(0)
    numbers = np.isfinite(np.stack([frame.numbers[name] for name in ("min", "max", "l2", "mean")])).any(0)
    known = counted | numbers | frame.hashed | (frame.texts["tensor"].codes >= 0) | (frame.count == 0)
    return np.asarray(known, dtype=np.bool_)


def _listed(sites: list[str]) -> str:
    names = list(dict.fromkeys(sites))
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
