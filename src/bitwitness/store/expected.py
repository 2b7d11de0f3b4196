"""How long a fault stays unseen at the price that is paid: from measured recall, and from the plan of deep steps.

Two kinds of looks. *Light* sensors look at every step; a fault that they miss in its first step they mostly miss for good, so
that a miss is not counted on to be made good by looking again. *Periodic* looks (a checksum, an exact comparison) come once in
so many steps, and each sees the fault with its own recall.

A fault that stays begins anywhere between two periodic looks, which are ``period`` steps apart: the first comes after
(period + 1) / 2 steps on average, and each miss, of probability 1 - recall, costs a whole period more. Hence

    steps = light x 1 + (1 - light) x ((period + 1) / 2 + period x (1 / recall - 1))

and a fault of one step only is seen with the probability 1 - (1 - light) x (1 - recall / period).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

_REPLICAS = ("replicas",)


@dataclass(frozen=True, slots=True)
class Look:
    """A periodic look: who looks, once in how many steps, what share it sees, and whether the fault still shows by then."""

    by: str
    period: int
    recall: float = 1.0
    stays: bool = False


@dataclass(frozen=True, slots=True)
class Expected:
    """What becomes of one kind of fault.

    Attributes
    ----------
    light
        Share that is seen in the step itself.
    once
        Probability that a fault of one step is ever seen.
    steps
        Expected steps until one that stays is seen, infinite where a share of them never is.
    by
        Who sees it; empty where nobody looks.

    """

    light: float
    once: float
    steps: float
    by: tuple[str, ...]


def expected(light: float, looks: Sequence[Look]) -> Expected:
    """Return what becomes of a fault that the light sensors see with probability ``light``, and these looks sooner or later."""
    missed = 1.0 - light
    once = missed * math.prod(1 - (one.recall if one.stays else one.recall / one.period) for one in looks)
    waits = [(one.period + 1) / 2 + one.period * (1 / one.recall - 1) for one in looks if one.recall > 0]
    steps = light + (missed * min(waits, default=math.inf) if missed else 0.0)
    by = (("light",) if light else ()) + tuple(one.by for one in looks)
    return Expected(light, 1.0 - once, steps, by)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is looked at: one deep step in ``every`` (0: none), one product in ``one_in``; whether that was measured.

    ``on``: the sensors; ``periods``: of those that look once in so many steps of their own; ``peers``: whether ranks compare
    their gradients.
    """

    every: int
    one_in: int = 1
    measured: bool = True
    on: frozenset[str] = frozenset()
    periods: Mapping[str, int] | None = None

    def look(self, name: str, recall: float = 1.0, *, stays: bool = False) -> list[Look]:
        """Return one sensor's looks; none where it is off."""
        period = (self.periods or {}).get(name, self.every * (self.one_in if name == "checksum" else 1))
        return [Look(name, period, recall, stays)] if name in self.on and period > 0 else []


@dataclass(frozen=True, slots=True)
class Fault:
    """A class of faults: where the detection trial planted it, and whose periodic looks see it.

    ``exact``: sensors that compare bits. ``stays``: what went wrong once is wrong from then on, as a weight is.
    """

    name: str
    places: tuple[str, ...] = ()
    product: bool = False
    exact: tuple[str, ...] = ()
    stays: bool = False


FAULTS = (
    Fault("product, forward", ("forward",), product=True),
    Fault("product, backward", ("backward",), product=True),
    Fault("attention", ("forward", "backward"), product=True),
    Fault("any other operator", ("forward", "backward")),
    Fault("activation's gradient", ("activation gradient",)),
    Fault("recomputed activation", ("backward",), exact=("recompute",)),
    Fault("weight's gradient", ("gradient",)),
    Fault("gradient at its use", (), exact=("gradients",)),
    Fault("weight", ("weight",), exact=("replicas", "seal"), stays=True),
    Fault("optimizer's state", (), exact=("optimizer", "replicas", "seal"), stays=True),
    Fault("buffer", (), exact=("replicas", "seal"), stays=True),
    Fault("collective", (), exact=("collective", "replicas")),
    Fault("checkpoint", (), exact=("seal",), stays=True),
    Fault("data", ()),
)
"""In the order of a step. Of two places the one that is seen worse counts."""


@cache
def measured_recall() -> dict[str, Any]:
    """Return what ``bench/detect.py`` measured: shares of harmful faults, by who looked, sort and place."""
    found: dict[str, Any] = json.loads(files("bitwitness.store").joinpath("recall.json").read_text(encoding="utf-8"))
    return found


def all_expected(plan: Plan, recall: Mapping[str, Any] | None = None) -> dict[str, dict[str, Expected]]:
    """Return, by class of faults and by sort (``flip``, ``pattern``), what becomes of them under a plan."""
    known = measured_recall() if recall is None else recall
    light = known["light"]["four ranks" if "peers" in plan.on else "one process"]
    watched = "trend" in plan.on
    return {
        fault.name: {sort: _expected(fault, plan, light[sort], known["checksum"][sort], watched) for sort in light}
        for fault in FAULTS
    }


def _expected(fault: Fault, plan: Plan, light: Mapping[str, float], checksum: float, watched: bool) -> Expected:
    seen = min((light[place] for place in fault.places), default=0.0) if watched else 0.0
    looks = plan.look("checksum", checksum) if fault.product else []
    for name in fault.exact:
        # A rank whose collective or optimizer went wrong holds other weights from then on.
        looks += plan.look(name, stays=fault.stays or name in _REPLICAS)
    return expected(seen, looks)


def plan_of(table: Mapping[str, Any]) -> Plan | None:
    """Return the plan that a table of coverage tells of; None where it tells of none, as one of an older release."""
    sensors, price = table.get("sensors"), table.get("price")
    if (
        not isinstance(sensors, Mapping)
        or not isinstance(price, Mapping)
        or not isinstance(sensors.get("on"), Sequence)
    ):
        return None
    on = frozenset(map(str, sensors["on"])) - set(sensors.get("off") or ())
    periods = {str(name): int(steps) for name, steps in (sensors.get("periods") or {}).items()}
    every = price.get("deep_every", price.get("deep_every_at_most"))
    if not isinstance(every, int):
        return None
    one_in = int(price.get("one_in", 1))
    return Plan(every, one_in, "deep_every" in price, on, periods)
