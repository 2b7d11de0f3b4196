"""When two things, or two copies of what they held, count as the same."""

from __future__ import annotations

from typing import Any

import torch

from bitwitness.capture.structure import PLAIN
from bitwitness.stats.local import local_parts


def same(a: Any, b: Any) -> bool:
    """Tell whether two references are to the same thing, or to equal plain values."""
    return a is b or (isinstance(a, PLAIN) and type(a) is type(b) and repr(a) == repr(b))  # NaN is what it was


def same_items(a: Any, b: Any) -> bool:
    """Tell whether two containers hold the same things, in the same order where they have one."""
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, set):
        return {id(item) for item in a} == {id(item) for item in b} or a == b
    return len(a) == len(b) and all(map(same, a, b))


def same_content(a: Any, b: Any) -> bool:
    """Tell whether two copies of what a thing holds are equal (`capture.leaves`)."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same_content(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list):
        return type(a) is type(b) and len(a) == len(b) and all(map(same_content, a, b))
    if hasattr(a, "tobytes"):
        return hasattr(b, "tobytes") and bool(a.tobytes() == b.tobytes())
    return bool(a == b)


def equal_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether two tensors hold the same values, a NaN being what it was."""
    if a.layout is not torch.strided:
        parts = local_parts(a), local_parts(b)
        return len(parts[0]) == len(parts[1]) and all(map(equal_values, *parts))
    if torch.equal(a, b):
        return True
    return a.is_floating_point() and bool(((a == b) | (a.isnan() & b.isnan())).all())
