"""What a run folder holds made fit for a report: texts cut and shown, lists and nestings bounded, numbers that JSON can hold.

A run's names and values may come from anybody: a module may be called ``</script>``, and an error may quote ten megabytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from bitwitness.files.shown import shown

_LONGEST = 2000  # characters of a message: a verdict with its line and the injected faults has some 500
_NAME = 200  # of a name
_ITEMS = 200  # of a list or a dictionary
_DEEP = 6
_DIGITS = 20  # of an integer: beyond 64 bits it is no count


def text(value: object, limit: int = _LONGEST) -> str:
    """Return a text with what is not printable as escapes, cut where it is longer than a reader would read."""
    return shown(value if isinstance(value, str) else _written(value), limit)


def name(value: object) -> str:
    """Return a name, cut where it is none that anybody would give."""
    return text(value, _NAME)


def number(value: object) -> str:
    """Return a number short; what is none as a name."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return name(value)
    if isinstance(value, int):
        return str(value) if abs(value) < 10**_DIGITS else "an integer of more than 64 bits"
    return f"{value:.6g}" if math.isfinite(value) else str(value)


def clean(value: Any, depth: int = _DEEP) -> Any:
    """Return evidence as plain JSON of bounded size."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) < 10**_DIGITS else number(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else number(value)
    if depth == 0:
        return "…"
    if isinstance(value, Mapping):
        return {name(key): clean(item, depth - 1) for key, item in islice(value.items(), _ITEMS)}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return [clean(item, depth - 1) for item in islice(value, _ITEMS)]
    return text(value)


def mapping(value: Any) -> Mapping[str, Any]:
    """Return a dictionary as it is, and of anything else an empty one: what is damaged has nothing to tell."""
    return value if isinstance(value, Mapping) else {}


def _written(value: object) -> str:
    try:
        return str(value)
    except (ValueError, RecursionError):  # a number of thousands of digits; containers nested as deeply
        return f"a {type(value).__name__} too large to show"
