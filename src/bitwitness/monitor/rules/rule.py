"""What a rule is given of a step, and what it says."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from bitwitness.config.monitoring import MonitorConfig
from bitwitness.finding import Severity
from bitwitness.monitor.movement import Moved
from bitwitness.monitor.series import SeriesKey, StepNumbers

CAUSAL = (
    "activation",
    "module",
    "training",
    "activation_grad",
    "grad",
    "comm",
    "grad_reduced",
    "moment1",
    "moment2",
    "update",
    "param",
)
"""Kinds in the order in which a step makes them: the first that goes wrong is nearest to the origin."""
OVERFLOWING = ("grad", "grad_reduced", "activation_grad")
"""What overflows now and then under a gradient scaler, which skips such steps."""
_NUMBER = re.compile(r"\d+")
_LOSS = 8  # numbers
_NAMED = 8  # others that are named beside the first


@dataclass(frozen=True)
class Alert:
    """What a rule says of a step: one thing, with what else moved in its evidence."""

    rule: str
    key: SeriesKey
    message: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    severity: Severity = Severity.WARNING


@dataclass(frozen=True)
class Peers:
    """A rank's sizes against the mean of the other ranks', [F], and how far those are apart among themselves."""

    keys: list[SeriesKey]
    distance: NDArray[np.float64]
    spread: NDArray[np.float64]
    ranks: int

    def of(self, wanted: Callable[[SeriesKey], bool]) -> Peers:
        """Return the same of some series only."""
        kept = np.array([wanted(key) for key in self.keys], dtype=bool)
        keys = [key for key, keep in zip(self.keys, kept, strict=True) if keep]
        return replace(self, keys=keys, distance=self.distance[kept], spread=self.spread[kept])

    @property
    def others(self) -> str:
        """Return how a message calls what the other ranks have."""
        return "the other rank's" if self.ranks == 2 else f"the other {self.ranks - 1} ranks'"

    @property
    def which(self) -> str:
        """Say where there are only two that either may be the one that left."""
        return " (of two ranks either may be the one that went astray)" if self.ranks == 2 else ""


@dataclass(frozen=True)
class View:
    """One step as rules see it; ``moved`` by kind."""

    numbers: StepNumbers
    moved: Mapping[str, Moved] = field(default_factory=dict)

    @cached_property
    def overflowed(self) -> bool:
        """Whether a scaler skips this step: what is left of its gradients is no measure of them."""
        numbers = self.numbers
        if not numbers.scaled:
            return False
        bad = (np.nan_to_num(numbers.nan) > 0) | (np.nan_to_num(numbers.inf) > 0)
        keys = [numbers.keys[i] for i in np.flatnonzero(bad)]
        return any(key.kind in OVERFLOWING for key in keys) and not any(self.was_used(key) for key in keys)

    def was_used(self, key: SeriesKey) -> bool:
        """Tell whether an optimizer has used a parameter's gradient in this step: no scaler kept it from that."""
        return key.kind == "grad_reduced" and key.name in self.updated

    @cached_property
    def updated(self) -> frozenset[str]:
        """The parameters that an optimizer has stepped, as far as updates or moments are looked at."""
        keys = (self.numbers.keys[i] for i in self.numbers.order)
        return frozenset(key.name for key in keys if key.kind in ("update", "moment1", "moment2"))

    @cached_property
    def losses(self) -> NDArray[np.bool_]:
        """Which series are of a few numbers that the model as a whole takes or returns, [S]: its loss, and no layer's work."""
        of_root = np.array([key.name == "." for key in self.numbers.keys], dtype=bool)
        few: NDArray[np.bool_] = of_root & (np.nan_to_num(self.numbers.count) < _LOSS)
        return few

    @cached_property
    def _order(self) -> dict[int, int]:
        return {int(place): number for number, place in enumerate(self.numbers.order)}

    def turn(self, place: int) -> tuple[float, int]:
        """Return when in the step a number came about: by kind, then as the step made it."""
        return _turn(self.numbers.keys[place]), self._order.get(place, len(self._order))

    def first(self, places: Iterable[int]) -> list[int]:
        """Return places in causal order."""
        return sorted(places, key=self.turn)


def _turn(key: SeriesKey) -> float:
    """Return when in a step a number comes about; the norm is made of the gradients."""
    return CAUSAL.index("grad_reduced") + 0.5 if key.metric == "grad_norm" else CAUSAL.index(key.kind)


class Rule:
    """Tells of each step what is unusual in it; a function of the steps that it was shown, and of nothing else."""

    name: ClassVar[str]
    rate: ClassVar[float]
    """False alarms for each step of a series that it is set for."""

    def __init__(self, config: MonitorConfig) -> None:
        self._config = config

    def look(self, view: View) -> list[Alert]:
        """Return alerts about a step, at most one: the first in causal order, what else moved in its evidence."""
        del view
        return []

    def compare(self, peers: Peers) -> list[Alert]:
        """Return alerts about how this rank lay among the others at a step before; most rules have none."""
        del peers
        return []

    def alert(self, key: SeriesKey, message: str, others: Iterable[SeriesKey] = (), **evidence: Any) -> Alert:
        """Return an alert."""
        also = [str(other) for other in others if other != key]
        more = {"also": also[:_NAMED], "also_count": len(also)} if also else {}
        tail = f" (and {len(also)} more series)" if also else ""
        return Alert(
            self.name, key, message + tail, {"series": str(key), **evidence, **more, "false_alarm_rate": self.rate}
        )


def named(key: SeriesKey) -> str:
    """Return how a message calls a series."""
    words = {
        "activation": "activation of",
        "activation_grad": "gradient of the activation of",
        "grad": "local gradient of",
        "grad_reduced": "gradient of",
        "param": "weights of",
        "moment1": "first moment of",
        "moment2": "second moment of",
        "update": "update of",
        "comm": "collective",
        "module": "metric of",
        "training": "the step's",
    }
    tail = f" ({key.slot})" if key.slot else ""
    if key.kind == "training":
        return f"the {key.metric}"
    return f"{words.get(key.kind, key.kind)} {key.name}{tail}"


def brothers(name: str) -> str:
    """Return a name but for its numbers: the same in each layer, of each of a mixture's experts."""
    return _NUMBER.sub("*", name)
