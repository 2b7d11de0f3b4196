"""Weights that something else than an optimizer has changed: a script that begins a layer anew, clips or swaps weights."""

from __future__ import annotations

import math

from bitwitness.monitor.rules.rule import View, named
from bitwitness.monitor.series import SeriesKey

_ROUNDING = 1e-3  # of norms in float32


def edited_weights(before: View, spike: View) -> tuple[str, str, SeriesKey] | None:
    """Return weights that something other than an optimizer has changed between two steps.

    An update of r times a weight's norm takes that to no less than 1 - r and no more than 1 + r times what it was.
    """
    numbers, ratios = spike.numbers, {}
    for place in numbers.places("update"):
        ratios[numbers.keys[place].name] = float(numbers.value[place])
    for place in numbers.places("param"):
        key, ratio = numbers.keys[place], ratios.get(numbers.keys[place].name, math.nan)
        was = before.numbers.l2[place] if place < len(before.numbers.keys) else math.nan
        now = numbers.l2[place]
        if not (was > 0 and now > 0 and ratio < 1):
            continue
        if not now / (1 + ratio) * (1 - _ROUNDING) <= was <= now / (1 - ratio) * (1 + _ROUNDING):
            text = (
                f"{named(key)} were changed between steps {before.numbers.step} and {numbers.step}, not by the optimizer: from "
                f"{was:.4g} to {now:.4g}, and its update was {ratio:.2g} of that"
            )
            return "edited_weights", text, key
    return None
