"""How much of each test's trials is tried: a choice of them, or all where TEST_EVERYTHING is 1, as `make campaign` sets it."""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")
EVERYTHING = os.environ.get("TEST_EVERYTHING") == "1"


def chosen(everything: T, short: T) -> T:
    """Return all trials, or the choice that `make test` tries."""
    return everything if EVERYTHING else short
