"""When a fault strikes: its steps, its probability, and how often it struck already."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bitwitness.inject.faults import Fault
from bitwitness.site import Site


@dataclass(frozen=True, slots=True)
class Firing:
    """A fault that struck. ``changed`` elements have other bits now; 0 where the fault was masked."""

    step: int
    site: Site
    fault: int
    changed: int


class Trigger:
    """One fault of one device, with random numbers of its own, the same in every run with the same seed."""

    def __init__(self, fault: Fault, index: int, *, seed: int, rank: int) -> None:
        self.fault = fault
        self.index = index
        self.fired = 0
        self.rng = np.random.default_rng([seed, rank, index])

    def due(self, step: int) -> bool:
        """Tell whether the fault can strike in a step."""
        return (self.fault.times is None or self.fired < self.fault.times) and self.fault.due(step)

    def draw(self) -> bool:
        """Tell whether this execution is struck."""
        return self.fault.probability >= 1.0 or bool(self.rng.random() < self.fault.probability)
