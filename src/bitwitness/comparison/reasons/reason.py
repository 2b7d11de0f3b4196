"""The kinds of reasons why a node's results differ.

``computed``   inputs agree as far as their changes matter, and the result does not
``argument``   it was called with other arguments (an epsilon, a scale, a learning rate)
``dtype``      it computed in another precision
``source``     it read something that differs and that no recorded operator made: a weight, a buffer, the batch
``view``       it read another part, or another order, of something that agrees, or something else that agrees
``unknown``    the same, and it has no name
``missing``    only one of the runs has it, and what follows differs
``random``     it draws random numbers, and drew others
"""

from __future__ import annotations

from typing import NamedTuple

from bitwitness.comparison.matching.frame import Node

SINCE = "; the runs agreed in it at the end of the step before, so it was changed between these two steps"
"""What is said beside of a weight that the script wrote between two steps."""

OUTSIDE = ", made before the model is called, of which nothing is recorded"
"""What is said beside of an input of the model."""


class Reason(NamedTuple):
    """Why a node's results differ: one of the kinds above, and words.

    ``lone``: the operator that only run ``side`` has; ``rows``: what differs, in A and B, where it is not the node's results.
    """

    kind: str
    text: str
    lone: Node | None = None
    side: str = ""
    rows: tuple[int, int] | None = None
