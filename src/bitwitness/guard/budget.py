"""What the guard costs, and how many deep steps that leaves room for.

The user states a price, a share of the training's time. Light steps cost what they cost; what is left of the price buys deep
steps: the guard measures how much longer a deep step takes than a light one, and spaces them so that the price holds. One
deep step in `RAREST` is the least that is done, whatever it costs: what is never looked at is never found. Only where even
that would take a `_DEAREST` share of the time (small tensors, whose checks cost a call each) does a deep step look at a
share of the products, by turns, one in `_SMALLEST_SHARE` at the least. The report then says that the price is exceeded.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Any

RAREST = 100  # steps: of a fault that stays, a hundred steps are lost at the most until one of them is looked at
_CLOSEST = 2  # light steps must go on, to be compared with
_DEAREST = 0.1  # of the training's time: every product is looked at in `RAREST` steps as long as that costs less
_SMALLEST_SHARE = 4  # one product in so many is looked at, at the least
_STEPS = 64  # light steps, and half as many deep ones, that the estimates rest on


@dataclass(frozen=True, slots=True)
class Plan:
    """What all ranks do: one deep step in ``every``, looking at one product in ``one_in``."""

    every: int
    one_in: int = 1


@dataclass(slots=True)
class Budget:
    """Measures one rank's steps and proposes a plan.

    Parameters
    ----------
    price
        The share of the training's time that the guard may take.

    All times are seconds by `tap.timer.stopwatch`.
    """

    price: float
    _light: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS))
    _own: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS))
    _whole: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS))
    _deep: deque[tuple[float, float, int]] = field(default_factory=lambda: deque(maxlen=_STEPS // 2))

    def note_light(self, guarded: float, own: float, whole: float) -> None:
        """Note a light step: from its first forward to the end of its hold, the guard's own part, and step to step."""
        self._light.append(guarded)
        self._own.append(own)
        self._whole.append(whole)

    def note_deep(self, guarded: float, checking: float, one_in: int) -> None:
        """Note a deep step, of which the checks themselves took ``checking``, one product in ``one_in`` being checked."""
        self._deep.append((guarded, checking, one_in))

    @property
    def ready(self) -> bool:
        """Whether enough was measured to propose anything."""
        return len(self._deep) >= 2 and len(self._light) >= 4

    @property
    def light_share(self) -> float:
        """The part of the training's time that light steps take."""
        whole = self._usual_step()
        return median(self._own) / whole if whole else 0.0

    def propose(self) -> Plan:
        """Return the plan that spends the price, as far as this rank can tell."""
        if not self.ready:
            return Plan(0)
        fixed, checks = self._deep_cost()
        left = max(1e-9, self.price - self.light_share) * self._usual_step()
        every = math.ceil((fixed + checks) / left)
        if every <= RAREST:
            return Plan(max(_CLOSEST, every))
        most = max(_DEAREST * self._usual_step(), left) * RAREST
        affordable = max((most - fixed) / checks, 1e-9) if checks > 0 else 1.0
        return Plan(RAREST, min(_SMALLEST_SHARE, math.ceil(1.0 / affordable)))

    def report(self, plan: Plan) -> dict[str, Any]:
        """Return what was measured and what it buys, ready for JSON."""
        if not self.ready or not plan.every:
            return {"price": self.price, "measured": None, "deep_every_at_most": RAREST, "one_in": _SMALLEST_SHARE}
        fixed, checks = self._deep_cost()
        deep = (fixed + checks / plan.one_in) / plan.every / self._usual_step()
        return {
            "price": self.price,
            "measured": round(self.light_share + deep, 5),
            "light": round(self.light_share, 5),
            "deep_step_costs": round((fixed + checks / plan.one_in) / self._usual_step(), 4),
            "deep_every": plan.every,
            "products_checked": f"1 in {plan.one_in}",
            "one_in": plan.one_in,
            "exceeded": self.light_share + deep > 1.2 * self.price,  # a fifth more is within what these times spread
            "persistent_wrong_product_seen_within": plan.every * plan.one_in,
            "corrupt_replica_seen_within": plan.every,
        }

    def _usual_step(self) -> float:
        return median(self._whole) if self._whole else 0.0

    def _deep_cost(self) -> tuple[float, float]:
        """Return a deep step's extra seconds: what does not depend on how many products are checked, and the checks."""
        usual = median(self._light)
        checks = median(checking * one_in for _, checking, one_in in self._deep)
        fixed = median(guarded - usual - checking for guarded, checking, _ in self._deep)
        return max(fixed, 0.05 * checks), checks  # a difference of medians: noise may leave less than any step costs
