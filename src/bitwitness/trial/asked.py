"""What is asked of one result: its numbers, the true ones, and how far noise moves them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bitwitness.numerics import HALF
from bitwitness.oracle.opclass import is_elementwise, is_one_function
from bitwitness.trial.call import Results
from bitwitness.trial.figures import parts
from bitwitness.trial.oracle import Oracle

FEW, MANY = 4, 16
"""Noisy runs of which a spread is made: few, and more before anything is called wrong."""
_LEAST, _LARGE = 2, 1 << 17
"""Runs that are enough of so many numbers, whose neighbours in size tell of their spread as well."""
COUNTS = 1e-3
"""Of the largest number of a result, what counts."""
Answer = tuple[str, str, Tensor, Tensor]
"""Verdict, reason, which elements are within what is allowed, and how much that is."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One result of a call beside its truth.

    Attributes
    ----------
    slot
        Its name.
    value, truth
        The device's and the oracle's numbers, float64 of one shape.
    dtype
        By whose units it is judged.
    stored
        In which the device returned it.
    right
        Which elements are the number of it that is nearest to the truth.
    oracle, of
        Whose runs with noise are taken, and the result that is meant of a run, None if it has none.

    """

    slot: str
    value: Tensor
    truth: Tensor
    dtype: torch.dtype
    stored: torch.dtype
    right: Tensor
    oracle: Oracle
    of: Callable[[Results], Tensor | None]

    @property
    def draws(self) -> tuple[int, ...]:
        """How many noisy runs are made, one number after the other until they suffice."""
        return (_LEAST, FEW, MANY) if self.truth.numel() >= _LARGE else (FEW, MANY)

    @property
    def is_wider(self) -> bool:
        """Whether it is kept in a wider dtype than the one by whose units it is judged: nothing has rounded it to that."""
        return self.dtype in HALF and self.stored not in HALF

    @property
    def is_of_one_function(self) -> bool:
        """Whether it is what one elementary function gives: no gradient, and nothing else that rounds on its way."""
        return self.slot.startswith("out") and is_one_function(self.oracle.mode.forward)

    @property
    def is_elementwise(self) -> bool:
        """Whether it is an output of which each number is made of one number of each input."""
        return self.slot.startswith("out") and is_elementwise(self.oracle.mode.forward)

    def noisy(self, *, stepwise: bool, draws: int) -> list[Tensor]:
        """Return the result in several runs with random roundings, float64."""
        return self.these(self.oracle.noisy(stepwise=stepwise, draws=draws))

    def these(self, runs: list[Results]) -> list[Tensor]:
        """Return the result in each of these runs, float64."""
        return [parts(t) for r in runs if (t := self.of(r)) is not None]
