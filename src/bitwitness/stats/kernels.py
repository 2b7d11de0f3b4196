"""Triton's kernels that read a tensor on an accelerator once: one launch for what takes torch some twenty.

Triton comes with torch's builds for CUDA and ROCm, and is imported here alone; where it is missing, torch's operators read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

types = {torch.float32: tl.float32, torch.float64: tl.float64}
"""The types that sums may be of."""

SEGMENT = tl.constexpr(1 << 15)
"""Elements that one program reads: a block of the sketch."""
TILE = tl.constexpr(2048)
WIDTH = tl.constexpr(9)
"""Numbers of a row: NaN, +Inf, -Inf and values that are not zero are counted; the least, the largest, the sum, the squares' sum
and the sketch are of the finite values."""
ROWS = tl.constexpr(256)


@triton.jit
def read_segments(values, weights, rows, count, row, WIDE: tl.constexpr, SIGNED: tl.constexpr):
    """Write a row for each segment of ``count`` values, from row ``row`` on; sums are of the type WIDE, 2,048 side by side."""
    segment = tl.program_id(0)
    start = segment.to(tl.int64) * SEGMENT
    nan = tl.zeros([TILE], tl.int32)
    above = tl.zeros([TILE], tl.int32)
    below = tl.zeros([TILE], tl.int32)
    there = tl.zeros([TILE], tl.int32)
    low = tl.full([TILE], float("inf"), WIDE)
    high = tl.full([TILE], float("-inf"), WIDE)
    total = tl.zeros([TILE], WIDE)
    squares = tl.zeros([TILE], WIDE)
    signed = tl.zeros([TILE], WIDE)
    for offset in range(0, SEGMENT, TILE):
        lane = offset + tl.arange(0, TILE)
        place = start + lane
        inside = place < count
        x = tl.load(values + place, mask=inside, other=0).to(WIDE)
        is_nan = x != x
        is_above = x == float("inf")
        is_below = x == float("-inf")
        finite = inside & (is_nan == 0) & (is_above == 0) & (is_below == 0)
        nan += is_nan.to(tl.int32)
        above += is_above.to(tl.int32)
        below += is_below.to(tl.int32)
        there += (x != 0).to(tl.int32)
        low = tl.minimum(low, tl.where(finite, x, float("inf")))
        high = tl.maximum(high, tl.where(finite, x, float("-inf")))
        x = tl.where(finite, x, 0.0)
        total += x
        squares += x * x
        if SIGNED:
            signed += x * tl.load(weights + lane)
    out = rows + (row + segment) * WIDTH
    tl.store(out, tl.sum(nan, 0).to(tl.float64))
    tl.store(out + 1, tl.sum(above, 0).to(tl.float64))
    tl.store(out + 2, tl.sum(below, 0).to(tl.float64))
    tl.store(out + 3, tl.sum(there, 0).to(tl.float64))
    tl.store(out + 4, tl.min(low, 0).to(tl.float64))
    tl.store(out + 5, tl.max(high, 0).to(tl.float64))
    tl.store(out + 6, tl.sum(total, 0).to(tl.float64))
    tl.store(out + 7, tl.sum(squares, 0).to(tl.float64))
    tl.store(out + 8, tl.sum(signed, 0).to(tl.float64))


@triton.jit
def join_segments(rows, starts, counts, signs, joined):
    """Write one row for each tensor, of its ``counts`` segments' rows from ``starts`` on, in their order."""
    tensor = tl.program_id(0)
    start = tl.load(starts + tensor)
    count = tl.load(counts + tensor)
    out = joined + tensor * WIDTH
    lane = tl.arange(0, ROWS)
    for column in tl.static_range(WIDTH):
        is_low: tl.constexpr = column == 4
        is_high: tl.constexpr = column == 5
        none = float("inf") if is_low else float("-inf") if is_high else 0.0
        found = tl.full([ROWS], none, tl.float64)
        for first in range(0, count, ROWS):
            place = first + lane
            inside = place < count
            x = tl.load(rows + (start + place) * WIDTH + column, mask=inside, other=none)
            if is_low:
                found = tl.minimum(found, x)
            elif is_high:
                found = tl.maximum(found, x)
            elif column == 8:
                sign = tl.load(signs + place, mask=inside & (count > 1), other=1.0)
                found += x * sign
            else:
                found += x
        if is_low:
            tl.store(out + column, tl.min(found, 0))
        elif is_high:
            tl.store(out + column, tl.max(found, 0))
        else:
            tl.store(out + column, tl.sum(found, 0))
