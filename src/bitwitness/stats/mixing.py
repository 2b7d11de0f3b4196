"""How sums become a hash: numbered, scrambled by a bijection, and added up. All words are int64 and wrap around."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 / golden ratio, odd: the numbering step of splitmix64
_SCRAMBLE = 0xD6E8FEB86659FD93 - (1 << 64)  # multiplier of Degski's 64-bit mixer
_LOW_HALF = 0xFFFFFFFF  # int64 shifts to the right with its sign, which is masked away
COLUMNS_FROM = 1 << 32  # where the numbering of columns begins: rows never come so far
Words = Tensor | np.ndarray
"""int64. Of torch or of numpy: both wrap around, and they share the operators that are used here."""


def length_number(length: int) -> int:
    """Return the number of the last row, which stands for the tensor's length in bytes."""
    return wrap(GOLDEN * (-1 - length))


def numbers(first: int, words: Words) -> Words:
    """Return multiples of an odd constant from the ``first`` on, one for each word of a row: all different."""
    count = words.shape[-1]
    found = torch.arange(count, device=words.device) if isinstance(words, Tensor) else np.arange(count)
    found *= GOLDEN
    found += wrap(GOLDEN * first)
    return found


def scramble(words: Words) -> Words:
    """Apply Degski's 64-bit mixer in place: a bijection; each bit of the input sways each of the output."""
    for step in range(3):
        high = words >> 32
        high &= _LOW_HALF
        words ^= high
        if step < 2:
            words *= _SCRAMBLE
    return words


def wrap(number: int) -> int:
    """Return the signed 64-bit integer that is ``number`` modulo 2^64."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
