"""A recording without the micro-batches from which no gradient comes back to the model.

Where one script calls a model without gradients, which is not recorded, and another detaches what it returns, only the second
has that call; the backward of another model, which came of it, makes a micro-batch of it.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from bitwitness.comparison.matching.filtered import COMPUTED, Filtered, with_micros
from bitwitness.comparison.matching.frame import StepFrame


class WithoutIdle(Filtered):
    """A `bitwitness.store.source.Source` of another one's micro-batches that have a backward of the model, numbered anew."""

    def table(self, rank: int, step: int) -> pa.Table:
        """Return a step's rows without those of idle micro-batches."""
        table = self._source.table(rank, step)
        left_out = idle(StepFrame(table))
        if not left_out:
            return table
        micro = np.asarray(table.column("micro").fill_null(0).combine_chunks())
        computed = np.isin(np.array(table.column("kind").to_pylist(), dtype=object), COMPUTED)
        kept = np.flatnonzero(~(computed & np.isin(micro, left_out)))
        return with_micros(table, micro - np.searchsorted(left_out, micro)).take(pa.array(kept))


def idle(frame: StepFrame) -> list[int]:
    """Return the micro-batches, in order, with no backward inside the model, where others of the step have one."""
    kinds, phases = frame.texts["kind"], frame.texts["phase"]
    inside = kinds.equals("module") | (kinds.equals("op") & ~frame.texts["module"].equals("."))
    reached = np.unique(frame.micro[phases.equals("backward") & inside & ~frame.recomputed])
    computed = np.unique(frame.micro[phases.equals("forward") & (kinds.equals("op") | kinds.equals("saved") | inside)])
    return np.setdiff1d(computed, reached).tolist() if len(reached) else []
