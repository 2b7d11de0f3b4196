"""Whether a device that is emulated, and computes wrongly on purpose, is at work: what is concluded then says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_declared: list[str] = []


@contextmanager
def injecting(what: str) -> Iterator[None]:
    """Say that faults are injected in this process, inside; ``what``: which, in a few words."""
    _declared.append(what)
    try:
        yield
    finally:
        _declared.remove(what)


def injected() -> str:
    """Return which faults are injected now; empty where none is."""
    return "; ".join(_declared)
