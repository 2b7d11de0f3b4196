"""In which dtypes two runs compute, where these are not the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

_MOST = 0.5
"""Share of the products in other dtypes, from which on two runs compute in different precisions throughout."""

Dtypes = tuple[str, str]
"""Run A's and run B's dtype of one value."""


def computed_in(products: Sequence[Dtypes], weights: Sequence[Dtypes]) -> Dtypes | None:
    """Return the dtypes in which the runs compute, A's and B's, where most of their products are in different ones; else None.

    Most: one layer in another dtype than the rest is a difference of its own, and not the runs' precision. A model that casts
    to float32 in many places computes in its weights' dtype all the same, if some products do.

    Parameters
    ----------
    products, weights
        The dtypes of the results of products, and of the parameters that both runs have.

    """
    other = [pair for pair in products if pair[0] != pair[1]]
    if other and len(other) < _MOST * len(products):
        held = [pair for pair in weights if pair[0] != pair[1]]
        other = [pair for pair in other if pair in held] if len(held) >= _MOST * len(weights) else []
    return Counter(other).most_common(1)[0][0] if other else None
