"""A recording of an optimizer that evaluates the model several times a step, cut to as many evaluations as another has."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from bitwitness.comparison.matching.filtered import COMPUTED, Filtered, with_micros
from bitwitness.store.source import Source


class FirstMicros(Filtered):
    """A `bitwitness.store.source.Source` of another one's first evaluations in each step.

    What belongs to a step as a whole, its gradients and updates, is kept, as if it belonged to the first.
    """

    def __init__(self, source: Source, count: int) -> None:
        super().__init__(source)
        self._count = count

    def table(self, rank: int, step: int) -> pa.Table:
        """Return a step's rows without those of further evaluations."""
        table = self._source.table(rank, step)
        kinds = np.array(table.column("kind").to_pylist(), dtype=object)
        computed, updates = np.isin(kinds, COMPUTED), kinds == "optimizer"
        micro = np.asarray(table.column("micro").fill_null(0).combine_chunks())
        # What an optimizer read is recorded after each evaluation, and what it made of that after the last.
        last = micro == micro[updates].max(initial=0)
        kept = np.flatnonzero(np.where(computed, micro < self._count, last | ~updates))
        return with_micros(table, np.where(computed, micro, 0)).take(pa.array(kept))
