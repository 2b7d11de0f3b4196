"""Triton's kernels that read a tensor on an accelerator once: one launch for what takes torch some twenty.

Triton comes with torch's builds for CUDA and ROCm, and is imported here alone; where it is missing, torch's operators read.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def read_segments(
    values,
    weights,
    rows,
    count,
    row,
    SIGNED: tl.constexpr,
    SEGMENT: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write a row for each SEGMENT of ``count`` values, from row ``row`` on, in float64.

    Of WIDTH numbers: NaN, +Inf, -Inf and values that are not zero are counted; the least, the largest, the sum, the sum of
    squares and the sketch are of the finite values.
    """
    segment = tl.program_id(0)
    start = segment.to(tl.int64) * SEGMENT
    nan = tl.zeros([TILE], tl.int32)
    above = tl.zeros([TILE], tl.int32)
    below = tl.zeros([TILE], tl.int32)
    there = tl.zeros([TILE], tl.int32)
    low = tl.full([TILE], float("inf"), tl.float64)
    high = tl.full([TILE], float("-inf"), tl.float64)
    total = tl.zeros([TILE], tl.float64)
    squares = tl.zeros([TILE], tl.float64)
    signed = tl.zeros([TILE], tl.float64)
    for offset in range(0, SEGMENT, TILE):
        lane = offset + tl.arange(0, TILE)
        place = start + lane
        inside = place < count
        x = tl.load(values + place, mask=inside, other=0).to(tl.float64)
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
    tl.store(out + 4, tl.min(low, 0))
    tl.store(out + 5, tl.max(high, 0))
    tl.store(out + 6, tl.sum(total, 0))
    tl.store(out + 7, tl.sum(squares, 0))
    tl.store(out + 8, tl.sum(signed, 0))


@triton.jit
def join_segments(rows, starts, counts, signs, joined, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Write one row for each tensor, of its ``counts`` segments' rows from ``starts`` on, in their order."""
    tensor = tl.program_id(0)
    start = tl.load(starts + tensor)
    count = tl.load(counts + tensor)
    out = joined + tensor * WIDTH
    lane = tl.arange(0, ROWS)
    for column in tl.static_range(WIDTH):
        none = float("inf") if column == 4 else float("-inf") if column == 5 else 0.0
        found = tl.full([ROWS], none, tl.float64)
        for first in range(0, count, ROWS):
            place = first + lane
            inside = place < count
            x = tl.load(rows + (start + place) * WIDTH + column, mask=inside, other=none)
            if column == 4:
                found = tl.minimum(found, x)
            elif column == 5:
                found = tl.maximum(found, x)
            elif column == 8:
                sign = tl.load(signs + place, mask=inside & (count > 1), other=1.0)
                found += x * sign
            else:
                found += x
        if column == 4:
            tl.store(out + column, tl.min(found, 0))
        elif column == 5:
            tl.store(out + column, tl.max(found, 0))
        else:
            tl.store(out + column, tl.sum(found, 0))
