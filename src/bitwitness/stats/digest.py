"""A 64-bit hash of a tensor's bits, about as fast as memory can be read, equal wherever the bits are equal.

The bits are laid out in rows of 1021 words of 64 bits. Each word enters a sum over its row as it lies, and a
sum over its column shifted by half a word; sums wrap around. The two folds need each other: a change that
keeps the sum of a row moves something between columns, and the top bit of a word, of which a wrapping sum
keeps only the parity, is in the middle of a shifted one. The row length is a prime, so that a matrix's own
rows and columns, rarely multiples of it, fall across the folds. Each sum is then numbered, scrambled by a
bijection and added up. The last, shorter row is numbered by the length of the whole; small tensors have no
other, so that many of them are hashed in one batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitwitness.numerics import INTEGER_OF_SIZE
from bitwitness.stats.fold import ROW_BYTES, WORD, Fold, fold, is_large
from bitwitness.stats.hashmany import AT_ONCE, Together, can_be_together, hash_together
from bitwitness.stats.host import numbers_of
from bitwitness.stats.local import local_parts
from bitwitness.stats.mixing import COLUMNS_FROM, GOLDEN, Words, length_number, numbers, scramble
from bitwitness.stats.reader import built

_QUICK_WORDS = (
    1 << 15
)  # from some 50,000 on torch's multiplication, which numpy does not vectorize, makes up for its calls


@torch.no_grad()
def bit_hash(tensor: Tensor) -> Tensor:
    """Hash a tensor's bits.

    Equal bits in the same logical order give the same hash, whatever the strides, alignment, device and
    number of threads: only integers are added. Shape and dtype are not hashed, the number of elements is. Of
    a DTensor the local shard is hashed, of a sparse tensor its values and indices as stored.

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
    What it can miss: it is no cryptographic hash, and 64 bits collide by chance once in 1.8e19. A change
    passes unseen if it keeps the sum of every row and of every column at once; that takes at least four
    altered words, two each in two rows, by amounts that cancel. In a tensor of less than 8172 bytes there is
    one row only, and nothing cancels but by chance.

    """
    return joined(hashes_of([flat_bits(part) for part in local_parts(tensor)]))


@torch.no_grad()
def bit_hashes(tensors: Sequence[Tensor]) -> Tensor:
    """Hash several dense tensors at once, or of DTensors the local shards, with fewer calls than one by one; int64 [N]."""
    return torch.stack(list(hashes_of([flat_bits(local_parts(tensor)[0]) for tensor in tensors])))


@torch.no_grad()
def in_hex(digest: int | Tensor) -> str:
    """Return a hash's bits as 16 hexadecimal digits."""
    return f"{int(digest) & (1 << 64) - 1:016x}"


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one layout hold the same bits in the same logical order; the host waits."""
    parts = zip(local_parts(a), local_parts(b), strict=True)
    return a.dtype == b.dtype and all(torch.equal(flat_bits(x), flat_bits(y)) for x, y in parts)


def flat_bits(x: Tensor) -> Tensor:
    """Return the elements in logical order as integers of their size; a view wherever that is possible."""
    if x.dtype.itemsize == 16:
        x = torch.view_as_real(x)
    bits = x.view(INTEGER_OF_SIZE[x.dtype.itemsize])
    return bits.reshape(-1).contiguous()  # reshape alone leaves a strided vector strided


def joined(hashes: Sequence[Tensor]) -> Tensor:
    """Return one hash for a tensor that is stored in several parts."""
    result = hashes[0]
    for other in hashes[1:]:
        result = result * GOLDEN + other
    return result


class HashBatch:
    """Hashes many tensors as `bit_hash` does, at a fraction of the price for each.

    A tensor is read when it is added, so that it may change after; what is left to do is done for all at once.
    """

    def __init__(self) -> None:
        self._flats: list[Tensor] = []
        self._folds: dict[int, Fold] = {}
        self._together: dict[int, tuple[Together, int]] = {}

    def __len__(self) -> int:
        return len(self._flats)

    @torch.no_grad()
    def on_host(self) -> Tensor:
        """Return the hashes in the order of adding, int64 [N] on the host; one transfer a device, each waited for."""
        return torch.tensor(numbers_of(self.finish()), dtype=torch.int64)

    def kept(self, index: int) -> tuple[Tensor, Fold | None]:
        """Return what is kept of a tensor: its `flat_bits` if it is small, else a stand-in, and its sums."""
        if index in self._together:
            together, place = self._together[index]
            return together.kept(place)
        return self._flats[index], self._folds.get(index)

    @torch.no_grad()
    def add(self, values: Tensor) -> None:
        """Read a plain, strided tensor; raises `UsageError` as `bit_hash` does."""
        flat = flat_bits(local_parts(values)[0])
        if is_large(flat):
            folded = fold(flat)
            self._folds[len(self._flats)] = Fold(folded.count, folded.rows, folded.columns, folded.tail.clone())
            flat = flat.new_empty(1).expand(2 * ROW_BYTES)  # it only has to look large from here on
        else:
            flat = flat.clone()
        self._flats.append(flat)

    @torch.no_grad()
    def add_all(self, tensors: Iterable[Tensor]) -> None:
        """Read many at once, which on an accelerator takes hardly more launches than one."""
        several: dict[int, Tensor] = {}
        for tensor in tensors:
            flat = flat_bits(local_parts(tensor)[0])
            if can_be_together(flat):
                several[len(self._flats)] = flat
                self._flats.append(flat.new_empty(0))
            else:
                self.add(tensor)
        for members in _heaps(several):
            together = hash_together([several[index] for index in members])
            self._together |= {index: (together, place) for place, index in enumerate(members)}

    @torch.no_grad()
    def finish(self) -> list[Tensor]:
        """Return the hashes in the order of adding: int64, 0-d, on the tensors' devices."""
        alone = [index for index in range(len(self._flats)) if index not in self._together]
        folds = {place: self._folds[index] for place, index in enumerate(alone) if index in self._folds}
        found = dict(zip(alone, hashes_of([self._flats[index] for index in alone], folds), strict=True))
        found |= {index: together.hashes[place] for index, (together, place) in self._together.items()}
        return [found[index] for index in range(len(self._flats))]


def _heaps(flats: Mapping[int, Tensor]) -> Iterator[list[int]]:
    """Yield tensors of one device each, by number, as many as are laid end to end at a time."""
    heaps: dict[torch.device, list[int]] = {}
    sizes: dict[torch.device, int] = {}
    for index, flat in flats.items():
        heap = heaps.setdefault(flat.device, [])
        sizes[flat.device] = sizes.get(flat.device, 0) + flat.nbytes
        if heap and sizes[flat.device] > AT_ONCE:
            yield heap
            heaps[flat.device], sizes[flat.device] = [index], flat.nbytes
        else:
            heap.append(index)
    yield from (heap for heap in heaps.values() if heap)


def hashes_of(flats: Sequence[Tensor], folds: Mapping[int, Fold] | None = None) -> list[Tensor]:
    """Return `bit_hash` of each tensor, given by its `flat_bits`; no device is waited for.

    ``folds`` holds what was folded before, by position.
    """
    folds = folds or {}
    large, small = defaultdict(list), defaultdict(list)
    several = {index: flat for index, flat in enumerate(flats) if index not in folds and can_be_together(flat)}
    hashes: dict[int, Tensor] = {}
    for members in _heaps(several):
        hashes.update(zip(members, hash_together([flats[index] for index in members]).hashes.unbind(), strict=True))
    for index, flat in enumerate(flats):
        if index in hashes:
            continue
        if is_large(flat):
            large[flat.device].append(index)
        else:
            small[flat.device, flat.dtype, flat.numel()].append(index)
    for members in large.values():
        batch = _hash_large([folds.get(index) or fold(flats[index]) for index in members])
        hashes.update(zip(members, batch.unbind(), strict=True))
    for members in small.values():
        batch = _hash_small([flats[index] for index in members])
        hashes.update(zip(members, batch.unbind(), strict=True))
    return [hashes[index] for index in range(len(flats))]


def _hash_large(folds: list[Fold]) -> Tensor:
    """Finish the hashes of large tensors on one device: int64 [len(folds)]."""
    if folds[0].columns.is_cpu and (reader := built()) is not None:
        return torch.tensor([reader.hash(_joined_rows(part), part.columns, part.tail) for part in folds])
    tails = torch.zeros(len(folds), ROW_BYTES, dtype=torch.int8, device=folds[0].columns.device)
    for row, part in zip(tails.unbind(), folds, strict=True):
        row[: len(part.tail)].copy_(part.tail[:ROW_BYTES])
    words = _quick(tails.view(torch.int64))
    columns = _quick(torch.stack([part.columns for part in folds]))
    columns += _shifted(words)
    columns += numbers(COLUMNS_FROM, columns)
    rows = _quick(torch.cat([piece for part in folds for piece in part.rows]))
    hashes, last = scramble(columns).sum(1), words.sum(1)
    first = 0
    for index, part in enumerate(folds):  # slices of one: an element of numpy's array would warn when it wraps around
        mine = rows[first : first + part.count]
        mine += numbers(0, mine)
        hashes[index : index + 1] += _plain(scramble(mine).sum(), hashes)
        last[index : index + 1] += length_number(part.count * ROW_BYTES + len(part.tail))
        if len(part.tail) > ROW_BYTES:  # by up to three bytes, too few for the half word that a row must have after it
            last[index : index + 1] += _plain(_excess(part.tail), last)
        first += part.count
    hashes += scramble(last)
    return torch.as_tensor(hashes)


def _joined_rows(part: Fold) -> Tensor:
    return part.rows[0] if len(part.rows) == 1 else torch.cat(part.rows)


def _excess(tail: Tensor) -> Tensor:
    """Return the bytes of a tail that has more than a row, as a multiple of an odd constant: int64, 0-d."""
    word = tail.new_zeros(WORD)
    word[: len(tail) - ROW_BYTES].copy_(tail[ROW_BYTES:])
    return word.view(torch.int64)[0] * GOLDEN


def _plain(word: Any, beside: Words) -> Any:
    """Return a word as it can be added to others: numpy's arrays take no tensors."""
    return word if isinstance(beside, Tensor) else int(word)


def _hash_small(flats: list[Tensor]) -> Tensor:
    """Hash small tensors of one length, dtype and device: int64 [len(flats)]."""
    stacked = torch.stack(flats)
    length = stacked.shape[1] * stacked.itemsize
    if not length:
        stacked = stacked.new_zeros(len(flats), WORD // stacked.itemsize)  # told from zeros by the length below
    elif length % WORD:
        stacked = torch.nn.functional.pad(stacked, (0, -length % WORD // stacked.itemsize))
    words = _quick(stacked.view(torch.int64))
    columns = _shifted(words)
    columns += numbers(COLUMNS_FROM, columns)
    hashes, last = scramble(columns).sum(1), words.sum(1)
    last += length_number(length)
    hashes += scramble(last)
    return torch.as_tensor(hashes)


def _quick(words: Tensor) -> Words:
    """Return what computes on the same memory at the least price: of a few words on a CPU, numpy's array.

    A call of torch costs more, and several times as much below a dispatch mode, of which a script may have its own.
    """
    return words.numpy() if words.device.type == "cpu" and words.numel() < _QUICK_WORDS else words


def _shifted(rows: Words) -> Words:
    """Return the words of each row read from half a word on, around its end: a copy."""
    if isinstance(rows, Tensor):
        return rows.view(torch.int32).roll(-1, 1).view(torch.int64)
    halves = rows.view(np.int32)
    return np.concatenate((halves[:, 1:], halves[:, :1]), 1).view(np.int64)
