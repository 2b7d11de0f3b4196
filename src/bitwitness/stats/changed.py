"""Which words of a tensor have changed, told from the sums that its bit hash is made of.

A changed word of 64 bits moves the sum of its row by what it was changed by, and the columns that it is shifted into by the
same halves. Where one word alone accounts for all that moved, its place is known, and what it was before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bitwitness.stats.fold import ROW_BYTES, ROW_WORDS, WORD, Fold
from bitwitness.stats.local import as_bytes

_MASK = (1 << 64) - 1
_LOW = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Word:
    """One word of 64 bits: the byte at which it begins, in logical order; its bits before and after."""

    at: int
    before: int
    after: int

    @property
    def flipped(self) -> int:
        """How many bits differ."""
        return (self.before ^ self.after).bit_count()


@dataclass(frozen=True, slots=True)
class Change:
    """What is known of how a tensor has changed.

    ``rows`` of ``of`` rows of 8168 bytes, and ``columns`` of 1021, hold a change. ``word``: the one that explains all of it.
    """

    rows: int
    of: int
    columns: int
    word: Word | None = None


Kept = tuple[Tensor, Fold | None]
"""What `HashBatch.kept` returns."""


def change_of(before: Kept, after: Kept, bits: Tensor) -> Change:
    """Return how a tensor has changed between two readings; waits for its device.

    ``bits``: its `flat_bits` as they are now, which ``after`` was made of.
    """
    (flat, old), (now, new) = before, after
    if old is None or new is None:
        return _of_bytes(_bytes(flat), _bytes(now), 0, 1)
    rows = _rows(new) - _rows(old)
    columns = new.columns.cpu().numpy() - old.columns.cpu().numpy()
    moved, shifted = np.flatnonzero(rows), np.flatnonzero(columns)
    tail = _of_bytes(_bytes(old.tail), _bytes(new.tail), old.count * ROW_BYTES, 1)
    if not moved.size and not shifted.size:
        return Change(tail.rows, old.count + 1, tail.columns, tail.word)
    change = Change(moved.size + tail.rows, old.count + 1, max(shifted.size, tail.columns))
    if moved.size != 1 or tail.rows:
        return change
    row = bits.view(torch.int8)[int(moved[0]) * ROW_BYTES : (int(moved[0]) + 1) * ROW_BYTES]
    word = _one(row, int(moved[0]), int(rows[moved[0]]), columns, shifted)
    return Change(change.rows, change.of, change.columns, word)


def _rows(fold: Fold) -> NDArray[np.int64]:
    return torch.cat(fold.rows).cpu().numpy()


def _bytes(flat: Tensor) -> NDArray[np.uint8]:
    return as_bytes(flat.contiguous()).cpu().numpy()


def _of_bytes(before: NDArray[np.uint8], after: NDArray[np.uint8], start: int, of: int) -> Change:
    """Compare bytes that are there, before and after."""
    fill = -len(before) % WORD
    old, new = (np.pad(some, (0, fill)).view(np.uint64) for some in (before, after))
    changed = np.flatnonzero(old != new)
    word = None
    if changed.size == 1:
        place = int(changed[0])
        word = Word(start + place * WORD, int(old[place]), int(new[place]))
    return Change(int(changed.size > 0), of, int(changed.size), word)


def _one(row: Tensor, number: int, moved: int, columns: NDArray[np.int64], shifted: NDArray[np.intp]) -> Word | None:
    """Return the one word of a row whose change explains what has moved; None if none or several could."""
    words = _bytes(row.clone()).view(np.uint64)
    places = {int(c) for c in shifted} | {int(c + 1) % ROW_WORDS for c in shifted} | ({0} if not number else set())
    found = []
    for place in places:
        after = int(words[place])
        before = (after - moved) & _MASK
        expected = _shifts(place, number, before, after)
        if expected == {int(c): int(columns[c]) & _MASK for c in shifted}:
            found.append(Word(number * ROW_BYTES + place * WORD, before, after))
    return found[0] if len(found) == 1 else None


def _shifts(place: int, row: int, before: int, after: int) -> dict[int, int]:
    """Return by what the sums of columns move with a word: its upper half is in its own, its lower in the one before."""
    upper = ((after >> 32) - (before >> 32)) & _MASK
    lower = ((after & _LOW) - (before & _LOW) << 32) & _MASK
    moved = {place: upper}
    if place or row:  # the first half word of all is in no column
        moved[(place - 1) % ROW_WORDS] = lower
    return {column: by for column, by in moved.items() if by}
