"""What happened to all gradients at once, as it is found and told."""

from __future__ import annotations

from dataclasses import dataclass

OF_ALL_GRADIENTS = ("scaled", "clipped", "kept", "dropped", "weighed", "loss", "nonfinite", "underflow")
"""Kinds of what happened to all gradients at once."""
SOME_FACTOR = "a factor of the loss, of its gradient (a hook), or another number of terms in its mean"
"""What is said of a factor whose cause is not known."""


@dataclass(frozen=True, slots=True)
class Cause:
    """What happened to all gradients: ``stage`` is the first of `STAGES` that shows it, ``row`` the first row of A there.

    ``side`` and ``stack``: the run and the call that it comes from, where that is known.
    """

    kind: str
    stage: str
    text: str
    row: int
    times: float
    side: str = ""
    stack: int = -1
