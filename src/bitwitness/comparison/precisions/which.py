"""In which dtypes two runs compute, where these are not the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bitwitness.comparison.matching.align import Pair
from bitwitness.comparison.matching.frame import StepFrame
from bitwitness.oracle.names import PRODUCTS, canonical

_MOST = 0.5
"""Share of the products in other dtypes, from which on two runs compute in different precisions throughout."""

_BACK = 1.5
"""Seen in first steps: 1.4, of the smallest number of a convolution's weight gradient behind a pooling that chose otherwise."""

Dtypes = tuple[str, str]
"""Run A's and run B's dtype of one value."""


def computed_in(products: Sequence[Dtypes], weights: Sequence[Dtypes]) -> Dtypes | None:
    """Return the dtypes in which the runs compute, A's and B's, where most of their products are in different ones; else None.

    Most: one layer in another dtype than the rest is a difference of its own, and not the runs' precision. A model that casts
    to float32 in many places computes in its weights' dtype all the same; and what keeps its weights in float32 and computes in
    bfloat16 differs from what keeps them in that by the same roundings.

    Parameters
    ----------
    products, weights
        The dtypes of the results of products, and of the parameters that both runs have.

    """
    other = [pair for pair in products if pair[0] != pair[1]]
    if len(other) < _MOST * len(products):
        held = [pair for pair in weights if pair[0] != pair[1]]
        other = ([pair for pair in other if pair in held] or held) if len(held) > _MOST * len(weights) else []
    return Counter(other).most_common(1)[0][0] if other else None


def multiplies(frame: StepFrame, pair: Pair) -> bool:
    """Return whether a node of run A's ``frame`` is a product, or a module that multiplies by a weight of its own."""
    if pair.a.kind == "op":
        return canonical(pair.a.op) in PRODUCTS
    weights = [row for row, _ in pair.inputs if frame.text("slot", row) == "weight"]
    is_product = pair.a.kind == "module" and "Embedding" not in pair.a.op
    return is_product and any(len(frame.shapes[weight]) > 1 for weight in weights)


def room_of(pair: Pair, precisions: Dtypes | None) -> float:
    """Return times what is explained of an operator that is left to it; more than one in the backward of two precisions.

    There single elements, the extremes, differ by more than statistics of the inputs tell.
    """
    return _BACK if precisions is not None and pair.a.phase == "backward" else 1.0
