"""The statistics of a value's parts as those of the whole: extremes of all, sums of all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Cells = dict[str, Any]


def same(a: Cells, b: Cells) -> bool:
    """Tell whether two rows hold the same values, as far as is known."""
    if a["hash"] is not None and b["hash"] is not None:
        return bool(a["hash"] == b["hash"])
    return all(a[name] == b[name] for name in ("count", "min", "max", "mean", "l2", "nan"))


def stacked(parts: Sequence[tuple[int, Cells]]) -> list[int]:
    """Return the shape of parts of a batch, one after the other."""
    shape = list(parts[0][1]["shape"])
    if shape:
        shape[0] = sum(cells["shape"][0] for _, cells in parts if cells["shape"])
    return shape


def total(parts: list[Cells]) -> Cells:
    """Return the statistics of all parts together."""
    count = sum(part["count"] or 0 for part in parts)
    known = [part for part in parts if part["l2"] is not None and part["mean"] is not None]
    found: Cells = {"count": count, "sketch": None}  # whose signs go by places in the whole
    for name in ("nan", "pos_inf", "neg_inf", "zeros"):
        numbers = [part[name] for part in parts]
        found[name] = None if None in numbers else sum(numbers)
    if len(known) < len([part for part in parts if part["count"]]):
        return found | {"min": None, "max": None, "mean": None, "l2": None}
    return found | {
        "min": min(part["min"] for part in known),
        "max": max(part["max"] for part in known),
        "mean": math.fsum(_exactly(part, part["mean"] * part["count"]) for part in known) / count if count else None,
        "l2": math.sqrt(math.fsum(_exactly(part, part["l2"] ** 2) for part in known)),
    }


def _exactly(part: Cells, number: float) -> float:
    """Return a sum of whole numbers without what the mean's division and the norm's root have rounded."""
    floats = (part["dtype"] or "float").startswith(("float", "bfloat", "complex"))
    return number if floats or not math.isfinite(number) else float(round(number))


def total_loss(parts: list[Cells], over: int) -> Cells:
    """Return the sum of losses over a number: 1 for micro-batches, that of ranks for ranks."""
    counts = {name: [part[name] for part in parts] for name in ("nan", "pos_inf", "neg_inf")}
    counted = {name: None if None in found else sum(found) for name, found in counts.items()}
    if any(part["mean"] is None for part in parts):  # one is not finite, and so is the sum
        unknown = dict.fromkeys(("min", "max", "mean", "l2", "sketch", "hash", "tensor"))
        return parts[0] | counted | unknown | {"producer": -1}
    loss = math.fsum(part["mean"] for part in parts) / over
    found = {"min": loss, "max": loss, "mean": loss, "l2": abs(loss), "sketch": None, "hash": None, "tensor": None}
    return parts[0] | found | {"producer": -1}
