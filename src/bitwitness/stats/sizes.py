"""How large many tensors in memory are, each value fetched once, where the compiled reader takes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from bitwitness.stats.local import is_torchs_own
from bitwitness.stats.reader import Reader, built

_LARGE = 1 << 16
"""Elements from which a tensor is read in a call of its own, where something else reads it while it is near."""


class Size(NamedTuple):
    """L2 norm, largest magnitude and largest value of a tensor whose values, and the sum of whose squares, are finite."""

    l2: float
    absmax: float
    high: float


def sizes_of(values: Sequence[Tensor], after: Callable[[int], None] | None = None) -> dict[int, Size]:
    """Return the sizes of those tensors that the compiled reader takes, by position; of empty and of not finite ones none.

    ``after`` is called with the position of each large one, just after it was read.
    """
    reader = built()
    if reader is None:
        return {}
    takes = reader.takes
    members = [i for i, value in enumerate(values) if is_torchs_own(value) and value.numel() and takes(value)]
    if after is None:
        return _read(reader, values, members)
    found = _read(reader, values, [i for i in members if values[i].numel() < _LARGE])
    for index in members:
        if values[index].numel() >= _LARGE:
            found |= _read(reader, values, [index])
            if index in found:
                after(index)
    return found


def _read(reader: Reader, values: Sequence[Tensor], members: list[int]) -> dict[int, Size]:
    figures = reader.read_all([values[i] for i in members]) if members else []
    return {
        index: Size(math.sqrt(one.squares), max(one.high, -one.low), one.high)
        for index, one in zip(members, figures, strict=True)
        if math.isfinite(one.squares)
    }
