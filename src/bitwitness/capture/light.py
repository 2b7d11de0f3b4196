"""What a light step gives the sensors: the local gradients' sizes, on the host, once a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bitwitness.finding import Finding, Severity
from bitwitness.site import Site

Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Looks:
    """What M modules computed in one step, as far as it was read.

    ``figures``: float64 [2, 4, M], of results and of the gradients that came back to them (divided by the loss scale): largest
    magnitude, root mean square, largest norm of a row, share of exact zeros. NaN where a module did not run.
    """

    modules: tuple[str, ...]
    figures: Vector


@dataclass(frozen=True, slots=True)
class LightStep:
    """One rank's local gradients of one step, before reduction, clipping and unscaling.

    ``l2`` and ``absmax``: float64 [P], divided by the loss scale; ``names``: the P parameters' paths; ``losses``: the
    arguments of the step's ``backward()`` calls that are scalars, divided by the loss scale. ``scaled`` tells that a
    gradient scaler is at work, under which an overflow is ordinary and the step is skipped by it; ``scale`` is its loss scale.
    ``buffers`` and ``reduced``: names of buffers, and of gradients after the reduction across ranks, that are not finite
    (while the local ones are). ``looks``: at modules' results, where these are looked at. ``weights``: the parameters' L2 and
    largest value as the step began, float64 [2, P], where they were read.
    """

    step: int
    rank: int
    names: tuple[str, ...]
    l2: Vector
    absmax: Vector
    losses: tuple[float, ...] = ()
    scaled: bool = False
    scale: float = 1.0
    buffers: tuple[str, ...] = ()
    reduced: tuple[str, ...] = ()
    looks: Looks | None = None
    weights: Vector | None = None

    @property
    def finite_here(self) -> bool:
        """Whether this rank's own losses, gradients and buffers are finite."""
        return not self.buffers and bool(np.isfinite(self.losses).all() and np.isfinite(self.absmax).all())

    @property
    def finite(self) -> bool:
        """Whether the gradients are, too, that the ranks share."""
        return self.finite_here and not self.reduced

    def site(self, index: int) -> Site:
        """Return the site of a parameter's gradient."""
        return Site.of_parameter(self.names[index], "grad").at(rank=self.rank, step=self.step)

    def finding(self, sensor: str, index: int, message: str, evidence: dict[str, object]) -> Finding:
        """Return a suspicion about one parameter's gradient."""
        evidence = {"l2": float(self.l2[index]), "absmax": float(self.absmax[index]), **evidence}
        return Finding(sensor, self.site(index), Severity.WARNING, message, evidence, self.step, self.rank)


def log_sizes(light: LightStep) -> Vector:
    """Return ln absmax, ln l2 and their difference, float64 [3, P]; NaN where a gradient is zero or not finite."""
    with np.errstate(divide="ignore", invalid="ignore"):
        top = np.log(light.absmax)
        norm = np.log(light.l2)
        sizes = np.stack([top, norm, top - norm])
    sizes[~np.isfinite(sizes)] = np.nan
    return sizes
