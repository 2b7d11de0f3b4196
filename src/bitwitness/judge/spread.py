"""How far apart healthy executions of one model are, parameter by parameter: what later differences are held against."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from bitwitness.judge.fingerprint import MARGIN, Fingerprint
from bitwitness.ranks import Ranks


class HealthySpread:
    """The largest gaps that healthy executions showed, the same ones on every rank.

    Parameters
    ----------
    ranks
        The side channel; what one rank learns, all learn.
    parameters
        Number P of the model's parameters.

    """

    def __init__(self, ranks: Ranks, parameters: int) -> None:
        self._ranks = ranks
        self.gaps = torch.zeros(parameters, dtype=torch.float64)
        """float64 [P], as `Fingerprint.gaps` gives them."""

    @property
    def largest(self) -> float:
        """The largest gap over the parameters."""
        return float(self.gaps.max()) if self.gaps.numel() else 0.0

    def learn(self, original: Fingerprint, here: Fingerprint, elsewhere: Fingerprint, tolerance: float) -> bool:
        """Take in how far apart three executions are; return whether that is more than rounding. Collective.

        What differs by rounding is the model's own spread (a nondeterministic kernel, another algorithm on another
        device). What differs by more than ``tolerance`` is no property of a kernel, and is not learned.
        """
        gaps = torch.maximum(original.gaps(here), original.gaps(elsewhere))
        far = bool((gaps > torch.clamp(MARGIN * self.gaps, min=tolerance)).any())
        self._take(torch.zeros_like(gaps) if far else gaps)
        return far

    def learn_algorithm(self, executions: Iterable[Fingerprint | None]) -> None:
        """Take executions that differ, each within its operators' allowance, for another algorithm's; collective."""
        gaps = torch.zeros_like(self.gaps)
        made = [x for x in executions if x is not None]
        for other in made[1:]:
            gaps = torch.maximum(gaps, made[0].gaps(other).nan_to_num(posinf=0.0))
        self._take(gaps)

    def _take(self, gaps: torch.Tensor) -> None:
        self.gaps = torch.maximum(self.gaps, self._ranks.max(gaps).double())
