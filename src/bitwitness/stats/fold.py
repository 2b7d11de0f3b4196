"""The two sums that the bit hash of a large tensor is made of, of rows of words and of columns of words shifted by half a word.

`stats/digest.py` says why there are two. Kept, they tell which words of a tensor have changed (`stats/changed.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bitwitness.stats.reader import built

WORD = 8  # bytes
HALF_WORD = 4
ROW_WORDS = 1021  # the largest prime below 1024; why a prime, see `stats/digest.py`
ROW_BYTES = WORD * ROW_WORDS
_CPU_ROWS = 64  # half a megabyte
_DEVICE_ROWS = 8192  # 64 MiB: an accelerator is busy for much longer than the launches take


@dataclass(frozen=True, slots=True)
class Fold:
    """The sums of a tensor's whole rows.

    ``rows`` holds int64 sums of the ``count`` rows in pieces, ``columns`` int64 [ROW_WORDS], ``tail`` the
    bytes that follow the whole rows.
    """

    count: int
    rows: list[Tensor]
    columns: Tensor
    tail: Tensor


def is_large(flat: Tensor) -> bool:
    """Tell whether a tensor has a whole row and the half word after it, which the last shifted word reads."""
    return flat.nbytes >= ROW_BYTES + HALF_WORD


def fold(flat: Tensor) -> Fold:
    """Sum the whole rows of a large tensor, given by its `flat_bits`.

    On a CPU compiled code reads it once (`stats/native/fold.h`). Without, and on an accelerator, block by block, so that the
    second reading finds the data in the CPU's cache, and an accelerator's copy stays small.
    """
    data = flat.view(torch.int8)
    rows = (flat.nbytes - HALF_WORD) // ROW_BYTES
    if flat.is_cpu and flat.data_ptr() and (reader := built()) is not None:
        sums, shifted = torch.empty(rows, dtype=torch.int64), torch.zeros(ROW_WORDS, dtype=torch.int64)
        reader.fold(flat, sums, shifted)
        return Fold(rows, [sums], shifted, data[rows * ROW_BYTES :])
    block = _CPU_ROWS if flat.device.type == "cpu" else _DEVICE_ROWS
    row_sums: list[Tensor] = []
    column_sums = torch.zeros(ROW_WORDS, dtype=torch.int64, device=flat.device)
    for first in range(0, rows, _DEVICE_ROWS):
        count = min(_DEVICE_ROWS, rows - first)
        words = _words(data, first * ROW_BYTES, count)
        shifted = _words(data, first * ROW_BYTES + HALF_WORD, count)
        for one, other in zip(torch.split(words, block), torch.split(shifted, block), strict=True):
            row_sums.append(one.sum(1))
            column_sums += other.sum(0)
    return Fold(rows, row_sums, column_sums, data[rows * ROW_BYTES :])


def _words(data: Tensor, start: int, rows: int) -> Tensor:
    """Read int64 [rows, ROW_WORDS] from bytes, wherever they start."""
    piece = data[start : start + rows * ROW_BYTES]
    if piece.device.type == "cpu":
        # A CPU reads words at any address, but Tensor.view() insists on aligned ones; a copy would take as
        # long again as all the rest.
        return torch.from_numpy(piece.numpy().view(np.int64)).view(rows, ROW_WORDS)
    if piece.storage_offset() % WORD:
        piece = piece.clone()
    return piece.view(torch.int64).view(rows, ROW_WORDS)
