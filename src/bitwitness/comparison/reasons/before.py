"""What a model is given that was computed before it: by another model, whose recording lies beside, or by the script."""

from __future__ import annotations

from bitwitness.comparison.differences import Differences
from bitwitness.comparison.measuring.allowance import roundoff

_ROUNDED = 4.0
"""Roundings of the coarser dtype that are left in it: of noise that is drawn beside two projections, say. Seen: 0.8."""
_UNSEEN, _MOST = 2048.0, 1e-4
"""The same of its own dtype, in runs of one precision: nobody knows of what it was computed; what is wrong is told there."""


def computed_before(differences: Differences) -> dict[str, float]:
    """Return by how much rounding lets such inputs differ, by their names.

    Gradients come back to them, as modules that read them show: a batch has none, as a rule. In runs of one precision rounding
    counts only where the process has other models, which may have computed them.
    """
    text = differences.a.text
    modules = [pair.a for pair in differences.alignment.pairs if pair.a.kind == "module"]
    back = {(one.module, one.call, text("slot", row)) for one in modules for row in one.outputs}
    read = ((one, row) for one in modules for row in one.inputs if text("name", row).startswith("input "))
    found = [row for one, row in read if (one.module, one.call, f"grad_{text('slot', row)}") in back]
    rounded = _ROUNDED * max(differences.roundoff_inside, differences.rewritten)
    unseen = _UNSEEN if found and differences.earlier.has_others else 0.0
    return {text("name", row): max(rounded, min(unseen * roundoff(text("dtype", row)), _MOST)) for row in found}
