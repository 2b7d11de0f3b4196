"""A 64-bit hash of a tensor's bits, about as fast as memory can be read, equal wherever the bits are equal.

The bits are laid out in rows of 1021 words of 64 bits. Each word enters a sum over its row as it lies, and a sum over
its column shifted by half a word; sums wrap around. The two folds need each other: a change that keeps the sum of a row
moves something between columns, and the top bit of a word, of which a wrapping sum keeps only the parity, is in the
middle of a shifted one. The row length is a prime, so that a matrix's own rows and columns, rarely multiples of it, fall
across the folds. Each sum is then numbered, scrambled by a bijection and added up. The last, shorter row is folded on
its own: many small tensors of one size are then one batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from bitwitness.stats.local import local_parts

ROW_WORDS = 1021
ROW_BYTES = 8 * ROW_WORDS
_CACHE_ROWS = 64  # half a megabyte: the second fold then reads from the CPU's cache
_DEVICE_ROWS = 8192  # 64 MiB of scratch keeps an accelerator busy for much longer than a launch takes

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 / golden ratio, odd: the numbering step of splitmix64
_SCRAMBLE = 0xD6E8FEB86659FD93 - (1 << 64)  # multiplier of Degski's 64-bit mixer
_LOW_HALF = 0xFFFFFFFF
_COLUMNS_FROM = 1 << 32  # where the numbering of columns begins: rows never come so far
_TAIL_FROM = 1 << 33  # where that of the last, shorter row begins
_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def bit_hash(tensor: Tensor) -> Tensor:
    """Hash a tensor's bits.

    Equal bits in the same logical order give the same hash, whatever the strides, alignment, device and number of
    threads: only integers are added. Shape and dtype are not hashed, the number of elements is. Of a DTensor the local
    shard is hashed, of a sparse tensor its values and indices as stored.

    Parameters
    ----------
    tensor
        Any dtype but quantized ones. One that is not contiguous is copied first.

    Returns
    -------
    Tensor
        int64, 0-d, on the tensor's device; the host does not wait.

    Raises
    ------
    UsageError
        For a meta or quantized tensor.

    Notes
    -----
    What it can miss: it is no cryptographic hash, and 64 bits collide by chance once in 1.8e19. A change passes unseen
    if it keeps the sum of every row and of every column at once; that takes at least four words 1021 apart, altered by
    amounts that cancel, or an even number of changed top bits in every row and column that they touch, which needs
    changes to the same bits of shifted and unshifted words.

    """
    return digests_of([tensor])[0]


def digests_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return `bit_hash` of each tensor, small ones in batches; no device is waited for."""
    parts = [[_flat_bits(part) for part in local_parts(tensor)] for tensor in tensors]
    hashes = iter(_hash_flat([part for group in parts for part in group]))
    return [_join([next(hashes) for _ in group]) for group in parts]


def _join(hashes: list[Tensor]) -> Tensor:
    joined = hashes[0]
    for other in hashes[1:]:
        joined = joined * _GOLDEN + other
    return joined


def _flat_bits(x: Tensor) -> Tensor:
    """Return the elements in logical order as integers of their size; a view wherever that is possible."""
    if x.dtype.itemsize == 16:
        x = torch.view_as_real(x)
    return x.view(_INTEGER_OF_SIZE[x.dtype.itemsize]).reshape(-1)


def _hash_flat(flats: list[Tensor]) -> list[Tensor]:
    hashes = _hash_tails(flats)
    bodies = defaultdict(list)
    for index, flat in enumerate(flats):
        if flat.nbytes >= ROW_BYTES:
            bodies[flat.device].append(index)
    for members in bodies.values():
        terms = _hash_bodies([flats[index] for index in members])
        terms += torch.stack([hashes[index] for index in members])
        for index, value in zip(members, terms.unbind(), strict=True):
            hashes[index] = value
    return hashes


def _hash_tails(flats: list[Tensor]) -> list[Tensor]:
    """Hash what each tensor has beyond its whole rows, and its length, a batch for each length."""
    batches = defaultdict(list)
    for index, flat in enumerate(flats):
        batches[flat.device, flat.dtype, flat.numel()].append(index)
    hashes: dict[int, Tensor] = {}
    for (_, dtype, numel), members in batches.items():
        length = numel % (ROW_BYTES // dtype.itemsize)
        tails = torch.stack([flats[index][numel - length :] for index in members])
        tails = torch.nn.functional.pad(tails, (0, -length % (8 // dtype.itemsize)))
        row = tails.view(torch.int64).sum(1).add_(_wrap(_GOLDEN * (-1 - numel)))
        shifted = tails.view(torch.int32).roll(-1, 1).view(torch.int64)
        columns = shifted + _numbers(_TAIL_FROM, shifted.shape[1], shifted.device)
        terms = _scramble(row).add_(_scramble(columns).sum(1))
        hashes.update(zip(members, terms.unbind(), strict=True))
    return [hashes[index] for index in range(len(flats))]


def _hash_bodies(flats: list[Tensor]) -> Tensor:
    """Hash the whole rows of tensors that have some, all on one device, into one int64 [len(flats)]."""
    folds = [_fold(flat[: flat.numel() - flat.numel() % (ROW_BYTES // flat.itemsize)]) for flat in flats]
    lengths = [len(rows) for rows, _ in folds]
    device = flats[0].device
    numbers = _numbers(0, max(lengths), device)
    rows = torch.cat([rows for rows, _ in folds]).add_(torch.cat([numbers[:length] for length in lengths]))
    columns = torch.stack([columns for _, columns in folds]).add_(_numbers(_COLUMNS_FROM, ROW_WORDS, device))
    row_terms = torch.stack([term.sum() for term in _scramble(rows).split(lengths)])
    return _scramble(columns).sum(1).add_(row_terms)


def _fold(body: Tensor) -> tuple[Tensor, Tensor]:
    """Sum whole rows of words: each row as it lies, int64 [rows], and each column shifted, int64 [ROW_WORDS].

    Block by block, so that the second reading finds the data in the cache and scratch memory stays small.
    """
    if body.storage_offset() * body.itemsize % 4:
        body = body.clone()
    halves = body.view(torch.int32)
    aligned = halves.storage_offset() % 2 == 0
    block = 2 * ROW_WORDS * (_CACHE_ROWS if body.device.type == "cpu" else _DEVICE_ROWS)
    scratch = halves.new_empty(min(block, len(halves)))
    row_sums, column_sums = [], halves.new_zeros(ROW_WORDS, dtype=torch.int64)
    for here, following in zip(halves.split(block), halves[1:].split(block), strict=True):
        shifted = scratch[: len(here)]
        words = here if aligned else shifted.copy_(here)
        row_sums.append(words.view(torch.int64).view(-1, ROW_WORDS).sum(1))
        shifted[: len(following)].copy_(following)
        if len(following) < len(here):
            shifted[-1].copy_(halves[0])
        column_sums.add_(shifted.view(torch.int64).view(-1, ROW_WORDS).sum(0))
    return torch.cat(row_sums), column_sums


def _numbers(first: int, count: int, device: torch.device) -> Tensor:
    """Return ``count`` well-spread numbers, int64, of which no two are equal for any two positions."""
    return torch.arange(count, device=device).mul_(_GOLDEN).add_(_wrap(_GOLDEN * first))


def _scramble(x: Tensor) -> Tensor:
    """Apply Degski's 64-bit mixer in place: a bijection in which each bit of the input sways each of the output."""
    for _ in range(2):
        x.bitwise_xor_((x >> 32).bitwise_and_(_LOW_HALF)).mul_(_SCRAMBLE)
    return x.bitwise_xor_((x >> 32).bitwise_and_(_LOW_HALF))


def _wrap(number: int) -> int:
    """Return the signed 64-bit integer that is ``number`` modulo 2^64."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
