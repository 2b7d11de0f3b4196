"""What a model is given that was computed before it, in each run's own precision: by another model, or by the script."""

from __future__ import annotations

from bitwitness.comparison.differences import Differences

_ROUNDED = 4.0
"""Roundings of the coarser dtype that are left in it: of noise that is drawn beside two projections, say. Seen: 0.8."""


def computed_before(differences: Differences) -> dict[str, float]:
    """Return by how much rounding lets such inputs differ, by their names; empty for runs of one precision.

    Gradients come back to them, as modules that read them show: a batch has none.
    """
    if differences.precisions is None:
        return {}
    text = differences.a.text
    modules = [pair.a for pair in differences.alignment.pairs if pair.a.kind == "module"]
    back = {(one.module, one.call, text("slot", row)) for one in modules for row in one.outputs}
    read = ((one, row) for one in modules for row in one.inputs if text("name", row).startswith("input "))
    with_gradients = {
        text("name", row) for one, row in read if (one.module, one.call, f"grad_{text('slot', row)}") in back
    }
    return dict.fromkeys(with_gradients, _ROUNDED * differences.roundoff_inside)
