"""When a fault strikes: its steps, its probability, and how often it struck already."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bitwitness.inject.faults import Fault
from bitwitness.site import Site
from bitwitness.tap.operators import OpCall
from bitwitness.tap.ownwork import in_replay


@dataclass(frozen=True, slots=True)
class Firing:
    """A fault that struck. ``changed`` elements have other bits now; 0 where the fault was masked."""

    step: int
    site: Site
    fault: int
    changed: int


class Trigger:
    """One fault of one device, with random numbers of its own, the same in every run with the same seed.

    The training draws from others than what is executed besides, so that it is struck alike whether a guard asks or not.
    """

    def __init__(self, fault: Fault, index: int, *, seed: int, rank: int) -> None:
        self.fault = fault
        self.index = index
        self.fired = 0
        self._of_training = np.random.default_rng([seed, rank, index])
        self._of_others = np.random.default_rng([seed, rank, index, 1])

    def rng(self, *, again: bool) -> np.random.Generator:
        """Return the random numbers of the training, or of what is executed again."""
        return self._of_others if again else self._of_training

    def due(self, step: int) -> bool:
        """Tell whether the fault can strike in a step."""
        return (self.fault.times is None or self.fired < self.fault.times) and self.fault.due(step)

    def draw(self, rng: np.random.Generator) -> bool:
        """Tell whether this execution is struck."""
        return self.fault.probability >= 1.0 or bool(rng.random() < self.fault.probability)


def is_again(call: OpCall) -> bool:
    """Tell whether an operator is not the training's own: of a step that is run again, or of a check."""
    return call.own or in_replay()
