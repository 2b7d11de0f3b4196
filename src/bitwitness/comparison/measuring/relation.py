"""What two recorded values that differ have to do with each other: a factor, another order, or nothing that statistics show."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bitwitness.comparison.matching.frame import StepFrame
from bitwitness.comparison.measuring.allowance import roundoff

_SAME = 1e-3
"""Relative deviation from an exact factor: what gradients' noise leaves in float32, and far from any factor that is meant."""
_SAME_NUMBERS = 1e-6
"""The same for statistics of equal numbers in another order, whose sums are rounded otherwise."""
_ROUNDED = 1e-5
"""And of numbers that another kernel has computed there."""
_UNITS = 16.0
"""Unit roundoffs that it may be instead, in dtypes whose unit roundoff is large."""


_FILLING = 9e3
"""Magnitude of what masks are filled with, at least (-1e4, -1e9), beside which changes of other values vanish from norms."""
_NOT_FINITE = {"nan": "NaN", "pos_inf": "inf", "neg_inf": "-inf"}


@dataclass(frozen=True, slots=True)
class Numbers:
    """A row's statistics; NaN where one is not known. ``rms``: the root mean square."""

    count: int
    min: float
    max: float
    mean: float
    l2: float
    sketch: float
    rms: float
    top: float


def numbers_of(frame: StepFrame, row: int) -> Numbers:
    """Return a row's statistics."""
    low, high, mean, l2, signed = (float(frame.numbers[name][row]) for name in ("min", "max", "mean", "l2", "sketch"))
    count = int(frame.count[row])
    return Numbers(count, low, high, mean, l2, signed, l2 / math.sqrt(max(count, 1)), max(abs(low), abs(high)))


def is_filled(frame: StepFrame, row: int) -> bool:
    """Tell whether a row holds values as large as what masks are filled with."""
    return numbers_of(frame, row).top > _FILLING


def tolerance(a: StepFrame, row_a: int, b: StepFrame, row_b: int) -> float:
    """Return the relative deviation up to which a factor between two rows counts as exact."""
    return max(_SAME, *(_UNITS * roundoff(frame.text("dtype", row)) for frame, row in ((a, row_a), (b, row_b))))


def factor(a: StepFrame, row_a: int, b: StepFrame, row_b: int, least: float = 0.0) -> float | None:
    """Return by what the values of A were multiplied to give those of B; None if by no one number.

    0 where B is zero throughout; None as well where A is, or where a statistic is not known. ``least``: a deviation up to which
    it counts as exact that is known to be noise.
    """
    if a is b and a.value[row_a] == a.value[row_b]:
        return 1.0  # one value, of which nothing else need be known
    x, y = numbers_of(a, row_a), numbers_of(b, row_b)
    if x.count != y.count or not x.l2 > 0 or math.isnan(y.l2) or not_finite(a, b, row_a, row_b):
        return None  # statistics are of what is finite alone
    if y.l2 == 0:
        return 0.0
    limit = max(tolerance(a, row_a, b, row_b), least)
    size = y.l2 / x.l2
    ordered = a.text("layout", row_a) == b.text("layout", row_b)
    return next((f for f in (size, -size) if _is_times(f, x, y, limit, ordered=ordered)), None)


def _is_times(by: float, x: Numbers, y: Numbers, limit: float, *, ordered: bool) -> bool:
    low, high = (x.min, x.max) if by > 0 else (x.max, x.min)
    gaps = [(by * low - y.min, y.top), (by * high - y.max, y.top), (by * x.mean - y.mean, y.rms)]
    if ordered:
        gaps.append((by * x.sketch - y.sketch, y.l2))
    known = [(gap, scale) for gap, scale in gaps if not math.isnan(gap)]
    return len(known) > 1 and all(abs(gap) <= limit * scale for gap, scale in known)


def is_reordered(a: StepFrame, row_a: int, b: StepFrame, row_b: int) -> bool:
    """Tell whether two rows hold the same numbers in different places, as far as statistics show."""
    x, y = numbers_of(a, row_a), numbers_of(b, row_b)
    if x.count != y.count or math.isnan(x.sketch) or math.isnan(y.sketch):
        return False
    if a.text("layout", row_a) != b.text("layout", row_b) or x.min != y.min or x.max != y.max:
        return False
    same = abs(x.l2 - y.l2) <= _SAME_NUMBERS * y.l2 and abs(x.mean - y.mean) <= _SAME_NUMBERS * y.rms
    return same and abs(x.sketch - y.sketch) > _SAME * y.l2


def lies_otherwise(a: StepFrame, row_a: int, b: StepFrame, row_b: int) -> bool:
    """Tell whether two rows of other shapes hold the same numbers but for rounding, as far as statistics show."""
    x, y = numbers_of(a, row_a), numbers_of(b, row_b)
    units = [roundoff(frame.text("dtype", row)) for frame, row in ((a, row_a), (b, row_b))]
    limit = max(_ROUNDED, *(_UNITS * one for one in units))
    gaps = [(x.min - y.min, y.top), (x.max - y.max, y.top), (x.mean - y.mean, y.rms), (x.l2 - y.l2, y.l2)]
    return (
        a.shapes[row_a] != b.shapes[row_b]
        and x.count == y.count
        and all(abs(gap) <= limit * most for gap, most in gaps)
    )


def not_finite(a: StepFrame, b: StepFrame, row_a: int, row_b: int) -> str:
    """Say that one of two rows holds more NaN or infinities than the other; empty where neither does, or it is not known."""
    for kind, word in _NOT_FINITE.items():
        counts = int(a.counts[kind][row_a]), int(b.counts[kind][row_b])
        if min(counts) < 0 or counts[0] == counts[1]:
            continue
        side, count = ("A", a.count[row_a]) if counts[0] > counts[1] else ("B", b.count[row_b])
        if min(counts):
            return f"run A holds {counts[0]} {word} and run B {counts[1]}, of {count}"
        held = f"{max(counts)} {word} among its {count} values" if max(counts) > 1 else word
        return f"run {side} holds {held}, and the other run none"
    return ""


def in_words(a: StepFrame, b: StepFrame, row_a: int, row_b: int) -> str:
    """Say how the values of two rows differ."""
    return not_finite(a, b, row_a, row_b) or _finite_in_words(a, b, row_a, row_b)


def _finite_in_words(a: StepFrame, b: StepFrame, row_a: int, row_b: int) -> str:
    if is_reordered(a, row_a, b, row_b):
        return "the same values in another order"
    if (
        a.text("layout", row_a) != b.text("layout", row_b)
        and numbers_of(a, row_a).sketch == numbers_of(b, row_b).sketch
    ):
        return "the same memory read in another order (a transposed or permuted view)"
    times = factor(a, row_a, b, row_b)
    if times is not None and abs(abs(times) - 1.0) > tolerance(a, row_a, b, row_b):
        return "zero throughout in run B" if times == 0 else f"{times:.4g} times as large in run B"
    if times is not None and times < 0:
        return "with the sign turned in run B"
    x, y = numbers_of(a, row_a), numbers_of(b, row_b)
    dtype = a.text("dtype", row_a).removeprefix("torch.")
    if dtype == b.text("dtype", row_b).removeprefix("torch.") and x.mean != y.mean:
        if dtype == "bool":
            return f"{x.mean:.4%} of it true against {y.mean:.4%}"
        if dtype.startswith(("int", "uint")):  # token ids, labels: a norm says nothing of them
            return f"other integers, on average {x.mean:.6g} against {y.mean:.6g}"
    alike = 0 < abs(x.l2 - y.l2) <= _SAME_NUMBERS * y.l2  # a norm that does not show it, as of normalised advantages
    ranges = [f"{one.min:.4g} to {one.max:.4g}" for one in (x, y)]
    if alike and ranges[0] != ranges[1] and a.text("layout", row_a) == b.text("layout", row_b):
        return f"other values of nearly the same L2 norm, {ranges[0]} against {ranges[1]}"
    if x.l2 == y.l2 or math.isnan(x.l2) or math.isnan(y.l2):
        return (
            "other bits" if x.sketch == y.sketch or math.isnan(x.sketch + y.sketch) else "other values of the same norm"
        )
    return f"{x.mean:.9g} against {y.mean:.9g}" if x.count == 1 else f"L2 norm {x.l2:.9g} against {y.l2:.9g}"


def in_times(factor_: float) -> str:
    """Return a factor in words: ``8 times``, ``1/15 times``."""
    parts = 1.0 / factor_ if factor_ else 0.0
    if parts > 1.5 and abs(parts - round(parts)) <= _SAME * parts:
        return f"1/{round(parts)} times"
    return f"{factor_:.4g} times"


def in_words_of_link(times: float | None) -> str:
    """Say by what a gradient was multiplied; None: by no one number."""
    if times is None:
        return "edits it"
    if times == 0:
        return "sets it to zero"
    return "leaves it" if times == 1.0 else f"multiplies it by {times:.4g}"


def and_so(others: int) -> str:
    """Return what is added to a sentence on a parameter's gradient that is true of so many others'."""
    return f" (and so {others} other parameter{'s' * (others != 1)})" if others else ""
