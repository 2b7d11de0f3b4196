"""The bit hashes of many tensors at once, in a number of launches that does not grow with theirs.

On a CPU one call of compiled code reads them all. On an accelerator a launch takes longer than reading a small tensor, and
hashing one takes some twenty. There the bytes of many are laid end to end, row by row of the hash (`stats/fold.py`), and summed
by their owners; the result is that of `stats/digest.py`, bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bitwitness.stats.fold import HALF_WORD, ROW_BYTES, ROW_WORDS, WORD, Fold, is_large
from bitwitness.stats.host import to_device
from bitwitness.stats.mixing import COLUMNS_FROM, GOLDEN, length_number, numbers, scramble
from bitwitness.stats.reader import built

LARGEST = 1 << 25
"""Bytes of a tensor that is laid beside others, at most: 32 MiB; a larger one is worth its own launches."""
AT_ONCE = 1 << 28
"""Bytes that are laid end to end at a time, at most."""
_TAIL_WORDS = ROW_WORDS + 1  # a tail may have up to three bytes more than a row


@dataclass(frozen=True, slots=True)
class Together:
    """Tensors that were read together.

    Attributes
    ----------
    hashes
        int64 [N].
    rows
        Sums of all whole rows, int64 [R], those of each tensor after another; ``counts``: how many each has.
    columns
        Sums of shifted words, of whole rows alone, int64 [N, ROW_WORDS].
    tails
        What follows the whole rows, padded with zeros, int8 [N, ...]; ``lengths``: bytes of each tensor.

    """

    hashes: Tensor
    rows: Tensor
    columns: Tensor
    tails: Tensor
    counts: tuple[int, ...]
    lengths: tuple[int, ...]

    def kept(self, index: int) -> tuple[Tensor, Fold | None]:
        """Return what `HashBatch.kept` does."""
        count, length = self.counts[index], self.lengths[index]
        tail = self.tails[index, : length - count * ROW_BYTES]
        if not count:
            return tail, None
        first = sum(self.counts[:index])
        return tail, Fold(count, [self.rows[first : first + count]], self.columns[index], tail)


def can_be_together(flat: Tensor) -> bool:
    """Tell whether a tensor, given by its `flat_bits`, is worth laying beside others, and can be."""
    if flat.nbytes > LARGEST:
        return False
    if flat.is_cpu:
        return built() is not None and (flat.data_ptr() != 0 or not flat.nbytes)
    # one of a row and up to three bytes is not large, and has a word more than there is room for
    return is_large(flat) or flat.nbytes <= ROW_BYTES


def hash_together(flats: Sequence[Tensor]) -> Together:
    """Hash tensors of one device that `can_be_together`, given by their `flat_bits`; no device is waited for."""
    lengths = tuple(flat.nbytes for flat in flats)
    counts = tuple((flat.nbytes - HALF_WORD) // ROW_BYTES if is_large(flat) else 0 for flat in flats)
    if flats[0].is_cpu and (reader := built()) is not None:
        rows, hashes = (torch.empty(n, dtype=torch.int64) for n in (sum(counts), len(flats)))
        columns = torch.zeros(len(flats), ROW_WORDS, dtype=torch.int64)
        tails = torch.zeros(len(flats), _TAIL_WORDS * WORD, dtype=torch.int8)
        reader.hash_all(flats, counts, rows, columns, tails, hashes)
        return Together(hashes, rows, columns, tails, counts, lengths)
    return _laid_end_to_end([flat.view(torch.int8) for flat in flats], counts, lengths)


def _laid_end_to_end(data: list[Tensor], counts: tuple[int, ...], lengths: tuple[int, ...]) -> Together:
    device, each = data[0].device, torch.tensor(counts)
    owner = to_device(torch.arange(len(counts)).repeat_interleave(each), device)
    tails = _tails(data, counts, lengths)
    rows, columns = _whole_rows(data, counts, owner)
    # Words that a small tensor has, or a row; those behind them are no columns.
    widths = [ROW_WORDS if count else -(-max(n, 1) // WORD) for count, n in zip(counts, lengths, strict=True)]
    width, length = to_device([*widths, *map(length_number, lengths)], device).view(2, -1)
    words = tails.view(torch.int64)
    every = columns + _shifted_within(words[:, :ROW_WORDS], width)
    every += torch.as_tensor(numbers(COLUMNS_FROM, every))
    mixed = torch.as_tensor(scramble(every))
    mixed *= torch.arange(ROW_WORDS, device=device) < width[:, None]
    last = words[:, :ROW_WORDS].sum(1) + length + words[:, ROW_WORDS] * GOLDEN
    hashes = mixed.sum(1) + torch.as_tensor(scramble(last))
    if rows.numel():
        number = to_device(torch.arange(sum(counts)) - (each.cumsum(0) - each).repeat_interleave(each), device)
        hashes.index_add_(0, owner, torch.as_tensor(scramble(rows + number * GOLDEN)))
    return Together(hashes, rows, columns, tails, counts, lengths)


def _tails(data: list[Tensor], counts: tuple[int, ...], lengths: tuple[int, ...]) -> Tensor:
    """Return what follows the whole rows, each padded to a row and a word: int8 [N, 8176]."""
    padding = torch.zeros(_TAIL_WORDS * WORD, dtype=torch.int8, device=data[0].device)
    pieces = []
    for part, count, length in zip(data, counts, lengths, strict=True):
        rest = length - count * ROW_BYTES
        pieces += [part[count * ROW_BYTES :], padding[rest:]]
    return torch.cat(pieces).view(len(data), -1)


def _whole_rows(data: list[Tensor], counts: tuple[int, ...], owner: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of all whole rows, and by tensor those of the columns of their shifted words; ``owner``: by row."""
    columns = torch.zeros(len(data), ROW_WORDS, dtype=torch.int64, device=owner.device)
    large = [(part, count * ROW_BYTES) for part, count in zip(data, counts, strict=True) if count]
    if not large:
        return owner, columns
    rows = torch.cat([part[:end] for part, end in large]).view(torch.int64).view(-1, ROW_WORDS).sum(1)
    shifted = (
        torch.cat([part[HALF_WORD : end + HALF_WORD] for part, end in large]).view(torch.int64).view(-1, ROW_WORDS)
    )
    return rows, columns.index_add_(0, owner, shifted)


def _shifted_within(words: Tensor, width: Tensor) -> Tensor:
    """Return the words of each row read from half a word on, around the end of so many words: a copy."""
    halves = words.view(torch.int32)
    turned = torch.cat([halves[:, 1:], halves[:, :1]], 1)
    turned.scatter_(1, 2 * width[:, None] - 1, halves[:, :1])
    return turned.view(torch.int64)
