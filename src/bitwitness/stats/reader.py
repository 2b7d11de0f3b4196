"""The compiled reader of tensors on a CPU (``native/reader.c``), where the package was built with a C compiler.

It calls nothing of Python or torch, so that one call of a few microseconds takes the place of five of torch's operators on
each half megabyte, and every value is fetched from memory once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bitwitness.stats.sketch import BLOCK, first_weights

LIBRARY = Path(__file__).parent / "native" / "reader.so"
_VERSION = 7
KINDS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
"""The library's numbers of the types that it reads."""
_QUICK = 1 << 16
"""Elements up to which the interpreter's lock is kept: to have it back from another thread can take milliseconds."""
_CPU = torch.device("cpu")


class Figures(NamedTuple):
    """What `Reader.read` finds; 0 for what it was not asked for."""

    low: float
    high: float
    total: float
    squares: float
    signed: float
    there: float
    moved: float


_Found = ctypes.c_double * len(Figures._fields)


class Reader:
    """Calls the library.

    Parameters
    ----------
    path
        Where it lies.

    Raises
    ------
    OSError
        If it cannot be loaded, or was built of other sources.

    """

    def __init__(self, path: Path) -> None:
        self._quick, self._long = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))
        if self._quick.bitwitness_reader_version() != _VERSION:
            raise OSError(f"{path} was built of other sources")
        number, pointer, count = ctypes.c_int, ctypes.c_void_p, ctypes.c_ssize_t
        for library in (self._quick, self._long):
            library.bitwitness_read.argtypes = [number, pointer, count, pointer, pointer, number, pointer]
            library.bitwitness_read.restype = None
            library.bitwitness_read_all.argtypes = [count, pointer, pointer, pointer, pointer, number, pointer]
            library.bitwitness_read_all.restype = None
            library.bitwitness_sketch.argtypes = [number, pointer, count, pointer]
            library.bitwitness_sketch.restype = ctypes.c_double
            library.bitwitness_fold.argtypes = [pointer, count, pointer, pointer]
            library.bitwitness_fold.restype = None
            library.bitwitness_hash.argtypes = [pointer, count, pointer, pointer, count]
            library.bitwitness_hash.restype = ctypes.c_int64
            library.bitwitness_hash_all.argtypes = [count, *[pointer] * 7]
            library.bitwitness_hash_all.restype = None
            matrix = (pointer, count, count, count, count, count)
            library.bitwitness_products.argtypes = [number, number, *matrix, pointer, count, pointer, pointer]
            library.bitwitness_products.restype = None
            library.bitwitness_many.argtypes = [number, number, number, pointer, count, count, count, *[pointer] * 3]
            library.bitwitness_many.restype = None
            library.bitwitness_pairs.argtypes = [number, pointer, pointer, pointer, pointer, pointer]
            library.bitwitness_pairs.restype = None
        self._weights = first_weights(BLOCK, torch.float64, _CPU)

    def takes(self, values: Tensor) -> bool:
        """Tell whether a plain tensor is one that is read here: contiguous, of a common type, in memory."""
        return values.is_contiguous() and self.reaches(values)

    @staticmethod
    def reaches(values: Tensor) -> bool:
        """Tell whether a plain tensor's values can be read where they lie, whatever its strides."""
        return (
            values.dtype in KINDS
            and values.is_cpu
            and not values.is_neg()  # whose sign is elsewhere
            and values.data_ptr() != 0  # else empty, or zeros that have no memory
        )

    def read(self, values: Tensor, *, signed: bool = False, zeros: bool = False) -> Figures:
        """Read a tensor that `takes`.

        ``signed``: take the sketch, in float64; ``zeros``: count what is not zero. Other sums of up to 1,024 values are of
        float32 (of float64 for a float64), 16 side by side, and of float64 over these; of what is not finite the squares' sum
        is not, and the extremes mean nothing.
        """
        kind, count = KINDS[values.dtype], values.numel()
        found = _Found()
        weights = self._weights.data_ptr() if signed else None
        library = self._quick if count <= _QUICK else self._long
        library.bitwitness_read(kind, values.data_ptr(), count, weights, None, zeros, found)
        return Figures._make(found[:])

    def fold(self, bits: Tensor, rows: Tensor, columns: Tensor) -> None:
        """Sum the rows of words of a tensor in memory into ``rows``, and their shifted words to ``columns``; `stats/fold.py`.

        ``rows`` int64 [R], ``columns`` int64 [1021]; ``bits`` is contiguous, and longer than R rows by half a word.
        """
        library = self._quick if bits.numel() <= _QUICK else self._long
        library.bitwitness_fold(bits.data_ptr(), rows.numel(), rows.data_ptr(), columns.data_ptr())

    def hash(self, rows: Tensor, columns: Tensor, tail: Tensor) -> int:
        """Return the hash that the sums of `fold` come to, and the bytes that follow the rows; `stats/digest.py`."""
        places = rows.data_ptr(), rows.numel(), columns.data_ptr(), tail.data_ptr(), tail.numel()
        found: int = self._quick.bitwitness_hash(*places)
        return found

    def hash_all(
        self,
        flats: Sequence[Tensor],
        counts: Sequence[int],
        rows: Tensor,
        columns: Tensor,
        tails: Tensor,
        hashes: Tensor,
    ) -> None:
        """Do both for many tensors in memory, given by their contiguous bits; see `stats/hashmany.py` for the results.

        ``counts``: how many rows each has; ``rows`` int64 [their sum], ``columns`` int64 [N, 1021] and ``tails`` int8
        [N, 8176], both zeros, ``hashes`` int64 [N].
        """
        places = np.array([flat.data_ptr() for flat in flats], dtype=np.uintp)
        lengths = np.array([flat.nbytes for flat in flats], dtype=np.int64)
        numbers = np.array(counts, dtype=np.int64)
        library = self._quick if lengths.sum() <= _QUICK else self._long
        library.bitwitness_hash_all(
            *(len(flats), places.ctypes.data, lengths.ctypes.data, numbers.ctypes.data),
            *(rows.data_ptr(), columns.data_ptr(), tails.data_ptr(), hashes.data_ptr()),
        )

    def sketch(self, values: Tensor) -> float:
        """Return the sketch that `read` takes, bit by bit."""
        kind, count = KINDS[values.dtype], values.numel()
        library = self._quick if count <= _QUICK else self._long
        found: float = library.bitwitness_sketch(kind, values.data_ptr(), count, self._weights.data_ptr())
        return found

    def read_all(
        self, tensors: Sequence[Tensor], *, zeros: bool = False, before: Sequence[Tensor] | None = None
    ) -> list[Figures]:
        """Read many tensors that `takes`, in one call, without sketches.

        ``before``: as many, of the same lengths and types, whose squared distances are taken, and which then hold the values.
        """
        kinds = np.array([KINDS[values.dtype] for values in tensors], dtype=np.int32)
        places = np.array([values.data_ptr() for values in tensors], dtype=np.uintp)
        counts = np.array([values.numel() for values in tensors], dtype=np.int64)
        old = None if before is None else np.array([values.data_ptr() for values in before], dtype=np.uintp)
        found = np.empty((len(tensors), len(Figures._fields)))
        library = self._quick if counts.sum() <= _QUICK else self._long
        library.bitwitness_read_all(
            len(tensors),
            kinds.ctypes.data,
            places.ctypes.data,
            counts.ctypes.data,
            None if old is None else old.ctypes.data,
            zeros,
            found.ctypes.data,
        )
        return list(map(Figures._make, found.tolist()))

    def products(self, x: Tensor, v: Tensor, sums: Tensor, squares: Tensor) -> None:
        """Write ``x v``, and the squares of x's rows, to ``sums`` and ``squares``, ``[batch, M]``.

        ``x``: ``[batch, M, K]``, contiguous along K or along M; ``v``: ``[batch, K]`` or, for all alike, ``[K]``; these and the
        results contiguous, of float32 (of float64 for a float64).
        """
        across = int(x.stride(-1) != 1 and x.shape[-1] > 1)
        memory = x.mT if across else x
        library = self._quick if x.numel() <= _QUICK else self._long
        library.bitwitness_products(
            *(KINDS[x.dtype], across, x.data_ptr(), x.shape[0], x.stride(0), *memory.shape[1:], memory.stride(1)),
            *(v.data_ptr(), v.stride(0) if v.dim() == 2 else 0, sums.data_ptr(), squares.data_ptr()),
        )

    def many(self, x: Tensor, v: Tensor, sums: Tensor, squares: Tensor) -> None:
        """Write the products of a matrix ``[M, K]`` with G vectors to ``sums``, its rows' squares to ``squares``, ``[M]``.

        ``x``: of bfloat16 or float32. Contiguous along K: G of 2, 4 or 8, ``v`` ``[G, K]``, ``sums`` ``[M, G]``; along M: G of
        2 or 4, ``v`` ``[K, G]``, ``sums`` ``[G, M]``. These are contiguous, of float32.
        """
        across = int(x.stride(1) != 1)
        memory = x.t() if across else x
        library = self._quick if x.numel() <= _QUICK else self._long
        groups, read = v.shape[1] if across else v.shape[0], (x.data_ptr(), *memory.shape, memory.stride(0))
        library.bitwitness_many(
            *(KINDS[x.dtype], groups, across, *read, v.data_ptr(), sums.data_ptr(), squares.data_ptr())
        )

    def pairs(self, x: Tensor, y: Tensor, out: Tensor) -> None:
        """Write the dot products of the rows of two tensors ``[a, b, c, K]``, and the squares of either, to ``out``.

        ``out``: ``[3, a, b, c]``, contiguous, of float32 (of float64 for a float64); x and y are contiguous along K.
        """
        sizes = (ctypes.c_int64 * 4)(*x.shape)
        steps = (ctypes.c_int64 * 6)(*x.stride()[:3], *y.stride()[:3])
        library = self._quick if x.numel() <= _QUICK else self._long
        library.bitwitness_pairs(KINDS[x.dtype], x.data_ptr(), y.data_ptr(), sizes, steps, out.data_ptr())

    def read_at(self, count: int, kinds: int, places: int, counts: int, found: int) -> None:
        """Read ``count`` pieces of memory, and count what is not zero; the rest are addresses of arrays that the library takes.

        For who reads so often that arrays are kept: `stats/rowreader.py`.
        """
        self._quick.bitwitness_read_all(count, kinds, places, counts, None, 1, found)


@cache
def built() -> Reader | None:
    """Return the reader; None where it was not built."""
    try:
        return Reader(LIBRARY)
    except (OSError, AttributeError):  # not there, of another platform, or of other sources
        return None
